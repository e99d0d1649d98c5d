"""Training files that are not loaded: a row is read when it is drawn.

Up to `data.eager_rows` rows in all Parquet and JSON Lines files together, everything is loaded as ever. Above, a file
is opened and no more: of Parquet the footer is read, of JSON Lines one pass over the bytes finds where lines begin (8
bytes of memory a row). Rows that a JSON file or a Python function gives are in memory already, and stay there.

How long prompts are is found on the way, not kept in a cache: a length costs a rendering (a millisecond), so a cache
would cost hours before the first step, for every template and tokenizer, to save the same millisecond later; and an
epoch that skips what is too long when it is drawn draws the same prompts in the same order as one that knew before.

A Parquet file is read by row groups: one row costs the decoding of its group. `LargeRows.take` decodes a group once for
all rows that are asked for, and samplers ask for many at once (`look_ahead`) where groups are large.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol, overload

import numpy as np
import pyarrow
import pyarrow.parquet

from verl_mt.data.dataset import (
    DataRow,
    DataSource,
    Entry,
    Reading,
    check_renamed,
    entries_of,
    load_entry,
    read_line,
    without_nulls,
)
from verl_mt.errors import DataError

log = logging.getLogger(__name__)

SAMPLE_ROWS = 16
"""Rows of a file that is not loaded that are checked before the first step."""
_SAMPLE_OF_NAMES = 1000
"""The same, for columns that are to be renamed: a row of JSON Lines need not have them all."""
_LARGE_GROUP = 20_000
"""Rows; decoding as many takes ten milliseconds or more."""
_LOOK_AHEAD = 8192
_SCANNED_BYTES = 2**24
_SAMPLES, _SAMPLE_BYTES = 256, 2**16
"""Of a file's content, by which it is known again."""
_SAMPLE_DIGITS = 16
_SPACES = np.frombuffer(b" \t\r\v\f\n", dtype=np.uint8)


class RawRows(Protocol):
    """The rows of an open file, as they are."""

    num_rows: int
    look_ahead: int
    """Rows that should be asked for at once, if they are known that early; 0 = it makes no difference."""
    end_bytes: int
    """At the end of the file, which describe all the rest."""

    def take(self, indices: Sequence[int]) -> list[Any]:
        """Rows by their numbers, in any order: mappings, or a `DataError` in the place of what is none."""

    def position_of(self, index: int) -> int:
        """In the file, from 0: lines that are blank have one, and are no rows."""


class LargeRows(Sequence[DataRow]):
    """The rows of one file. Each access reads the file again, and makes a new object."""

    def __init__(self, entry: Entry, reading: Reading, raw: RawRows):
        self.file = entry.path
        self._entry, self._reading, self._raw = entry, replace(reading, keeps_bad=True), raw
        self._keeps_bad = reading.keeps_bad
        self._size = raw.num_rows if reading.num_rows < 0 else min(raw.num_rows, reading.num_rows)
        self._open: IO[bytes] = open(Path(entry.path).expanduser(), "rb")  # noqa: SIM115 - while rows are read
        self._state = self._state_now()

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> DataRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[DataRow]: ...
    def __getitem__(self, index: int | slice) -> DataRow | list[DataRow]:
        found = range(self._size)[index]
        rows = [self._sound(row) for row in self.take([found] if isinstance(found, int) else found)]
        return rows[0] if isinstance(found, int) else rows

    def __iter__(self) -> Iterator[DataRow]:
        for start in range(0, self._size, _LOOK_AHEAD):
            yield from map(self._sound, self.take(range(start, min(start + _LOOK_AHEAD, self._size))))

    @property
    def look_ahead(self) -> int:
        """Rows that should be taken at once, if the number is known that early."""
        return self._raw.look_ahead

    def take(self, indices: Sequence[int]) -> list[DataRow]:
        """Rows by their numbers, in any order. What is no row says so (`problem`): one that is read ahead may never
        be drawn. Asked for by its number alone it is an error, unless bad rows are kept.

        Raises:
            DataError: the file was written to since it was opened, or cannot be read.
        """
        if self._state_now() != self._state:
            raise DataError(
                f"{self.file} was changed while the run reads it, so the numbers of its rows mean nothing any more. "
                "Put back what it held and give the same command to go on. Write new rows to a new file"
            )
        made = zip(self._raw.take(indices), indices, strict=True)
        return [self._reading.row_of(raw, self._raw.position_of(index), self._entry) for raw, index in made]

    def known_by(self) -> tuple[int, str, str]:
        """(bytes, hash, short hashes of the samples that it is made from): what a resumed run is compared by.

        Hashed are the size, up to 256 samples of 64 KiB that are spread evenly, and the end that describes the rest:
        the footer of Parquet holds the place, the size and the extremes of every column of every row group. An edit
        that keeps the size, and of Parquet the footer too, and lies between two samples, is not seen.
        """
        size = self._state[0]
        step = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
        samples = [self._digest(start, _SAMPLE_BYTES) for start in range(0, size, step)]
        whole = hashlib.sha256(f"{size} {len(self)} ".encode() + b"".join(samples))
        whole.update(self._digest(max(0, size - self._raw.end_bytes), self._raw.end_bytes))
        return size, whole.hexdigest(), "".join(sample.hex()[:_SAMPLE_DIGITS] for sample in samples)

    def _sound(self, row: DataRow) -> DataRow:
        if row.problem is not None and not self._keeps_bad:
            raise DataError(row.problem)
        return row

    def _digest(self, start: int, size: int) -> bytes:
        return hashlib.sha256(os.pread(self._open.fileno(), size, start)).digest()

    def _state_now(self) -> tuple[int, int]:
        # Of the open file: one that took its name since is another, and this one stays what it is.
        stat = os.fstat(self._open.fileno())
        return stat.st_size, stat.st_mtime_ns


def open_rows(entry_spec: Any, reading: Reading, eager_rows: int) -> list[DataSource]:
    """As `dataset.load_rows`, unless the files have more rows: then those of Parquet and JSON Lines are `LargeRows`.

    Raises:
        DataError: as `load_rows`; of a large file only what its first rows, and its schema, show.
    """
    entries = entries_of(entry_spec, reading.split)
    if rows_in_files(entries, reading.num_rows, eager_rows) <= eager_rows:
        return [load_entry(entry, reading) for entry in entries]
    return [
        _open_entry(entry, reading) if entry.path.endswith(tuple(_FORMATS)) else load_entry(entry, reading)
        for entry in entries
    ]


def rows_in_files(entries: Sequence[Entry], num_rows: int, enough: int) -> int:
    """Rows of all Parquet and JSON Lines files, at most `num_rows` of each (-1 = all); counted up to a little more than
    `enough`. A file that cannot be read has none here: who reads it says why."""
    count = 0
    for entry in entries:
        file = Path(entry.path).expanduser()
        if not entry.path.endswith(tuple(_FORMATS)) or not file.is_file():
            continue
        wanted = enough + 1 - count if num_rows < 0 else min(num_rows, enough + 1 - count)
        try:
            count += min(wanted, _FORMATS[file.suffix](file, wanted).num_rows)
        except DataError:
            continue
        if count > enough:
            break
    return count


def _open_entry(entry: Entry, reading: Reading) -> DataSource:
    file = Path(entry.path).expanduser()
    raw = _FORMATS[file.suffix](file, reading.num_rows)
    if not raw.num_rows or not reading.num_rows:
        raise DataError(f"{reading.key}: {entry.path} has no rows")
    if reading.columns.renamed:
        first = [row for row in raw.take(range(min(_SAMPLE_OF_NAMES, raw.num_rows))) if isinstance(row, dict)]
        check_renamed(first, reading.columns.renamed, f"{entry.path}, first {_SAMPLE_OF_NAMES} rows")
    return DataSource(entry.name, LargeRows(entry, reading, raw), entry.weight)


class ParquetRows:
    """A Parquet file, memory-mapped."""

    def __init__(self, file: Path, num_rows: int):
        try:
            self._file = pyarrow.parquet.ParquetFile(file, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable parquet file: {error}") from error
        self._path = file
        footer = self._file.metadata
        self.num_rows: int = footer.num_rows
        self.end_bytes: int = footer.serialized_size + 8
        sizes = [footer.row_group(k).num_rows for k in range(footer.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self.largest_group = max(sizes, default=0)
        self.look_ahead = _LOOK_AHEAD if self.largest_group > _LARGE_GROUP else 0

    def take(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        wanted = np.asarray(indices, dtype=np.int64)
        order = np.argsort(wanted, kind="stable")
        groups = np.searchsorted(self._starts, wanted[order], side="right") - 1
        found: list[Any] = [None] * len(wanted)
        for group in np.unique(groups):
            places = order[groups == group]
            for place, row in zip(places, self._rows_of(int(group), wanted[places]), strict=True):
                found[place] = without_nulls(row)
        return found

    def position_of(self, index: int) -> int:
        return index

    def _rows_of(self, group: int, indices: np.ndarray) -> list[dict[str, Any]]:
        try:
            table = self._file.read_row_group(group)
        except (pyarrow.ArrowException, OSError) as error:
            # A damaged page is no bad row: nothing of its group can be read.
            first, last = self._starts[group] + 1, self._starts[group + 1]
            raise DataError(f"{self._path}, rows {first} to {last}: this row group cannot be read: {error}") from error
        return table.take(indices - self._starts[group]).to_pylist()


class JsonLinesRows:
    """A JSON Lines file, of which is known where each line begins."""

    look_ahead = end_bytes = 0

    def __init__(self, file: Path, num_rows: int):
        self._path = file
        self._lines = open(file, "rb")  # noqa: SIM115 - while rows are read
        self._starts, blank = _line_starts(self._lines, num_rows)
        self._rows_before = blank - np.arange(len(blank))
        """Each blank line."""
        self.num_rows = len(self._starts)

    def take(self, indices: Sequence[int]) -> list[Any]:
        return [self._row_at(int(index)) for index in indices]

    def position_of(self, index: int) -> int:
        return int(index + np.searchsorted(self._rows_before, index, side="right"))

    def _row_at(self, index: int) -> Any:
        self._lines.seek(int(self._starts[index]))
        return read_line(self._lines.readline(), self._path, self.position_of(index))


def _line_starts(lines: IO[bytes], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """int64: where each line begins that is not blank (of the first `num_rows`, -1 = of all), and which are blank."""
    nothing = np.empty(0, dtype=np.int64)
    found, blanks, count, num_lines, base, at_start = [nothing], [nothing], 0, 0, 0, True
    while (num_rows < 0 or count < num_rows) and (part := lines.read(_SCANNED_BYTES)):
        ends = np.flatnonzero(np.frombuffer(part, dtype=np.uint8) == ord("\n")) + 1
        starts = np.concatenate([[0] if at_start else [], ends]).astype(np.int64) + base
        base += len(part)
        at_start = part.endswith(b"\n")
        starts = starts[starts < base]
        blank = _blank(lines, part, starts, base)
        blanks.append(blank + num_lines)
        found.append(np.delete(starts, blank))
        num_lines, count = num_lines + len(starts), count + len(found[-1])
    starts = np.concatenate(found)
    return starts if num_rows < 0 else starts[:num_rows], np.concatenate(blanks)


def _blank(lines: IO[bytes], part: bytes, starts: np.ndarray, base: int) -> np.ndarray:
    """Which lines of a part are blank. A row begins with a brace; only what begins with a space is read to see whether
    there is more."""
    first = np.frombuffer(part, dtype=np.uint8)[starts - (base - len(part))]
    blank = []
    for place in np.flatnonzero(np.isin(first, _SPACES)):
        lines.seek(int(starts[place]))
        if not lines.readline().strip():
            blank.append(place)
    lines.seek(base)
    return np.asarray(blank, dtype=np.int64)


_FORMATS: dict[str, Any] = {".parquet": ParquetRows, ".jsonl": JsonLinesRows}
