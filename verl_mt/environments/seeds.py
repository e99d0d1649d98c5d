"""Rows for environments that need nothing but a seed."""

from __future__ import annotations

SEEDS = "verl_mt.environments.seeds:rows"
"""As a value of `data.train_files` and `data.val_files`."""
NUM_ROWS = 1024
_FIRST = {"train": 1_000_000, "val": 0}


def rows(*, num_rows: int, seed: int, split: str) -> list[dict[str, int]]:
    """Rows with one column, `seed`; those of training and validation differ.

    Args:
        num_rows: how many; -1 = `NUM_ROWS`.
        seed: of the run (`data.seed`); another one gives other rows.
        split: `train` or `val`.
    """
    count = NUM_ROWS if num_rows < 0 else num_rows
    first = _FIRST[split] + 2_000_000 * seed
    return [{"seed": first + number} for number in range(count)]
