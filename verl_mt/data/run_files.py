"""What a run writes: rollout rows (one per trajectory) and `metrics.jsonl` (one line per step).

This module makes rows as JSON data, and `columnar_rows` writes them as columns.

Row schema, version 2: everything needed to recompute the batch and to draw the timeline. Top level: `schema_version`,
`step`, `trained_version` (of the weights that were updated with it; null where none were), the ids (`trajectory_id`,
`prompt_id`, `group_id`, `episode_id`, `data_source`, `source`, `row_index`), `status`, `stop_reason`, `num_turns`,
`reward`, `reward_parts`, `tool_rewards`, `turn_scores`, `messages`, `tools`, `counters`, where there are some
`tool_calls`, `tool_reward_turns`, `turn_rewards` (turn -> its part of the reward), `ground_truth` (what the data row
says is right; cut, and said so, beyond `TRUTH_CHARACTERS`), `greedy_reward`, `replicas` (of the engine: which sampled
each turn), `execution_id` (rows that share it weigh in the loss as one) and `media` (images as data URIs, where a
plug-in replaced the row's), `time_spans` (phase, start_s, end_s on a monotonic clock, turn, name), `sanity`, `error`,
`info`, and `records`: per record, of equal length, `token_ids`, `sampled`, `loss_mask`, `rollout_log_probs`,
`policy_versions`, and where the update computed them `advantages` and `old_log_probs` (else null), and `clipped`, the
places of the tokens that its policy loss did not move though they have an advantage; besides `has_log_probs` and
`turns` (kind, start, end, turn), and `messages` and `tools` where these were changed after the record.
NaN and infinities are written as null. Version 1 had no `ground_truth`; it is still read. The first rows of version 2
had no `trained_version`.

Beside the rows, `token_texts.jsonl` holds the text of every token id that occurs in them: lines of objects, id -> text.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import fcntl
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from verl_mt.data.ledger import TrajectoryRecord, TurnSpan
from verl_mt.data.media import from_wire, is_image, to_wire
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory
from verl_mt.data.user_values import MAX_DEPTH
from verl_mt.errors import CheckpointError, DataError, key_text, value_text
from verl_mt.reading import parse_json, read_bytes, require_file

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)

TRUTH_CHARACTERS = 10_000
"""Of a ground truth in a row: some are whole test suites, and every rollout of the group would hold it again."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""What an OSError says where a disk, or a user's share of it, is full."""

_TOKEN_TEXTS = "token_texts.jsonl"
TOKEN_COLUMNS = ("token_ids", "sampled", "loss_mask", "rollout_log_probs", "policy_versions")
"""Of a record, per token, known when it was sampled."""
UPDATE_COLUMNS = ("advantages", "old_log_probs", "clipped")
"""Of a record, per token, known once the step has trained it; the first two stand there as null until then."""
LATE_FIELDS = ("step", "trained_version", "reward", "reward_parts", "counters")
"""Of a row: what the trainer still decides, or changes, when a group has come to it. All else is as it was sampled."""
_PLAIN = (
    "trajectory_id", "prompt_id", "group_id", "episode_id", "data_source", "row_index", "num_turns", "reward",
    "reward_parts", "tool_rewards", "turn_scores", "messages", "turn_texts", "tools", "counters", "sanity",
    "error", "info", "source",
)  # fmt: skip
_WHERE_KNOWN = ("greedy_reward", "tool_calls", "tool_reward_turns", "turn_rewards", "execution_id", "replicas")
ROW_ORDER = (
    "schema_version", "step", "trained_version", *_PLAIN, *_WHERE_KNOWN, "ground_truth", "status", "stop_reason",
    "media", "time_spans", "records",
)  # fmt: skip
RECORD_ORDER = (*TOKEN_COLUMNS, *UPDATE_COLUMNS, "has_log_probs", "messages", "tools", "turns")
"""How `plain_row` orders them: rows that come from columns are the same JSON, byte for byte."""


def trajectory_to_row(
    trajectory: Trajectory,
    *,
    step: int,
    advantages: Sequence[Sequence[float] | None] | None = None,
    old_log_probs: Sequence[Sequence[float] | None] | None = None,
    clipped: Sequence[Sequence[float] | None] | None = None,
) -> dict[str, Any]:
    """One trajectory as plain data of the row schema.

    Args:
        step: the training step it was sampled for.
        advantages: per record, one number per token; None where the record was not trained.
        old_log_probs: the trainer's log-probs, per record and token.
        clipped: per record and token, above 0 where the policy loss did not move the token.

    Raises:
        ValueError: a column of another length than its record.
    """
    computed = (advantages, old_log_probs, clipped)
    late = [
        update_columns(len(record.token_ids), *(None if c is None else c[k] for c in computed))
        for k, record in enumerate(trajectory.records)
    ]
    return to_json_value(plain_row(trajectory, step=step, late=late))


def plain_row(
    trajectory: Trajectory, *, step: int | None = None, late: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """A row as it is described above, with values that are not yet plain JSON. The one place that says what a row has:
    its JSON and its columns (`verl_mt.data.columnar_rows`) are both made of this.

    Args:
        step: None where it is not known yet.
        late: `update_columns` of each record; None where they are not known yet, and not part of the row then.
    """
    row: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "step": step}
    row["trained_version"] = trajectory.trained_version
    row |= {name: getattr(trajectory, name) for name in _PLAIN}
    row |= {name: getattr(trajectory, name) for name in _WHERE_KNOWN if getattr(trajectory, name) not in (None, {}, [])}
    if trajectory.ground_truth is not None:
        row["ground_truth"] = _short_truth(trajectory.ground_truth)
    row["status"] = trajectory.status
    row["stop_reason"] = trajectory.stop_reason
    if trajectory.media:
        row["media"] = {kind: [to_wire(item) for item in items] for kind, items in trajectory.media.items()}
    row["time_spans"] = [dataclasses.asdict(span) for span in trajectory.time_spans]
    row["records"] = [
        _record_to_row(record, {} if late is None else late[k]) for k, record in enumerate(trajectory.records)
    ]
    return row


def update_columns(
    num_tokens: int,
    advantages: Sequence[float] | None = None,
    old_log_probs: Sequence[float] | None = None,
    clipped: Sequence[float] | None = None,
) -> dict[str, Any]:
    """What the update adds to the row of a record of `num_tokens` tokens; lists, or arrays of numpy.

    Raises:
        ValueError: a column of another length.
    """
    found: dict[str, Any] = {"advantages": advantages, "old_log_probs": old_log_probs}
    for name, column in found.items():
        if column is not None and len(column) != num_tokens:
            raise ValueError(f"{name}: {len(column)} numbers for a record of {num_tokens} tokens")
    if clipped is not None:
        found["clipped"] = np.flatnonzero(np.asarray(clipped) > 0).astype(np.int32)
    return found


def row_to_trajectory(row: dict[str, Any]) -> Trajectory:
    """Back from a row. What belongs to the step and not to the trajectory (`step`, `trained_version`, `advantages`,
    `old_log_probs`) and keys that a later minor change may have added are left aside. A log-prob that was not finite
    comes back as NaN.

    Raises:
        DataError: another schema version, or a missing key.
    """
    version = row.get("schema_version")
    if version not in READABLE_VERSIONS:
        readable = " and ".join(map(str, READABLE_VERSIONS))
        raise DataError(f"rollout row: schema_version {version!r}, this verl_mt reads {readable}")
    row = {"source": ""} | row  # the first rows of version 1 had none
    missing = [name for name in (*_PLAIN, "stop_reason", "time_spans", "records") if name not in row]
    if missing:
        raise DataError(f"rollout row {row.get('trajectory_id')!r}: {', '.join(missing)} missing")
    stop_reason = row["stop_reason"]
    return Trajectory(
        **{name: row[name] for name in _PLAIN},
        ground_truth=row.get("ground_truth"),
        greedy_reward=row.get("greedy_reward"),
        execution_id=row.get("execution_id"),
        replicas=row.get("replicas", []),
        tool_calls=row.get("tool_calls", []),
        tool_reward_turns=row.get("tool_reward_turns", {}),
        turn_rewards={int(turn): reward for turn, reward in row.get("turn_rewards", {}).items()},
        stop_reason=None if stop_reason is None else StopReason(stop_reason),
        time_spans=[TimeSpan(**_known(TimeSpan, span)) for span in row["time_spans"]],
        records=[_row_to_record(record) for record in row["records"]],
        media={kind: [from_wire(item) for item in items] for kind, items in row.get("media", {}).items()},
    )


def disk_refused(path: str | Path, error: OSError) -> str:
    """Why something could not be written, how much space is left there, and what to do."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if isinstance(error, IsADirectoryError):
        return f"cannot write {path}: a directory is there. Move it away and give the same command again"
    return (
        f"cannot write {path}: {error.strerror or error} ({free} bytes free on its disk); free disk space, or choose "
        "another folder. The same command then goes on from what is complete"
    )


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Around whatever writes a file of a run.

    Raises:
        CheckpointError: the disk refused; names the file and the room that is left.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(disk_refused(path, error)) from error


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write a JSON Lines file whole or not at all (temporary file, fsync, rename). Returns the number of rows.

    Raises:
        CheckpointError: the disk refused.
    """
    count = 0
    with writing(path), atomic_file(Path(path)) as file:
        for row in rows:
            file.write(json_text(row) + b"\n")
            count += 1
    return count


def append_metrics(path: str | Path, metrics: dict[str, Any]) -> None:
    """Append one line; it is on disk when this returns.

    Raises:
        CheckpointError: the disk refused.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        require_file(path, or_device=True)
        with open(path, "ab") as file:
            file.write(json_text(metrics) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def append_token_texts(folder: str | Path, texts: dict[int, str]) -> None:
    """Add what token ids look like to a run directory's table; it is on disk when this returns."""
    path = Path(folder) / _TOKEN_TEXTS
    if path.exists() and read_bytes(path)[-1:] not in (b"", b"\n"):  # a killed process left a torn line
        with writing(path), open(path, "ab") as file:
            file.write(b"\n")
    append_metrics(path, {str(token_id): text for token_id, text in texts.items()})


def read_token_texts(folder: str | Path) -> dict[int, str]:
    """Token id -> its text, of a run directory; torn lines are left out. Empty where there is no table."""
    path = Path(folder) / _TOKEN_TEXTS
    if not path.exists():
        return {}
    texts: dict[int, str] = {}
    for line in read_bytes(path).split(b"\n"):
        try:
            found = parse_json(line) if line.strip() else {}
        except ValueError:
            continue
        if isinstance(found, dict):
            texts |= {int(k): text for k, text in found.items() if k.isdigit() and isinstance(text, str)}
    return texts


def truncate_metrics(path: str | Path, after_step: int) -> int:
    """Before a resumed run goes on: drop the lines of later steps, a torn last line, and what stands there twice; of a
    step that was run again the last run counts. Returns how many went.

    The lines that stay, stay byte for byte.
    """
    path = Path(path)
    if not path.exists():
        return 0
    lines = read_bytes(path).splitlines(keepends=True)
    kept: list[tuple[int, frozenset[str], bytes]] = []
    for line, row in zip(lines, _parse_lines(lines, path)):
        step = row.get("step", -1)
        if step > after_step:
            continue
        names = frozenset(row)
        if step >= 0 and kept and step < kept[-1][0]:  # this step and those behind it were run again
            kept = [one for one in kept if one[0] < step]
        elif step >= 0 and kept and kept[-1][:2] == (step, names):  # other names are another line of the same step
            kept.pop()
        kept.append((step, names, line))
    if len(kept) != len(lines):
        with writing(path), atomic_file(path) as file:
            file.writelines(line for _, _, line in kept)
    return len(lines) - len(kept)


def read_jsonl_tolerant(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a JSON Lines file that a killed run may have left with a torn last line, which is left out.

    Raises:
        DataError: not a regular file, or a broken line that is not the last (names file and line).
    """
    path = Path(path)
    return _parse_lines(read_bytes(path).splitlines(keepends=True), path)


def to_json_value(value: Any, levels: int = 2 * MAX_DEPTH) -> Any:
    """Plain JSON data: NaN and infinities become null, tuples lists, arrays numbers, other objects their text.

    Lists and dicts more than `levels` deep become a text too: no value may end the run that writes it.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return to_json_value(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict | list | tuple | set | frozenset) and not levels:
        return "(nested too deeply to be written)"
    if isinstance(value, dict):
        return {k if isinstance(k, str) else key_text(k): to_json_value(v, levels - 1) for k, v in value.items()}
    if isinstance(value, set | frozenset):  # the order of a set is another one in every process
        value = sorted(value, key=value_text)
    if isinstance(value, list | tuple):
        return [to_json_value(v, levels - 1) for v in value]
    if is_image(value):
        return to_wire(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return to_json_value(value.tolist(), levels)
    return value_text(value, 10_000)


def _short_truth(value: Any) -> Any:
    """Plain data; a text of its beginning where it is too long for a row."""
    plain = to_json_value(value)
    text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    if len(text) <= TRUTH_CHARACTERS:
        return plain
    note = f" ... (cut: the ground truth has {len(text)} characters)"
    return text[: TRUTH_CHARACTERS - len(note)] + note


def _record_to_row(record: TrajectoryRecord, late: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(record, name) for name in TOKEN_COLUMNS} | late
    row["has_log_probs"] = record.has_log_probs
    if record.messages:
        row["messages"] = record.messages
    if record.tools is not None:
        row["tools"] = record.tools
    row["turns"] = [dataclasses.asdict(span) for span in record.turns]
    return row


def _row_to_record(row: dict[str, Any]) -> TrajectoryRecord:
    columns = {name: list(row[name]) for name in TOKEN_COLUMNS}
    columns["rollout_log_probs"] = [math.nan if p is None else float(p) for p in columns["rollout_log_probs"]]
    return TrajectoryRecord(
        **columns,
        turns=[TurnSpan(**_known(TurnSpan, span)) for span in row["turns"]],
        has_log_probs=row["has_log_probs"],
        messages=row.get("messages", []),
        tools=row.get("tools"),
    )


def _known(cls: type, row: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(cls)}
    return {k: v for k, v in row.items() if k in names}


def json_text(value: Any) -> bytes:
    """The value as JSON in UTF-8, whatever it is."""
    plain = to_json_value(value)
    try:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8: written as an escape
        return json.dumps(plain, allow_nan=False).encode()


def _parse_lines(lines: list[bytes], path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("torn")
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            rows.append(row)
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(f"{path}, line {number}: not a JSON object ({error})") from error
    return rows


def _umask() -> int:
    """Read, where Linux shows it: setting it for a moment would make another thread's new file writable for all."""
    try:
        return int(re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)[1], 8)  # type: ignore[index]
    except (OSError, TypeError):
        umask = os.umask(0o077)
        os.umask(umask)
        return umask


class atomic_file:
    """A file that appears under its name when the block ends well, and not otherwise."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> Any:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=f".{self._path.name}.", suffix=".tmp", dir=self._path.parent)
        self._temporary = Path(name)
        # mkstemp's files are private; a run's files have the permissions that everything else of it has.
        os.fchmod(number, 0o666 & ~_umask())
        self._file = os.fdopen(number, "wb")
        return self._file

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            with self._file:  # closing writes too, and a full disk refuses that as well
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                os.replace(self._temporary, self._path)
        finally:
            self._temporary.unlink(missing_ok=True)
        if kind is not None:
            return
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def holder_of(path: Path) -> str | None:
    """The process that writes a run directory, in words; None if there is none."""
    try:
        handle = os.open(path / ".lock", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(handle, 200).decode(errors="replace") or "unknown process"
    finally:
        os.close(handle)
    return None
