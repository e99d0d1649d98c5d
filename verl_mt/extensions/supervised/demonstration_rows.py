"""Demonstrations: conversations of a file, or the rollouts of a run, as what supervised training and checks read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from verl_mt.chat.demonstrations import demonstration
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.schema import DataConfig
from verl_mt.data import columnar_rows, row_files
from verl_mt.data.dataset import begun_by_system, read_rows, system_text
from verl_mt.data.run_files import row_to_trajectory
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.errors import DataError, VerlMTError
from verl_mt.tools.registry import CONFIG_KEY, ToolSet

_NUM_DIFFERENCES = 4
"""Named in the error about tools of another shape."""


@dataclass
class Demonstrations:
    """What is trained on, and what was left out."""

    trajectories: list[Trajectory] = field(default_factory=list)
    """Scored 1, with an id that names file and row; `messages` are those of the row, its system message included."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The row of each trajectory as it was read."""
    num_low: int = 0
    """Rollouts below the wanted reward, or that ended in an error."""
    num_long: int = 0
    """Conversations longer than `rollout.max_model_len`."""
    num_unchecked: int = 0
    """Conversations that show their tools while no tools file says what the run will show."""

    def fingerprint(self) -> str:
        """Of all ids, in their order."""
        digest = hashlib.sha256()
        for record in (record for trajectory in self.trajectories for record in trajectory.records):
            digest.update(repr((record.token_ids, record.loss_mask)).encode())
        return digest.hexdigest()

    def __str__(self) -> str:
        tokens = sum(t.num_sampled_tokens for t in self.trajectories)
        text = f"{len(self.trajectories)} conversations, {tokens} assistant tokens"
        left_out = [f"{self.num_low} below the reward"] * bool(self.num_low)
        left_out += [f"{self.num_long} too long"] * bool(self.num_long)
        return text + (f" (left out: {', '.join(left_out)})" if left_out else "")


def load_demonstrations(
    source: str | Path,
    chat: ChatTemplate,
    key: str,
    *,
    data: DataConfig | None = None,
    min_reward: float | None = None,
    max_tokens: int | None = None,
    tools: ToolSet | None = None,
    rows: Mapping[int, dict[str, Any]] | None = None,
) -> Demonstrations:
    """Rows of a file, or the training rollouts of a run directory, as scored trajectories.

    Args:
        source: a parquet, JSON or JSONL file of conversations or rollouts, or a run directory.
        chat: the template of the model that is trained.
        key: what the user calls the source, for errors.
        data: of the run to come: its `system` begins conversations that have no system message, as in a rollout.
        min_reward: rollouts below are left out; refused for conversations, which have none.
        max_tokens: longer ones are left out; None = none is.
        rows: those of the source, if you have read and changed them: position, from 0 -> row.
        tools: those that the run to come shows. Conversations without `tools` are shown these; None = the rows' own.

    Raises:
        DataError: a row of neither kind, one that the template cannot render, tools that are not those of the run,
            rollouts of another tokenizer, or nothing left to train on; names file and row.
    """
    found = Demonstrations()
    system = None if data is None else system_text(data.system)
    for file in _files_of(Path(source).expanduser(), key) if rows is None else [Path(source)]:
        for index, row in _rows_of(file, key) if rows is None else rows.items():
            where = f"{file}, row {index + 1}"
            try:
                shown = _tools_shown(row, tools)
                if "records" in row:
                    trajectory = _sampled(row, chat, min_reward)
                elif min_reward is not None:
                    raise DataError("--min-reward needs rollouts. This is a conversation, which has no reward")
                else:
                    trajectory = _said(row, chat, system, shown)
            except VerlMTError as error:
                raise DataError(f"{where}: {error}") from error
            if trajectory is None:
                found.num_low += 1
                continue
            trajectory.trajectory_id = trajectory.prompt_id = trajectory.group_id = where
            trajectory.reward = 1.0
            if max_tokens is not None and any(len(r.token_ids) > max_tokens for r in trajectory.records):
                found.num_long += 1
            else:
                found.trajectories.append(trajectory)
                found.rows.append(row)
                found.num_unchecked += bool(shown) and tools is None and "records" not in row
    if not found.trajectories:
        raise DataError(f"{key}: {source} leaves nothing to train on: {found}")
    return found


def _files_of(source: Path, key: str) -> list[Path]:
    if not (source / row_files.FOLDER).is_dir():
        return [source]
    files = [file.path for file in row_files.row_files(source) if file.split == "train"]
    if not files:
        raise DataError(f"{key}: {source / row_files.FOLDER} holds no step_*. The run has written no rollouts yet")
    return files


def _rows_of(file: Path, key: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """Position in the file, from 0, and row."""
    if file.suffix == f".{row_files.PARQUET}" and columnar_rows.is_rows_file(file):
        return enumerate(columnar_rows.read_parquet(file))
    return read_rows(file, key).items()


def _tools_shown(row: dict[str, Any], tools: ToolSet | None) -> list[dict[str, Any]] | None:
    """The schemas that the row's prompt shows: as a rollout of the run to come will show them.

    Raises:
        DataError: the row's own differ from them; says in what.
    """
    given = row.get("tools")
    if tools is None:
        return given
    if "records" in row:  # its ids stand; a rollout may have been shown a selection
        names = [schema["function"]["name"] for schema in given or []]
        wanted = tools.schemas([name for name in names if name in tools.names])
    else:
        extra = row.get("extra_info") or {}
        shown = extra.get("prompt_tools")
        wanted = tools.for_row(tool_selection=extra.get("tool_selection"), prompt_tools=shown).schemas(shown)
    if given is None:
        return wanted
    found = list(islice(_differences(_by_name(given), _by_name(wanted)), _NUM_DIFFERENCES))
    if found:
        raise DataError(
            f"its tools are not those that the run will show ({CONFIG_KEY}), so the model would learn prompts that no "
            f"rollout has: {'; '.join(found)}. Leave `tools` out of the rows: the run's own are shown then"
        )
    return wanted


def _by_name(schemas: Any) -> dict[str, Any]:
    """Tools by their names: their order, and that of keys, is the run's in any case."""
    try:
        return {schema["function"]["name"]: schema for schema in schemas}
    except (TypeError, KeyError) as error:
        raise DataError(f"`tools` must be a list of OpenAI tool schemas, got {schemas!r:.120}") from error


def _differences(given: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """What a row's tools say otherwise than the run's, place by place."""
    if not (isinstance(given, dict) and isinstance(wanted, dict)):
        if given != wanted:
            yield f"{where} is {given!r:.80} in the row and {wanted!r:.80} in the run"
        return
    for key in dict.fromkeys([*given, *wanted]):
        place = f"{where}.{key}" if where else str(key)
        if key not in wanted:
            yield f"{place} is {given[key]!r:.80} in the row and absent in the run"
        elif key not in given:
            yield f"{place} is absent in the row and {wanted[key]!r:.80} in the run"
        else:
            yield from _differences(given[key], wanted[key], place)


def _sampled(row: dict[str, Any], chat: ChatTemplate, min_reward: float | None) -> Trajectory | None:
    """A rollout with its own ids; None where its reward is too low, or it has none."""
    trajectory = row_to_trajectory(row)
    if not trajectory.trainable or trajectory.reward is None:
        return None
    if min_reward is not None and trajectory.reward < min_reward:
        return None
    _check_same_tokenizer(trajectory, chat)
    return trajectory


def _said(
    row: dict[str, Any], chat: ChatTemplate, system: str | None, tools: list[dict[str, Any]] | None
) -> Trajectory:
    """A conversation as a rollout would have recorded it."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(f"neither a rollout nor a conversation: no list `messages`. It has {', '.join(row)}")
    messages = begun_by_system(messages, system)
    record = demonstration(chat, messages, tools)
    if not any(record.loss_mask):
        raise DataError("every assistant message has weight 0: nothing is left to learn from")
    trajectory = Trajectory("", "", "", "", messages=messages, records=[record])
    trajectory.stop_reason = StopReason.FINISHED
    return trajectory


def _check_same_tokenizer(trajectory: Trajectory, chat: ChatTemplate) -> None:
    """Ids mean nothing to another tokenizer: what they spell must be what was written down as text."""
    span = next((s for s in trajectory.records[0].turns if s.kind == "assistant"), None)
    if span is None or not trajectory.turn_texts:
        return
    ids = trajectory.records[0].token_ids[span.start : span.end]
    size = len(chat.tokenizer)
    text = chat.turn_text(ids) if max(ids) < size else f"id {max(ids)} of a vocabulary of {size}"
    if text != trajectory.turn_texts[0]:
        raise DataError(
            f"this rollout was sampled with another tokenizer: its first turn is {trajectory.turn_texts[0][:60]!r}, "
            f"and its ids spell {text[:60]!r} here. Train the model that the run trained, or one of its family"
        )
