"""The training questions that a model now solves and now does not: what it learns from, for a group of samples that are
all right or all wrong has no gradient.

    python -m verl_mt.evaluate experiment=smollm2 --model models/cold/hf \\
        --data data/smollm2/train.parquet --n 4 --out eval/train
    python recipes/gsm8k/smollm2/pick_questions.py --rows data/smollm2/train.parquet --evaluated eval/train \\
        --out data/smollm2/mixed.parquet

With a weak start most groups are all wrong: sampling each question a few times once costs less than sampling it sixteen
times in a step that learns nothing from it. What is kept is what the model can do already, if not always: a run on it
learns to do it more often, and whether that helps with other questions the test set says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare import key, read

from verl_mt.errors import DataError, VerlMTError


def pick(rows: pa.Table, evaluated: str) -> tuple[pa.Table, int]:
    """(The rows whose samples differ, the number of those that were sampled at all.)

    Raises:
        DataError: no row was sampled, or none has samples that differ.
    """
    scores = read(evaluated)
    questions = [next(m["content"] for m in prompt if m["role"] == "user") for prompt in rows["prompt"].to_pylist()]
    known = [scores.get(key(question), []) for question in questions]
    mixed = [place for place, of in enumerate(known) if len({score >= 1 for score in of}) == 2]
    sampled = sum(map(bool, known))
    if not mixed:
        what = f"{sampled} questions, all samples of each alike" if sampled else "no question of these rows was sampled"
        raise DataError(f"{evaluated}: {what}; sample more of them, or more often (--n), or train a better start")
    return rows.take(mixed), sampled


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", required=True, type=Path, help="questions as demonstrations.py wrote them")
    parser.add_argument("--evaluated", required=True, metavar="FOLDER[,FOLDER]", help="what evaluate wrote of them")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    try:
        if not args.rows.is_file():
            raise DataError(f"--rows {args.rows} is not there: demonstrations.py writes it")
        picked, sampled = pick(pq.read_table(args.rows), args.evaluated)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(picked, args.out)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(picked)} of {sampled} questions have samples that differ -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
