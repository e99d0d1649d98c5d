"""Runs -> what the page shows: a manifest, and compressed blocks that the page opens when it needs them.

Rollouts come in *parts*, one per file and at most 200 rollouts. A part has three gzipped blobs: `lines` (the table,
column by column), `details` (messages, calls, spans: what is searched and shown), and `tokens` (`token_columns`).
A `Collector` remembers what it encoded: rollout files do not change once written.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl_mt.data.row_files import RowFile, count_rows, row_files
from verl_mt.data.run_files import to_json_value
from verl_mt.errors import DataError
from verl_mt.extensions.inspection.diagnostics.critical_path import critical_path_of_rows
from verl_mt.extensions.inspection.report.run_reader import Run, leaves, open_run, read_rollouts, section
from verl_mt.extensions.inspection.report.summary import describe
from verl_mt.extensions.inspection.report.token_columns import TokenColumns

ROLLOUTS_PER_PART = 200
_IDS = ("trajectory_id", "prompt_id")
_SPAN = ("phase", "start_s", "end_s", "turn")
"""What the critical path needs of a row, and of a span."""


@dataclass
class Contents:
    """What the page shows: a manifest, and blocks by id (a hash of their bytes)."""

    blocks: dict[str, bytes] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def add_run(self, run: Run, label: str, files: Sequence[EncodedFile], problems: Sequence[str] = ()) -> None:
        """Add a run with its rollout files."""
        parts = [
            {
                "split": part.split,
                "step": part.step,
                "count": part.count,
                "lines": self._block(part.lines),
                "details": self._block(part.details),
                "tokens": self._block(part.tokens),
            }
            for file in files
            for part in file.parts
        ]
        trainer = section(run.config, "trainer")
        model = section(run.config, "actor_rollout_ref", "model").get("path")
        critical = {str(file.parts[0].step): file.critical for file in files if file.critical and file.parts}
        self.runs.append(
            {
                "label": label,
                "path": str(run.path),
                "finished": run.finished,
                "problems": list(
                    dict.fromkeys([*run.problems, *problems, *(p for file in files for p in file.problems)])
                ),
                "total_steps": trainer.get("total_training_steps"),
                "max_staleness": trainer.get("max_staleness"),
                "model": model,
                "config": yaml.safe_dump(run.config, sort_keys=False, width=math.inf) if run.config else "",
                "settings": {key: json.dumps(to_json_value(value)) for key, value in leaves(run.config)},
                "metrics": self._block(pack(run.metrics)),
                "critical": self._block(pack(critical)),
                "texts": self._block(pack({str(k): v for k, v in run.token_texts.items()})),
                "parts": parts,
            }
        )

    @property
    def manifest(self) -> dict[str, Any]:
        return {"runs": self.runs}

    @property
    def title(self) -> str:
        return ", ".join(run["label"] for run in self.runs)

    @property
    def summary(self) -> str:
        """What the page holds, in words."""
        return f"{sum(part['count'] for run in self.runs for part in run['parts'])} rollouts"

    @property
    def complaints(self) -> list[str]:
        """What is missing, a sentence each."""
        return [f"{run['label']}: {problem}" for run in self.runs for problem in run["problems"]]

    def _block(self, packed: bytes) -> str:
        name = hashlib.sha256(packed).hexdigest()[:16]
        self.blocks[name] = packed
        return name


class Collector:
    """Reads the same runs again and again.

    Args:
        paths: run directories.
        max_rollouts: of each run; where there are more, whole files are left out evenly, and the page says so.
    """

    def __init__(self, paths: Sequence[str], max_rollouts: int):
        self._paths, self._max_rollouts = list(paths), max_rollouts
        self._encoded: dict[Path, tuple[tuple[int, int], EncodedFile]] = {}
        self._counts: dict[tuple[Path, tuple[int, int]], int] = {}

    def contents(self) -> Contents:
        """What the page shows now.

        Raises:
            DataError: one of the paths is no run directory.
        """
        runs = [open_run(path) for path in self._paths]
        contents = Contents()
        for run, label in zip(runs, labels(runs)):
            contents.add_run(run, label, *self._files(run))
        return contents

    def _files(self, run: Run) -> tuple[list[EncodedFile], list[str]]:
        files = row_files(run.path)
        counts = [self._count(file) for file in files]
        chosen = list(spread(files, counts, self._max_rollouts))
        left_out = len(files) - len(chosen)
        problems = []
        if left_out:
            problems.append(
                f"{left_out} of {len(files)} rollout files are not shown, evenly over the run: there are {sum(counts)} "
                f"rollouts, and --max-rollouts is {self._max_rollouts}."
            )
        return [self._encode(file, run) for file in chosen], problems

    def _count(self, file: RowFile) -> int:
        key = file.path, file.stamp
        if key not in self._counts:
            try:
                self._counts[key] = count_rows(file.path)
            except DataError:  # whoever reads it says what is wrong with it
                self._counts[key] = 0
        return self._counts[key]

    def _encode(self, file: RowFile, run: Run) -> EncodedFile:
        known = self._encoded.get(file.path)
        if known is None or known[0] != file.stamp:
            stamp = file.stamp  # before it is read: what is appended meanwhile is read the next time
            known = self._encoded[file.path] = (stamp, encode_file(file, run))
        return known[1]


def collect(paths: Sequence[str], *, max_rollouts: int) -> Contents:
    """What the page shows of these runs, read once."""
    return Collector(paths, max_rollouts).contents()


def labels(runs: Sequence[Run]) -> list[str]:
    """The name of each run's folder, with its parent's where two have the same."""
    names = Counter(run.name for run in runs)
    found = [run.name if names[run.name] == 1 else "/".join(run.path.resolve().parts[-2:]) for run in runs]
    again = Counter(found)
    return [name if again[name] == 1 else f"{name} ({k + 1})" for k, name in enumerate(found)]


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


def encode_file(file: RowFile, run: Run) -> EncodedFile:
    """Read and encode one file; what cannot be read is in `problems`."""
    rows, problems = read_rollouts(file)
    parts = tuple(
        _part(rows[at : at + ROLLOUTS_PER_PART], file, run.token_texts) for at in range(0, len(rows), ROLLOUTS_PER_PART)
    )
    critical = _critical_path(rows, run.config) if file.split == "train" else None
    return EncodedFile(parts, critical, tuple(problems))


def pack(value: Any) -> bytes:
    """JSON, gzipped; the same bytes for the same value."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):  # NaN, or many levels: only files that somebody else wrote hold them
        text = json.dumps(to_json_value(value), ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(errors="replace"), 6, mtime=0)


def _part(rows: Sequence[Mapping[str, Any]], file: RowFile, texts: Mapping[int, str]) -> Part:
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


def spread(files: Sequence[RowFile], counts: Sequence[int], limit: int) -> Iterator[RowFile]:
    """Whole files, evenly over the run, of at most about `limit` rollouts; the first and the last are among them."""
    total = sum(counts)
    if total <= limit or len(files) < 2:
        yield from files
        return
    keep = max(2, int(len(files) * limit / total))
    chosen = {round(k * (len(files) - 1) / (keep - 1)) for k in range(keep)}
    yield from (file for k, file in enumerate(files) if k in chosen)


def _critical_path(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`CriticalPath.to_dict()` of the rows that have ids and spans; None where none has, and where they were sampled
    while earlier steps were trained, so that nobody waited for most of them.

    Args:
        rows: of one training step.
        config: the run's; says whether the conversations waited for each other.
    """
    if section(config, "trainer").get("max_staleness"):
        return None
    usable = []
    for row in rows:
        given = row.get("time_spans")
        if isinstance(given, list) and all(isinstance(row.get(name), str | int) for name in _IDS):
            spans = [{k: s[k] for k in (*_SPAN, "name") if k in s} for s in given if _is_span(s)]
            usable.append(
                {**row, "episode_id": str(row.get("episode_id") or row["trajectory_id"]), "time_spans": spans}
            )
    if not any(row["time_spans"] for row in usable):
        return None
    is_sync = section(config, "actor_rollout_ref", "rollout").get("mode") == "sync"
    lock_step = bool(section(config, "trainer").get("deterministic")) or is_sync
    return critical_path_of_rows(usable, lock_step=lock_step).to_dict()


def _is_span(span: Any) -> bool:
    """Whether it has what a span needs; rows of other versions may hold anything."""
    if not isinstance(span, Mapping) or not all(name in span for name in _SPAN):
        return False
    return isinstance(span["start_s"], int | float) and isinstance(span["end_s"], int | float)
