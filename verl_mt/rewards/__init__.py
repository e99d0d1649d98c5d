"""Rewards: scorers, and reward functions on one batched, async contract.

Example:
    >>> def compute_score(data_source, solution_str, ground_truth, extra_info):
    ...     return float(solution_str.strip().endswith(ground_truth))
    >>> rewards["ends_with"] = compute_score  # then: reward.path=ends_with
"""

from typing import Any

from verl_mt.import_paths import moved_name
from verl_mt.rewards.base import (
    Reward,
    RewardFailure,
    RewardInput,
    Scores,
    default_scorers,
    load_reward,
    rewards,
)

__all__ = [
    "Reward",
    "RewardFailure",
    "RewardInput",
    "Scores",
    "default_scorers",
    "load_reward",
    "rewards",
]


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
