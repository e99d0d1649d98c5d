"""Rollout files as compressed blocks: one *part* per file and at most 200 rollouts.

A part has three gzipped blobs that the page opens when it needs them: `lines` (the table, column by column), `details`
(messages, calls, spans: what is searched and shown), and `tokens` (`token_columns`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_mt.data.run_files import to_json_value
from verl_mt.report.run_reader import RolloutFile, Run, read_rollouts
from verl_mt.report.summary import describe
from verl_mt.report.timeline import critical_path
from verl_mt.report.token_columns import TokenColumns

ROLLOUTS_PER_PART = 200


@dataclass(frozen=True)
class Part:
    """Some rollouts of one file."""

    split: str
    step: int
    count: int
    lines: bytes
    details: bytes
    tokens: bytes


@dataclass(frozen=True)
class EncodedFile:
    """One file of rollout rows, ready for the page."""

    parts: tuple[Part, ...]
    critical: dict[str, Any] | None
    """The critical path of a training step."""
    problems: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)


def encode_file(file: RolloutFile, run: Run) -> EncodedFile:
    """Read and encode one file; what cannot be read is in `problems`."""
    rows, problems = read_rollouts(file)
    parts = tuple(
        _part(rows[at : at + ROLLOUTS_PER_PART], file, run.token_texts) for at in range(0, len(rows), ROLLOUTS_PER_PART)
    )
    critical = critical_path(rows, run.config) if file.split == "train" else None
    return EncodedFile(parts, critical, tuple(problems))


def pack(value: Any) -> bytes:
    """JSON, gzipped; the same bytes for the same value."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN, which only files that somebody else wrote can hold
        text = json.dumps(to_json_value(value), ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(errors="replace"), 6, mtime=0)


def _part(rows: Sequence[Mapping[str, Any]], file: RolloutFile, texts: Mapping[int, str]) -> Part:
    columns = TokenColumns()
    described = [_described(row, columns, texts) for row in rows]
    lines = [line for line, _ in described]
    names = list(lines[0]) if lines else []
    return Part(
        split=file.split,
        step=file.step,
        count=len(rows),
        lines=pack({name: [line[name] for line in lines] for name in names}),
        details=pack([details for _, details in described]),
        tokens=gzip.compress(columns.to_bytes(), 6, mtime=0),
    )


def _described(
    row: Mapping[str, Any], columns: TokenColumns, texts: Mapping[int, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`describe`, for a row that may be of any shape: one that cannot be read is a line that says so."""
    own = TokenColumns()
    try:
        found = describe(row, own, texts)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        names = {name: row.get(name) for name in ("trajectory_id", "group_id", "reward", "status", "stop_reason")}
        line, details = describe(names, TokenColumns(), texts)
        return line, details | {"broken": [f"all but its ids: the row is of another form ({error!r})"]}
    columns.extend(own)
    return found


def spread(files: Sequence[RolloutFile], counts: Sequence[int], limit: int) -> Iterator[RolloutFile]:
    """Whole files, evenly over the run, of at most about `limit` rollouts; the first and the last are among them."""
    total = sum(counts)
    if total <= limit or len(files) < 2:
        yield from files
        return
    keep = max(2, int(len(files) * limit / total))
    chosen = {round(k * (len(files) - 1) / (keep - 1)) for k in range(keep)}
    yield from (file for k, file in enumerate(files) if k in chosen)
