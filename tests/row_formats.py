"""Rollout rows of a run as Parquet, which a run writes, and as lines of JSON, which earlier versions also wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_mt.data.columnar_rows import late_part, seal, table_of
from verl_mt.data.row_files import read_rows, row_files, write_columns
from verl_mt.data.run_files import UPDATE_COLUMNS, row_to_trajectory, write_rows


def as_json_lines(run: Path) -> Path:
    """Turn the files of a run into those of an earlier version."""
    for file in row_files(run):
        write_rows(file.path.with_suffix(".jsonl"), read_rows(file.path))
        file.path.unlink()
    return run


def as_parquet(run: Path) -> Path:
    """The reverse."""
    for file in row_files(run):
        write_columns(file.path.with_suffix(""), table_of_rows(list(read_rows(file.path))))
    return run


def table_of_rows(rows: list[dict[str, Any]]) -> pa.Table:
    trajectories, late = [], []
    for row in rows:
        trajectory = row_to_trajectory(row)
        trajectory.trained_version = row.get("trained_version")
        columns = [{name: record[name] for name in UPDATE_COLUMNS if name in record} for record in row["records"]]
        trajectories.append(trajectory)
        late.append(late_part(trajectory, step=row["step"], late=columns))
    return table_of([seal(trajectories)], late)
