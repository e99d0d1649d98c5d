"""GSM8K as parquet rows in verl's schema, with the arguments of the tool and of the interaction.

    python recipes/gsm8k/prepare.py --source gsm8k_train.jsonl --split train --out data/gsm8k/train.parquet
    python recipes/gsm8k/prepare.py --source openai/gsm8k --split test --out data/gsm8k/test.parquet

`--source` is a JSONL file with `question` and `answer`, as OpenAI published it, or the name of a hub data set
(needs `pip install datasets`). `--style tool` asks for tool calls, `--style interaction` for plain answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_mt.errors import DataError, VerlMTError

DATA_SOURCE = "openai/gsm8k"
SYSTEM = {
    "tool": (
        "Solve the problem step by step. Before you give your final answer, check it with the tool "
        "`calc_gsm8k_reward`; if it is wrong, correct your reasoning. End with a line `#### <number>`."
    ),
    "interaction": "Solve the problem step by step. End with a line `#### <number>`.",
}


def final_answer(answer: str) -> str:
    """The number after the last `####`, without thousands separators.

    Raises:
        DataError: there is none.
    """
    _, mark, number = answer.rpartition("####")
    if not mark or not number.strip():
        raise DataError(f"no '#### <number>' in the answer {answer[-60:]!r}")
    return number.strip().replace(",", "")


def make_row(
    question: str, answer: str, *, split: str, index: int, style: str, system: str | None = None
) -> dict[str, Any]:
    """One row in verl's schema. `system` replaces the style's system message."""
    truth = final_answer(answer)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "system", "content": system or SYSTEM[style]}, {"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": answer,
            "question": question,
            "need_tools_kwargs": style == "tool",
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
            if style == "tool"
            else None,
            "interaction_kwargs": {"name": "gsm8k", "query": question, "ground_truth": truth},
        },
    }


def read_source(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, {question, answer}) of each problem.

    Raises:
        DataError: no such file, or a hub name without the `datasets` package.
    """
    path = Path(source).expanduser()
    if path.suffix == ".jsonl" or path.exists():
        if not path.is_file():
            raise DataError(f"{source} does not exist")
        yield from _read_jsonl(path)
        return
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"{source!r} is not a file; to read it from the hub, pip install datasets") from error
    for number, problem in enumerate(load_dataset(source, "main", split=split)):
        yield f"{source}[{split}] row {number}", problem


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                problem = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: not JSON: {error}; download the file again") from error
            if not isinstance(problem, dict):
                raise DataError(f"{where}: expected an object with question and answer, got {type(problem).__name__}")
            yield where, problem


def make_rows(
    problems: Iterable[tuple[str, dict[str, Any]]], *, split: str, style: str, system: str | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of all problems.

    Raises:
        DataError: names the place of a problem that lacks a column or an answer.
    """
    for index, (where, problem) in enumerate(problems):
        missing = [key for key in ("question", "answer") if not isinstance(problem.get(key), str)]
        if missing:
            raise DataError(f"{where}: no text column {' and '.join(missing)}; it has {sorted(problem)}")
        try:
            yield make_row(problem["question"], problem["answer"], split=split, index=index, style=style, system=system)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", default=DATA_SOURCE)
    parser.add_argument("--split", default="train", choices=("train", "test"))
    parser.add_argument("--style", default="tool", choices=sorted(SYSTEM))
    parser.add_argument("--system", help="a system message instead of the style's own")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--limit", type=int, help="only the first so many problems")
    args = parser.parse_args(argv)
    try:
        problems = islice(read_source(args.source, args.split), args.limit)
        rows = list(make_rows(problems, split=args.split, style=args.style, system=args.system))
        if not rows:
            raise DataError(f"{args.source}: no problems in it")
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), args.out)
    print(f"{len(rows)} rows -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
