"""Rows of BFCL v4, multi-turn, made from the installed package `bfcl-eval`.

    python recipes/bfcl/prepare.py --split train --out data/bfcl/train.parquet
    python recipes/bfcl/prepare.py --split test --categories base miss_func --out data/bfcl/test.parquet

A row holds a task's id and the functions that it may call. The task itself stays in the package. Tasks with an even
number are the training rows, those with an odd number the test rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_mt.extensions.environments.bfcl import CATEGORIES, row_of, tasks
from verl_mt.extensions.environments.replay import write_tasks

SPLITS = ("train", "test", "all")


def make_rows(split: str, categories: Sequence[str] = CATEGORIES) -> list[dict[str, Any]]:
    """The rows of a split, category by category.

    Args:
        split: one of `SPLITS`.
        categories: some of `CATEGORIES`.

    Raises:
        PluginError: `bfcl-eval` is not installed.
    """
    ids = [found for category in categories for found in tasks() if found.startswith(f"multi_turn_{category}_")]
    odd = {"train": (0,), "test": (1,), "all": (0, 1)}[split]
    return [row_of(found) for found in ids if int(found.rpartition("_")[2]) % 2 in odd]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", required=True, choices=SPLITS)
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES), choices=CATEGORIES)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    return write_tasks(lambda: make_rows(args.split, args.categories), args.out)


if __name__ == "__main__":
    sys.exit(main())
