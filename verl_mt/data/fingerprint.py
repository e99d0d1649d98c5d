"""What is in the rows of a run, in their order, in a few bytes: a run goes on in the rows that it was started with.

A fingerprint says of each entry of `data.train_files` and `data.val_files` how many rows it has and what they hold: a
hash of all of them, and short ones of blocks of rows, by which the first row that differs is found. Rows count as they
are read, not as they are stored: the same rows in a file of another kind are the same. An image that a row names by its
path counts by that path.

A file that is not loaded (`data.eager_rows`) is known by its size and samples of its bytes instead
(`LargeRows.known_by`): to know it by its rows they would all have to be read.

Rows of a large file are hashed once. The result is kept in `$XDG_CACHE_HOME/verl_mt/rows` (else `~/.cache/...`) for as
long as the file's path, size, times and inode stay what they are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_mt.data.dataset import SUFFIXES, DataRow, DataSource
from verl_mt.data.large_files import SAMPLE_ROWS, LargeRows
from verl_mt.data.run_files import to_json_value, write_rows
from verl_mt.errors import CheckpointError

log = logging.getLogger(__name__)

_MAX_BLOCKS = 4096
"""Up to this many rows, the first that differs is named. Of more rows, its block is named."""
_BLOCK_DIGITS = 16
_CACHED_FROM_BYTES = 2**20
"""Rows of a smaller file are hashed in less time than a person notices."""
_SETTLED_S = 2.0
"""A file that changes twice within one tick of its disk's clock keeps its times: one as young as this is not cached."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class SourceFingerprint:
    """The rows of one entry."""

    name: str
    path: str
    """The file, or the generator."""
    num_rows: int
    digest: str
    blocks: str
    """Hash of each block of rows, or of each sample of bytes, 16 hex digits each."""
    named_rows: bool = False
    """Rows have no `data_source` but the entry's name."""
    num_bytes: int | None = None
    """Of a file that is not loaded, whose hashes are of samples of its bytes; None = of its rows."""

    @property
    def rows_per_block(self) -> int:
        return -(-self.num_rows // _MAX_BLOCKS) or 1


def fingerprint(sources: Sequence[DataSource]) -> list[dict[str, Any]]:
    """Of the entries of a split as `load_rows` gave them, nothing left out yet. Plain data, for a checkpoint."""
    return [asdict(_of_source(source)) for source in sources]


def difference(key: str, then: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str | None:
    """How the rows that `key` names differ from what they were, in words; None if they do not."""
    old, new = ([SourceFingerprint(**source) for source in sources] for sources in (then, now))
    entries = f"{key} had the entries {_names(old)}, now it has {_names(new)}"
    if len(old) != len(new):
        return entries
    pairs = list(zip(old, new, strict=True))
    renamed = [(a, b) for a, b in pairs if a.name != b.name]
    found = [_source_difference(a, b) for a, b in pairs if a.digest != b.digest]
    if found:
        return f"{entries if renamed else key}: {'; '.join(found)}"
    # A name alone is no other data, unless it says what scores the rows.
    counts = any(a.named_rows or b.named_rows for a, b in renamed)
    return f"{entries}, and their rows have no data_source but that name" if counts else None


def _names(sources: Sequence[SourceFingerprint]) -> str:
    return ", ".join(f"{s.name} ({s.path})" for s in sources) or "none"


def _source_difference(old: SourceFingerprint, new: SourceFingerprint) -> str:
    where = f"{new.name} ({new.path}, {new.num_rows} rows"
    where += ")" if old.num_rows == new.num_rows else f", then {old.num_rows})"
    if old.num_bytes is None and new.num_bytes is None:
        return _row_difference(where, old, new)
    if old.num_bytes is None or new.num_bytes is None:
        then, now = ("not loaded" if source.num_bytes is not None else "loaded" for source in (old, new))
        return f"{where} was {then} then, and is {now} now: set data.eager_rows so that it is as it was"
    if old.num_bytes != new.num_bytes:
        return f"{where} has {new.num_bytes:,} bytes, then {old.num_bytes:,}"
    pairs = enumerate(zip(_blocks(old), _blocks(new), strict=True))
    first = next((k for k, (a, b) in pairs if a != b), None)
    near = "in its footer" if first is None else f"about {first / len(_blocks(new)):.0%} into it"
    return f"{where} has as many bytes, but others: the first difference that was found is {near}"


def _row_difference(where: str, old: SourceFingerprint, new: SourceFingerprint) -> str:
    size = old.rows_per_block
    if size != new.rows_per_block:
        return f"{where} has other rows"
    one, two = _blocks(old), _blocks(new)
    first = next((k for k, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))
    if size == 1:
        common = min(old.num_rows, new.num_rows)
        return f"{where}: " + (
            f"row {first + 1} is the first that differs" if first < common else f"the first {common} are the same"
        )
    return f"{where}: the first difference is in rows {first * size + 1} to {(first + 1) * size}"


def _blocks(source: SourceFingerprint) -> list[str]:
    return [source.blocks[k : k + _BLOCK_DIGITS] for k in range(0, len(source.blocks), _BLOCK_DIGITS)]


def _of_source(source: DataSource) -> SourceFingerprint:
    num_rows = len(source.rows)
    if isinstance(source.rows, LargeRows):
        num_bytes, digest, samples = source.rows.known_by()
        unnamed = any(row.raw.get("data_source") is None for row in source.rows[:SAMPLE_ROWS])
        return SourceFingerprint(source.name, source.rows.file, num_rows, digest, samples, unnamed, num_bytes)
    path = source.rows[0].file
    cached = _Cache.of(path, num_rows) if path.endswith(SUFFIXES) else None
    digests = (cached and cached.read()) or _hash(source.rows)
    if cached is not None:
        cached.keep(digests, read_at_s=source.read_at_s)
    named_rows = any(row.raw.get("data_source") is None for row in source.rows)
    return SourceFingerprint(source.name, path, num_rows, *digests, named_rows)


def _hash(rows: Sequence[DataRow]) -> tuple[str, str]:
    """(of all rows, of each block)"""
    size = -(-len(rows) // _MAX_BLOCKS) or 1
    whole, blocks = hashlib.sha256(), []
    for start in range(0, len(rows), size):
        block = hashlib.sha256()
        for row in rows[start : start + size]:
            content = _content(row.raw)
            block.update(b"%d:" % len(content))
            block.update(content)
        whole.update(block.digest())
        blocks.append(block.hexdigest()[:_BLOCK_DIGITS])
    return whole.hexdigest(), "".join(blocks)


def _content(raw: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(raw, sort_keys=True, default=_plain)
    except (TypeError, ValueError):  # keys of several types
        text = json.dumps(to_json_value(raw), sort_keys=True)
    # The memory address in the text of an object that a generator made differs from run to run.
    return (_ADDRESS.sub("", text) if " at 0x" in text else text).encode()


def _plain(value: Any) -> Any:
    # Written to a file of rollouts, a long text is cut; here its end counts too.
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes | bytearray) else to_json_value(value)


@dataclass(frozen=True)
class _Cache:
    """What is known of the first rows of one file."""

    file: Path
    known_by: list[Any]
    newest_s: float
    """When the file last changed, by its own times."""

    @classmethod
    def of(cls, path: str, num_rows: int) -> _Cache | None:
        """None for a file that is not worth it or has gone since it was read, or where there is no place for it."""
        try:
            absolute = Path(path).expanduser().absolute()
            folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl_mt" / "rows"
            stat = absolute.stat()
        except (OSError, RuntimeError):  # RuntimeError: `~` of a user without a home
            return None
        if stat.st_size < _CACHED_FROM_BYTES:
            return None
        known_by = [str(absolute), num_rows, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        name = hashlib.sha256(f"{absolute}\n{num_rows}".encode()).hexdigest()[:32]
        return cls(folder / f"{name}.json", known_by, max(stat.st_mtime, stat.st_ctime))

    def read(self) -> tuple[str, str] | None:
        try:
            kept = json.loads(self.file.read_bytes())
            return (kept["digest"], kept["blocks"]) if kept["known_by"] == self.known_by else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not there, or not ours: it is made again

    def keep(self, digests: tuple[str, str], *, read_at_s: float) -> None:
        if self.newest_s > read_at_s - _SETTLED_S or self.read() == digests:
            return
        try:
            write_rows(self.file, [{"known_by": self.known_by, "digest": digests[0], "blocks": digests[1]}])
        except (OSError, CheckpointError) as error:
            log.info("%s; the rows are hashed again at the next start", error)
