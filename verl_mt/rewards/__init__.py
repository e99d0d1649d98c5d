"""Rewards: scorers, and the familiar reward signatures on one batched, async contract.

Example:
    >>> def compute_score(data_source, solution_str, ground_truth, extra_info):
    ...     return float(solution_str.strip().endswith(ground_truth))
    >>> rewards["ends_with"] = compute_score  # then: reward.path=ends_with
"""

from verl_mt.rewards.base import (
    ORM,
    Reward,
    RewardFailure,
    RewardInput,
    Scores,
    default_scorers,
    load_reward,
    orms,
    rewards,
)

__all__ = [
    "ORM",
    "Reward",
    "RewardFailure",
    "RewardInput",
    "Scores",
    "default_scorers",
    "load_reward",
    "orms",
    "rewards",
]
