"""`python -m verl_mt.report.rows`: print the rollout rows of a run as lines of JSON.

python -m verl_mt.report.rows runs/tiny --step 3               # prints the training rollouts of step 3
python -m verl_mt.report.rows runs/tiny/rollouts/val_000010.parquet
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from verl_mt.data.row_files import RowFile, read_rows, row_files
from verl_mt.data.run_files import json_text
from verl_mt.errors import DataError, VerlMTError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m verl_mt.report.rows", description=__doc__.split("\n")[0])
    parser.add_argument("run", metavar="RUN", help="a run directory, or one file of its rollouts/")
    parser.add_argument("--step", type=int, help="only this step")
    parser.add_argument("--split", default="train", help="only these: train (default), val or val_greedy")
    args = parser.parse_args(argv)
    try:
        for file in _chosen(Path(args.run).expanduser(), args.step, args.split):
            for row in read_rows(file.path):
                sys.stdout.buffer.write(json_text(row) + b"\n")
        sys.stdout.buffer.flush()
        return 0
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _chosen(run: Path, step: int | None, split: str) -> list[RowFile]:
    if run.is_file():
        return [RowFile(run, split, step or 0)]
    files = [f for f in row_files(run) if step in (None, f.step) and f.split == split]
    if not files:
        named = ("" if step is None else f" of step {step}") + f" of split {split}"
        there = ", ".join(sorted({f"{f.split} {f.step}" for f in row_files(run)})[:20]) or "none"
        raise DataError(f"{run}: no rollout rows{named}. There are: {there}")
    return files


if __name__ == "__main__":
    sys.exit(main())
