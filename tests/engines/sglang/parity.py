"""Are the records of two engines the same, token for token?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from verl_mt.data.trajectory import Trajectory, TrajectoryGroup

TIE = 1e-4
"""Two candidates whose logits are closer than this may come out either way: other kernels add in another order."""


@dataclass
class Comparison:
    """What `compare` found."""

    num_rows: int = 0
    num_tool_rows: int = 0
    """With tool results."""
    num_retry_rows: int = 0
    """With tool results, and a user who asked for another try."""
    num_sampled: int = 0
    ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def compare(module: Any, expected: list[TrajectoryGroup], found: list[TrajectoryGroup]) -> Comparison:
    """Ids, masks, messages, stop reasons; where ids differ, whether the policy was undecided there."""
    result = Comparison()
    for left, right in zip(_trajectories(expected), _trajectories(found), strict=True):
        assert left.prompt_id == right.prompt_id
        result.num_rows += 1
        with_tool = any(message["role"] == "tool" for message in left.messages)
        result.num_tool_rows += with_tool
        result.num_retry_rows += with_tool and sum(message["role"] == "user" for message in left.messages) > 1
        result.num_sampled += left.num_sampled_tokens
        if _what_counts(left) == _what_counts(right):
            continue
        where = _first_difference(left, right)
        if where is not None and _margin(module, left.records[0].token_ids, where) < TIE:
            result.ties.append(left.prompt_id)
        else:
            result.differences.append(f"{left.prompt_id} at token {where}")
    return result


def _trajectories(groups: list[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _what_counts(trajectory: Trajectory) -> Any:
    streams = [(record.token_ids, record.sampled, record.loss_mask) for record in trajectory.records]
    return streams, trajectory.messages, trajectory.stop_reason, trajectory.reward


def _first_difference(left: Trajectory, right: Trajectory) -> int | None:
    """Position of the first sampled id that differs; None = something else does."""
    a, b = left.records[0], right.records[0]
    for position, (x, y) in enumerate(zip(a.token_ids, b.token_ids)):
        if x != y:
            return position if a.sampled[position] and b.sampled[position] else None
    return None


def _margin(module: Any, ids: list[int], position: int) -> float:
    with torch.no_grad():
        logits = module(torch.tensor([ids[:position]])).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return first - second
