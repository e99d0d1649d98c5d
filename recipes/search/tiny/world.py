"""Boxes and what is in them: a search task small enough for a model of a million parameters.

    python recipes/search/tiny/world.py --out data/search_tiny

writes `corpus.jsonl` (a passage per box), `train.parquet` and `val.parquet` (a question per row), and
`corpus_shuffled.jsonl`, in which every box has the contents of another one: what a model still gets right with that
did not come out of the passages.

A box's number decides by its hash to which split it belongs, so no box of `val` occurs in any training.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "verl_mt/boxes"
SYSTEM = "Answer."
SPLITS = {"val": range(2), "warm_start": range(2, 6), "train": range(6, 10)}
"""Tenths of the hash space. `warm_start` feeds the supervised demonstrations of `make_checkpoint.py`, nothing else."""

_THINGS = ("apples", "beads", "books", "cards", "eggs", "keys", "lamps", "maps", "pens", "rings", "shells", "tulips")
_QUESTIONS = (
    "How many {thing} are in box {number}?",
    "There are {thing} in box {number}. How many {thing} are there?",
    "Look into box {number}. How many {thing} are there?",
    "In box {number} are {thing}. How many?",
)


@dataclass(frozen=True)
class Box:
    """A box and what is in it."""

    number: int
    """Four different digits, the first not 0."""
    thing: str
    count: int
    """10 to 99."""

    @property
    def passage(self) -> str:
        """Title and text."""
        return f"box {self.number}\nThere are {self.thing} {self.count}."


@dataclass(frozen=True)
class Question:
    """One question about one box."""

    box: Box
    text: str

    @property
    def answer(self) -> str:
        """The count, as text."""
        return str(self.box.count)

    @property
    def query(self) -> str:
        """What a perfect solver searches for."""
        return f"in box {self.box.number}"


def split_of(number: int) -> str:
    """The split that owns a box; stable across processes and versions of Python."""
    bucket = int.from_bytes(hashlib.sha256(f"box {number}".encode()).digest()[:8], "big") % 10
    return next(split for split, buckets in SPLITS.items() if bucket in buckets)


def boxes(seed: int, split: str) -> list[Box]:
    """All boxes of a split in random order, each with random contents."""
    rng = random.Random(f"boxes/{split}/{seed}")  # a string: seeded by its SHA-512, the same everywhere
    numbers = [n for n in range(1000, 10000) if len(set(str(n))) == 4 and split_of(n) == split]
    rng.shuffle(numbers)
    return [Box(number, rng.choice(_THINGS), rng.randint(10, 99)) for number in numbers]


def ask(box: Box, rng: random.Random) -> Question:
    """One question about the box."""
    return Question(box, rng.choice(_QUESTIONS).format(thing=box.thing, number=box.number))


def questions(seed: int, split: str) -> Iterator[Question]:
    """Endless questions about the boxes of a split; every round over the boxes has new contents."""
    rng = random.Random(f"questions/{split}/{seed}")
    for turn in itertools.count():
        yield from (ask(box, rng) for box in boxes(seed * 1000 + turn, split))


def row(question: Question, split: str, index: int) -> dict[str, Any]:
    """One row in verl's schema."""
    truth = {"target": [question.answer]}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question.text,
            "box": question.box.number,
        },
    }


def with_contents_of_others(of: list[Box], seed: int) -> list[Box]:
    """The same numbers, every box with the contents of another one."""
    order = list(range(len(of)))
    random.Random(f"shuffled/{seed}").shuffle(order)
    source = dict(zip(order, order[1:] + order[:1]))  # one cycle through all: no box keeps its own
    return [Box(box.number, of[source[k]].thing, of[source[k]].count) for k, box in enumerate(of)]


def write_corpus(file: Path, of: list[Box]) -> None:
    """JSON Lines for `python -m verl_mt.retrieval`."""
    with file.open("w") as lines:
        lines.writelines(json.dumps({"id": str(box.number), "contents": box.passage}) + "\n" for box in of)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of contents and questions; the splits never change")
    parser.add_argument("--train", type=int, default=1800, help="questions, each about another box")
    parser.add_argument("--val", type=int, default=500, help="questions, each about another box")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    in_corpus: list[Box] = []
    for split, number in (("train", args.train), ("val", args.val)):
        of = boxes(args.seed, split)
        rng = random.Random(f"rows/{split}/{args.seed}")
        if number > len(of):
            parser.error(f"--{split} {number}: there are only {len(of)} boxes in this split")
        rows = [row(ask(box, rng), split, index) for index, box in enumerate(of[:number])]
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{split}.parquet")
        in_corpus += of
    write_corpus(args.out / "corpus.jsonl", in_corpus)
    write_corpus(args.out / "corpus_shuffled.jsonl", with_contents_of_others(in_corpus, args.seed))
    print(f"{args.train} + {args.val} questions about {len(in_corpus)} boxes -> {args.out}")


if __name__ == "__main__":
    main()
