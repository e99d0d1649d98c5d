"""`python -m verl_mt.report.rows`: a run's rollout rows, printed as lines of JSON or converted in place.

python -m verl_mt.report.rows runs/tiny --step 3               # prints the training rollouts of step 3
python -m verl_mt.report.rows runs/tiny/rollouts/val_000010.parquet
python -m verl_mt.report.rows runs/tiny --to parquet           # converts every file of the run; `--to jsonl` back
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from verl_mt.data.row_files import JSONL, PARQUET, RowFile, read_rows, row_files, write_columns, write_json
from verl_mt.data.run_files import json_text
from verl_mt.errors import ConfigError, DataError, VerlMTError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m verl_mt.report.rows", description=__doc__.split("\n")[0])
    parser.add_argument("run", metavar="RUN", help="a run directory, or one file of its rollouts/")
    parser.add_argument("--to", choices=(JSONL, PARQUET), help="convert the files to this format instead of printing")
    parser.add_argument("--step", type=int, help="only this step")
    parser.add_argument("--split", help="only these: train, val or val_greedy; default: train, with --to all")
    args = parser.parse_args(argv)
    try:
        files = _chosen(Path(args.run).expanduser(), args.step, args.split or (None if args.to else "train"))
        if args.to is None:
            _print(files)
            return 0
        converted = [_convert(file, args.to) for file in files if file.format != args.to]
        print(f"{args.run}: {len(converted)} of {len(files)} files converted to {args.to}")
        return 0
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _chosen(run: Path, step: int | None, split: str | None) -> list[RowFile]:
    if run.is_file():
        return [RowFile(run, split or "", step or 0)]
    files = [f for f in row_files(run) if step in (None, f.step) and split in (None, f.split)]
    if not files:
        named = "".join(
            f" of {name} {value}" for name, value in (("step", step), ("split", split)) if value is not None
        )
        there = ", ".join(sorted({f"{f.split} {f.step}" for f in row_files(run)})[:20]) or "none"
        raise DataError(f"{run}: no rollout rows{named}; there are: {there}")
    return files


def _print(files: list[RowFile]) -> None:
    for file in files:
        for row in read_rows(file.path):
            sys.stdout.buffer.write(json_text(row) + b"\n")
    sys.stdout.buffer.flush()


def _convert(file: RowFile, form: str) -> Path:
    """The file in the other format, in its place."""
    if file.path.suffix not in (f".{JSONL}", f".{PARQUET}"):
        raise ConfigError(f"{file.path}: neither .{JSONL} nor .{PARQUET}")
    stem = file.path.with_suffix("")
    if form == JSONL:
        return write_json(stem, read_rows(file.path))
    from verl_mt.data import columnar_rows

    return write_columns(stem, columnar_rows.to_table(list(read_rows(file.path))))


if __name__ == "__main__":
    sys.exit(main())
