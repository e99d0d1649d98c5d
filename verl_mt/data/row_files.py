"""The files of rollout rows in a run directory: which there are, reading and writing them.

`rollouts/step_000012.parquet` (`verl_mt.data.columnar_rows`) holds the training rollouts of step 12, `val_...` and
`val_greedy_...` those of a validation. Earlier versions also wrote the same rows as `.jsonl`, a JSON object per line.
These are still read, and a resumed run may have files of both formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.reading import require_file

if TYPE_CHECKING:
    import pyarrow

JSONL, PARQUET = "jsonl", "parquet"
FOLDER = "rollouts"
_NAME = re.compile(rf"(?P<pass>.+)_(?P<step>\d+)\.(?P<format>{JSONL}|{PARQUET})")


@dataclass(frozen=True)
class RowFile:
    """One file of rollout rows."""

    path: Path
    split: str
    """`train`, or the validation pass: `val`, `val_greedy`."""
    step: int

    @property
    def stamp(self) -> tuple[int, int]:
        """Changes when the file does."""
        found = self.path.stat()
        return found.st_mtime_ns, found.st_size

    @property
    def format(self) -> str:
        return self.path.suffix[1:]


def row_files(run: str | Path) -> list[RowFile]:
    """Files of rollout rows of a run directory in order of step, training before validation.

    Of a step in both formats (a process was killed between writing the one and removing the other) the newer counts.
    """
    found: dict[tuple[int, bool, str], RowFile] = {}
    for path in (Path(run) / FOLDER).glob("*"):
        named = _NAME.fullmatch(path.name)
        if named is not None and not path.name.startswith("."):
            split = "train" if named["pass"] == "step" else named["pass"]
            file = RowFile(path, split, int(named["step"]))
            key = file.step, split != "train", split
            if key not in found or found[key].stamp < file.stamp:
                found[key] = file
    return [found[key] for key in sorted(found)]


def rows_of_step(run: str | Path, step: int) -> RowFile | None:
    """The file of a step's training rollouts; None where there is none."""
    return next((file for file in row_files(run) if (file.split, file.step) == ("train", step)), None)


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """All rows of a file; a torn last line of JSON, left by a run that was killed, is left out.

    Raises:
        DataError: a broken line that is not the last, or a damaged file of columns; names the file.
    """
    if Path(path).suffix == f".{PARQUET}":
        from verl_mt.data import columnar_rows  # Arrow takes 0.2 s, which `--help` of a command need not wait for

        yield from columnar_rows.read_parquet(path)
    else:
        yield from read_jsonl_tolerant(path)


def count_rows(path: str | Path) -> int:
    """How many rows a file has, without reading what they hold.

    Raises:
        DataError: not a regular file, or a damaged file of columns.
    """
    if Path(path).suffix == f".{PARQUET}":
        from verl_mt.data import columnar_rows

        return columnar_rows.count_rows(path)
    require_file(path)
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def write_columns(stem: Path, table: pyarrow.Table) -> Path:
    """Write a table of `columnar_rows` as `<stem>.parquet`, whole or not at all. Then remove the `.jsonl` file that an
    earlier version wrote for the same rows.

    Raises:
        CheckpointError: the disk refused; names the file.
    """
    from verl_mt.data import columnar_rows

    path = stem.with_name(f"{stem.name}.{PARQUET}")
    columnar_rows.write_parquet(path, table)
    stem.with_name(f"{stem.name}.{JSONL}").unlink(missing_ok=True)
    return path
