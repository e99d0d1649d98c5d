"""A few rollouts of a step as a table that a person reads: chosen over the whole range of rewards, bounded in size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_mt.data.conversation import Message, reasoning_of
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup

COLUMNS = (
    "step",
    "trajectory",
    "data_source",
    "reward",
    "stop_reason",
    "turns",
    "tool_calls",
    "tokens",
    "conversation",
)
MAX_CHARACTERS = 8_000
"""Of a conversation; the middle of a longer one is left out, and the cell says how much."""


@dataclass(frozen=True)
class RolloutTable:
    """Rows of plain values under `columns`."""

    columns: tuple[str, ...]
    rows: list[list[Any]]


def rollout_table(step: int, groups: Sequence[TrajectoryGroup], num_rows: int) -> RolloutTable:
    """The worst, the best and those evenly between them by reward; unscored ones count as the worst.

    Args:
        step: the step they were sampled for.
        groups: a rollout's groups.
        num_rows: at most so many rows.
    """
    ranked = sorted((t for g in groups for t in g.trajectories), key=_rank)
    count = min(num_rows, len(ranked))
    places = [round(k * (len(ranked) - 1) / max(1, count - 1)) for k in range(count)]
    return RolloutTable(COLUMNS, [_row(step, ranked[place]) for place in places])


def conversation_text(messages: Sequence[Message]) -> str:
    """Messages as plain text, each under its role in brackets; calls as JSON, pictures as `<image>`."""
    return "\n\n".join(f"[{m['role']}]\n{_message_text(m)}" for m in messages)


def clip(text: str, limit: int) -> str:
    """At most about `limit` characters: head and tail, and between them how many are missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _rank(trajectory: Trajectory) -> tuple[float, str]:
    reward = trajectory.reward
    return (float("-inf") if reward is None or reward != reward else reward, trajectory.trajectory_id)


def _row(step: int, t: Trajectory) -> list[Any]:
    calls = sum(int(v) for k, v in t.counters.items() if k.startswith("tools/") and k.endswith("/calls"))
    text = clip(conversation_text(t.messages), MAX_CHARACTERS)
    if t.error is not None:
        text += f"\n\n[error]\n{clip(t.error, MAX_CHARACTERS // 4)}"
    reason = "" if t.stop_reason is None else str(t.stop_reason)
    return [step, t.trajectory_id, t.data_source, t.reward, reason, t.num_turns, calls, t.num_sampled_tokens, text]


def _message_text(message: Message) -> str:
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [_part_text(p) for p in content or ()]
    if reasoning := reasoning_of(message):
        parts.insert(0, f"<think>{reasoning}</think>")
    parts += [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in parts if part)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if "text" in part else f"<{part.get('type', 'part')}>"
