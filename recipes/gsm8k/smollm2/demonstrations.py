"""GSM8K's solutions as conversations with a calculator, and its questions as rows for training and evaluation.

    python recipes/gsm8k/smollm2/demonstrations.py --train gsm8k_train.jsonl --test gsm8k_test.jsonl --out data/smollm2

The solutions carry calculator annotations (`48/2 = <<48/2=24>>24 clips`; Cobbe et al. 2021, section 4.3): each becomes
one call of the calculator with its left side, the tool's answer is the calculator's own, and what follows continues
the sentence. Written are `demos.jsonl` (training solutions), `held_out.jsonl` (the last `--held-out` of them, not in
the former), and the questions with their final answers alone: `train.parquet` and `held_out.parquet` of the same
problems, `test.parquet`. With `--max-calls` the training questions are those whose demonstration has at most as many
calls: what a weak model solves now and then, which is what it learns from. `--demo-max-calls` is the same for the
demonstrations: short ones are more of them in the same time.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prepare import DATA_SOURCE, final_answer, read_source

from verl_mt.errors import DataError, ToolCallError, VerlMTError
from verl_mt.tools.calculator import calculate

SYSTEM = "Solve the problem step by step with the calculator. End with a line `#### <number>`."
_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")


def prompt(question: str) -> list[dict[str, str]]:
    """What the model is given."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.strip()}]


def demonstration(question: str, solution: str) -> list[dict[str, Any]] | None:
    """The whole conversation; None where an annotation is not what the calculator says, or there is none.

    Raises:
        DataError: the solution has no final answer.
    """
    truth = final_answer(solution)
    body = solution.rpartition("####")[0].strip()
    messages: list[dict[str, Any]] = list(prompt(question))
    place, calls = 0, 0
    for found in _ANNOTATION.finditer(body):
        value = _value(found[1])
        if value is None or not _same(value, found[2]):
            return None
        call = {"name": "calculator", "arguments": {"expression": found[1].strip()}}
        said = body[place : found.start()].strip()
        messages.append({"role": "assistant", "content": said, "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "calculator", "content": value})
        place, calls = found.end(), calls + 1
    if not calls:
        return None
    rest = body[place:].strip()
    messages.append({"role": "assistant", "content": f"{rest}\n#### {truth}" if rest else f"#### {truth}"})
    return messages


def _value(expression: str) -> str | None:
    try:
        return calculate(expression.strip())
    except ToolCallError:
        return None


def _same(value: str, annotated: str) -> bool:
    """Annotations round: 0.33 for 1/3 is the calculator's answer, 0.5 is not."""
    try:
        exact, said = Fraction(value), Fraction(annotated.replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return False
    decimals = len(annotated.strip().partition(".")[2])
    return abs(exact - said) * 10**decimals < 1


def row(question: str, solution: str, *, split: str, index: int) -> dict[str, Any]:
    """A row without its solution."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": prompt(question),
        "reward_model": {"style": "rule", "ground_truth": final_answer(solution)},
        "extra_info": {"split": split, "index": index},
    }


def write(
    problems: Sequence[dict[str, Any]],
    test: Sequence[dict[str, Any]],
    held_out: int,
    out: Path,
    *,
    max_calls: int | None = None,
    demo_max_calls: int | None = None,
) -> str:
    """Write the five files; returns one line about them.

    Raises:
        DataError: no training question or no demonstration is left.
    """
    made = [demonstration(p["question"], p["answer"]) for p in problems]
    first = len(problems) - held_out
    shown = [(p, m) for p, m in zip(problems[:first], made) if m is not None]
    train, demos = problems[:first], [m for _, m in shown if demo_max_calls is None or _num_calls(m) <= demo_max_calls]
    if max_calls is not None:
        train = [p for p, m in shown if _num_calls(m) <= max_calls]
    for name, most, kept in (("max-calls", max_calls, train), ("demo-max-calls", demo_max_calls, demos)):
        if most is not None and not kept:
            raise DataError(f"--{name} {most}: no demonstration has so few")
    out.mkdir(parents=True, exist_ok=True)
    held = [m for m in made[first:] if m is not None]
    for name, some in (("demos", demos), ("held_out", held)):
        text = "".join(json.dumps({"messages": m}, ensure_ascii=False) + "\n" for m in some)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    for split, some in (("train", train), ("held_out", problems[first:]), ("test", test)):
        rows = [row(p["question"], p["answer"], split=split, index=k) for k, p in enumerate(some)]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")
    left = sum(m is None for m in made)
    return (
        f"{len(demos)} demonstrations, {len(held)} held out ({left} solutions left out: no annotation, or one that the "
        f"calculator does not confirm), {len(train)} training questions, {len(test)} test questions -> {out}"
    )


def _num_calls(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(message.get("tool_calls", ())) for message in messages)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", default=DATA_SOURCE, help="JSONL file, or a name on the hub")
    parser.add_argument("--test", default=DATA_SOURCE, help="the same")
    parser.add_argument("--held-out", type=int, default=256, help="training solutions that measure the cold start")
    parser.add_argument("--max-calls", type=int, help="training questions: only those with a demonstration this short")
    parser.add_argument("--demo-max-calls", type=int, help="demonstrations: only those with at most as many calls")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    try:
        problems = [problem for _, problem in read_source(args.train, "train")]
        test = [problem for _, problem in read_source(args.test, "test")]
        if not 0 < args.held_out < len(problems):
            raise DataError(f"--held-out {args.held_out}: the training file has {len(problems)} problems")
        most = {"max_calls": args.max_calls, "demo_max_calls": args.demo_max_calls}
        print(write(problems, test, args.held_out, args.out, **most))
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
