"""From `algorithm.*` to the step between a scored batch and its update."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from tensordict import TensorDict

from verl_mt.algorithms.advantages import by_name as advantage_estimators
from verl_mt.algorithms.aggregate import tokens_per_trajectory
from verl_mt.config.schema import AlgorithmConfig
from verl_mt.data.batch import ADVANTAGES, LOSS_MASK, TRAJECTORY_INDEX, expand_to_tokens, trajectory_rewards


def advantage_estimator(config: AlgorithmConfig) -> Callable[[TensorDict], None]:
    """What fills in the batch's advantages."""
    estimate = advantage_estimators[config.adv_estimator]
    takes = inspect.signature(estimate).parameters

    def fill(batch: TensorDict) -> None:
        rewards_N, group_index_N = trajectory_rewards(batch)
        known = {
            "norm_by_std": config.norm_adv_by_std_in_grpo,
            "tokens_N": tokens_per_trajectory(batch[LOSS_MASK], batch[TRAJECTORY_INDEX])[0],
        }
        advantages_N = estimate(rewards_N, group_index_N, **{k: v for k, v in known.items() if k in takes})
        batch[ADVANTAGES] = expand_to_tokens(batch, advantages_N)

    return fill
