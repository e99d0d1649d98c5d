"""Arithmetic word problems for the default task: made by a generator, answered exactly, split by construction.

A problem is a *form* (an expression over two to five numbers), one of its *stories* and numbers that keep every
intermediate result a non-negative integer. Which split a problem belongs to depends on nothing but a hash of its
expression with the numbers filled in, so `12*7+5` is met in exactly one split, whatever story it is wrapped in.
Held out therefore means: same generator, same stories, unseen numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_mt.errors import DataError

DATA_SOURCE = "verl_mt/arithmetic"
SYSTEM = "Answer as #### N."

_SPLITS = {"val": range(2), "warm_start": range(2, 6), "train": range(6, 10)}
"""Tenths of the hash space. `warm_start` feeds the supervised demonstrations of `recipes/tiny`, nothing else."""

_OPERATIONS = (1, 1, 2, 2, 3)
"""How many operations a problem has: each entry equally likely."""

_NAMES = (
    "Ada", "Ben", "Cleo", "Dev", "Elif", "Finn", "Gus", "Hana", "Ivo", "June", "Kofi", "Lena",
    "Milo", "Nora", "Omar", "Pia", "Ravi", "Sara", "Tom", "Uma", "Vera", "Wei", "Yara", "Zoe",
)  # fmt: skip
_THINGS = (
    "apples", "beads", "books", "cards", "ropes", "eggs", "figs", "keys", "lamps", "lemons", "maps", "nuts",
    "pears", "pens", "plums", "rings", "rocks", "shells", "stamps", "tickets", "tiles", "toys", "tulips", "cups",
)  # fmt: skip
_PACKS = ("bags", "boxes", "jars", "trays")

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """One kind of problem."""

    expression: str
    """What a calculator must be asked, with a..e in braces."""
    draw: Callable[[random.Random], Numbers]
    """Numbers for the braces; every intermediate result is a non-negative integer."""
    answer: Callable[..., int]
    """The result for these numbers."""
    stories: tuple[str, ...]
    """Texts with {name}, {other}, {things}, {packs} and the numbers."""

    @property
    def num_operations(self) -> int:
        return sum(self.expression.count(op) for op in "+-*/")


@dataclass(frozen=True)
class Problem:
    """A word problem with its solution."""

    question: str
    expression: str
    answer: int
    num_operations: int


def _sum(rng: random.Random) -> Numbers:
    return rng.randint(2, 80), rng.randint(2, 80)


def _difference(rng: random.Random) -> Numbers:
    b = rng.randint(2, 60)
    return b + rng.randint(1, 40), b


def _product(rng: random.Random) -> Numbers:
    return rng.randint(2, 20), rng.randint(2, 20)


def _quotient(rng: random.Random) -> Numbers:
    b = rng.randint(2, 12)
    return b * rng.randint(2, 15), b


def _sum_minus(rng: random.Random) -> Numbers:
    a, b = rng.randint(2, 60), rng.randint(2, 40)
    return a, b, rng.randint(1, a + b - 1)


def _minus_minus(rng: random.Random) -> Numbers:
    b, c = rng.randint(2, 40), rng.randint(2, 40)
    return b + c + rng.randint(1, 20), b, c


def _product_plus(rng: random.Random) -> Numbers:
    return rng.randint(2, 15), rng.randint(2, 15), rng.randint(2, 60)


def _product_minus(rng: random.Random) -> Numbers:
    a, b = rng.randint(2, 15), rng.randint(3, 15)
    return a, b, rng.randint(1, a * b - 1)


def _sum_times(rng: random.Random) -> Numbers:
    return rng.randint(2, 20), rng.randint(2, 20), rng.randint(2, 12)


def _sum_shared(rng: random.Random) -> Numbers:
    c = rng.randint(2, 10)
    total = c * rng.randint(3, 12)
    a = rng.randint(2, total - 2)
    return a, total - a, c


def _difference_shared(rng: random.Random) -> Numbers:
    c, b = rng.randint(2, 10), rng.randint(2, 40)
    return c * rng.randint(2, 9) + b, b, c


def _two_products(rng: random.Random) -> Numbers:
    return rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 12)


def _product_plus_minus(rng: random.Random) -> Numbers:
    a, b, c = _product_plus(rng)
    return a, b, c, rng.randint(1, min(a * b + c - 1, 99))


def _product_plus_shared(rng: random.Random) -> Numbers:
    while True:
        a, b, d = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 9)
        c = d * rng.randint(1, 12) - a * b % d
        if c >= 2:
            return a, b, c, d


def _sum_minus_times(rng: random.Random) -> Numbers:
    a, b = rng.randint(3, 30), rng.randint(3, 30)
    return a, b, rng.randint(1, a + b - 1), rng.randint(2, 9)


FORMS = (
    Form("{a}+{b}", _sum, lambda a, b: a + b, (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "{name} found {a} {things} and {other} found {b}. How many {things} did they find together?",
        "There are {a} {things} in a box. {name} adds {b} {things}. How many {things} are in the box?",
        "{name} sold {a} {things} on Monday and {b} on Friday. How many {things} did {name} sell in total?",
    )),
    Form("{a}-{b}", _difference, lambda a, b: a - b, (
        "{name} has {a} {things} and gives {b} to {other}. How many {things} are left?",
        "A shop had {a} {things} and sold {b}. How many {things} are left in the shop?",
        "{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have than {other}?",
        "{name} needs {a} {things} and has {b}. How many more {things} does {name} need?",
    )),
    Form("{a}*{b}", _product, lambda a, b: a * b, (
        "{name} has {a} {packs} with {b} {things} each. How many {things} does {name} have?",
        "{name} buys {a} {things} every day for {b} days. How many {things} does {name} buy?",
        "At {a} coins each, how many coins do {b} {things} cost?",
        "There are {a} rows of {b} {things}. How many {things} are there?",
    )),
    Form("{a}/{b}", _quotient, lambda a, b: a // b, (
        "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
        "{name} puts {a} {things} into {b} equal {packs}. How many {things} are in each?",
        "{a} {things} stand in {b} equal rows. How many {things} are in a row?",
        "{name} packs {a} {things}, {b} in a bag. How many bags does {name} fill?",
    )),
    Form("{a}+{b}-{c}", _sum_minus, lambda a, b, c: a + b - c, (
        "{name} has {a} {things}, finds {b} more and gives away {c}. How many {things} are left?",
        "{name} had {a} {things}, bought {b} and lost {c}. How many {things} does {name} have now?",
        "A shop had {a} {things}, got {b} more and sold {c}. How many {things} are left in the shop?",
    )),
    Form("{a}-{b}-{c}", _minus_minus, lambda a, b, c: a - b - c, (
        "{name} has {a} {things}, gives {b} to {other} and loses {c}. How many {things} are left?",
        "A shop had {a} {things} and sold {b} on Monday and {c} on Friday. How many {things} are left?",
        "Of {a} {things}, {b} are red, {c} are blue and the rest are green. How many {things} are green?",
    )),
    Form("{a}*{b}+{c}", _product_plus, lambda a, b, c: a * b + c, (
        "{name} has {a} {packs} with {b} {things} each and finds {c} more. How many {things} does {name} have now?",
        "{name} buys {a} {things} every day for {b} days and gets {c} from {other}. "
        "How many {things} does {name} have?",
        "There are {a} rows of {b} {things} and {c} more in a box. How many {things} are there?",
    )),
    Form("{a}*{b}-{c}", _product_minus, lambda a, b, c: a * b - c, (
        "{name} has {a} {packs} with {b} {things} each and gives away {c}. How many {things} are left?",
        "A shop had {a} {packs} of {b} {things} and sold {c} {things}. How many {things} are left in the shop?",
        "{name} makes {a} {things} every day for {b} days and sells {c}. How many {things} are left?",
    )),
    Form("({a}+{b})*{c}", _sum_times, lambda a, b, c: (a + b) * c, (
        "{name} makes {a} red and {b} blue {things} every day. How many {things} does {name} make in {c} days?",
        "A box holds {a} big and {b} small {things}. How many {things} are in {c} boxes?",
        "{name} and {other} get {a} and {b} {things} a week. How many {things} do they get in {c} weeks?",
    )),
    Form("({a}+{b})/{c}", _sum_shared, lambda a, b, c: (a + b) // c, (
        "{name} has {a} red and {b} blue {things} and shares them equally among {c} friends. "
        "How many {things} does each friend get?",
        "{name} found {a} {things} and {other} found {b}. They put them into {c} equal {packs}. "
        "How many {things} are in each?",
    )),
    Form("({a}-{b})/{c}", _difference_shared, lambda a, b, c: (a - b) // c, (
        "{name} has {a} {things}, keeps {b} and shares the rest equally among {c} friends. "
        "How many {things} does each friend get?",
        "Of {a} {things}, {b} are lost. {name} puts the rest into {c} equal {packs}. How many {things} are in each?",
    )),
    Form("{a}*{b}+{c}*{d}", _two_products, lambda a, b, c, d: a * b + c * d, (
        "{name} has {a} {packs} with {b} {things} each and {other} has {c} {packs} with {d} {things} each. "
        "How many {things} do they have together?",
        "There are {a} rows of {b} red {things} and {c} rows of {d} blue {things}. How many {things} are there?",
    )),
    Form("{a}*{b}+{c}-{d}", _product_plus_minus, lambda a, b, c, d: a * b + c - d, (
        "{name} has {a} {packs} with {b} {things} each, finds {c} more and gives away {d}. "
        "How many {things} are left?",
        "A shop had {a} {packs} of {b} {things}, got {c} more {things} and sold {d}. How many {things} are left?",
    )),
    Form("({a}*{b}+{c})/{d}", _product_plus_shared, lambda a, b, c, d: (a * b + c) // d, (
        "{name} has {a} {packs} with {b} {things} each, finds {c} more and shares them equally among {d} friends. "
        "How many {things} does each friend get?",
    )),
    Form("({a}+{b}-{c})*{d}", _sum_minus_times, lambda a, b, c, d: (a + b - c) * d, (
        "{name} makes {a} red and {b} blue {things} every day and sells {c} of them. "
        "How many {things} are left after {d} days?",
    )),
)  # fmt: skip

_BY_OPERATIONS = {n: [form for form in FORMS if form.num_operations == n] for n in (1, 2, 3)}


def split_of(expression: str) -> str:
    """The split that owns a problem; stable across processes and versions of Python."""
    bucket = int.from_bytes(hashlib.sha256(expression.encode()).digest()[:8], "big") % 10
    return next(split for split, buckets in _SPLITS.items() if bucket in buckets)


def generate(seed: int, split: str) -> Iterator[Problem]:
    """An endless stream of problems of one split (`train`, `val` or `warm_start`); problems may repeat.

    Raises:
        DataError: no such split.
    """
    if split not in _SPLITS:
        raise DataError(f"arithmetic problems: no split {split!r}. Known: {', '.join(_SPLITS)}")
    rng = random.Random(f"{split}/{seed}")  # a string: seeded by its SHA-512, the same everywhere
    while True:
        form = rng.choice(_BY_OPERATIONS[rng.choice(_OPERATIONS)])
        drawn = form.draw(rng)
        numbers = dict(zip("abcd", drawn))
        expression = form.expression.format(**numbers)
        if split_of(expression) != split:
            continue
        name, other = rng.sample(_NAMES, 2)
        words = {"name": name, "other": other, "things": rng.choice(_THINGS), "packs": rng.choice(_PACKS)}
        question = rng.choice(form.stories).format(**words, **numbers)
        yield Problem(question, expression, form.answer(*drawn), form.num_operations)


def rows(num_rows: int, seed: int, split: str) -> list[dict[str, Any]]:
    """`num_rows` different problems in verl's row schema, the same for the same arguments.

    Raises:
        DataError: no such split, or `num_rows` below 1.
    """
    if num_rows < 1:
        raise DataError(f"arithmetic problems: num_rows must be at least 1 (the generator is endless), got {num_rows}")
    made: list[dict[str, Any]] = []
    seen: set[str] = set()
    for problem in generate(seed, split):
        if problem.question not in seen:
            seen.add(problem.question)
            made.append(_row(problem, split, len(made)))
        if len(made) == num_rows:
            break
    return made


def _row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    truth = str(problem.answer)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.question,
            "answer": f"{problem.expression} = {truth}\n#### {truth}",
            "num_operations": problem.num_operations,
            "need_tools_kwargs": False,
            "interaction_kwargs": {"ground_truth": truth},
        },
    }
