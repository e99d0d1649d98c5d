"""From `algorithm.*` to the step between a scored batch and its update."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.advantages import by_name as advantage_estimators
from verl_mt.algorithms.advantages import gdpo, remax
from verl_mt.algorithms.aggregate import tokens_per_trajectory
from verl_mt.algorithms.gae import discounted_returns, gae, whiten_tokens
from verl_mt.algorithms.kl_control import KLControl
from verl_mt.config.kl_control import read_kl_control
from verl_mt.config.policy_loss import read_policy_loss
from verl_mt.config.schema import AlgorithmConfig, Config
from verl_mt.data import batch as columns
from verl_mt.errors import DataError
from verl_mt.plugins import names_code
from verl_mt.trainer.advantage_step import AdvantageStep, RewardPenalty, TokenEstimator, TrajectoryEstimator
from verl_mt.trainer.own_estimator import own_per_token, own_per_trajectory
from verl_mt.workers.own_loss import load_own_loss
from verl_mt.workers.setup import AlgorithmNeeds
from verl_mt.workers.worker_group import WorkerGroup


def advantage_estimator(config: AlgorithmConfig, workers: WorkerGroup | None = None) -> AdvantageStep:
    """What fills in the batch's advantages; see `AdvantageStep`.

    Args:
        config: `algorithm`.
        workers: for values and log-probs; None where neither is asked for.
    """
    per_token = _per_token(config)
    return AdvantageStep(
        per_trajectory=None if per_token is not None else _per_trajectory(config),
        per_token=per_token,
        workers=workers,
        penalty=_penalty(config),
    )


def algorithm_needs(config: Config) -> AlgorithmNeeds:
    """What the workers are asked for."""
    algorithm, loss = config.algorithm, read_policy_loss(config.actor_rollout_ref.actor.policy_loss)
    if names_code(loss.loss_mode):
        load_own_loss(loss.loss_mode, tuple(loss.own))  # a mistake in it is found before anything slow
    return AlgorithmNeeds(
        rollout_correction=algorithm.rollout_correction,
        kl_in_reward=algorithm.use_kl_in_reward,
        critic=config.critic if algorithm.adv_estimator == "gae" else None,
        critic_warmup=config.trainer.critic_warmup,
    )


def _penalty(config: AlgorithmConfig) -> RewardPenalty | None:
    if not config.use_kl_in_reward:
        return None
    options = read_kl_control(config.kl_ctrl)
    target = options.target_kl if options.type == "adaptive" else None
    return RewardPenalty(config.kl_penalty, KLControl(options.kl_coef, target, options.horizon))


def _per_token(config: AlgorithmConfig) -> TokenEstimator | None:
    """Estimators that look at the reward of each token."""
    if names_code(config.adv_estimator):
        return own_per_token(config)

    def with_critic(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        advantages, returns = gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
        return whiten_tokens(advantages, mask), returns

    def reinforce_plus_plus(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        returns = discounted_returns(rewards, mask, gamma=config.gamma)
        return whiten_tokens(returns, mask), returns

    return {"gae": with_critic, "reinforce_plus_plus": reinforce_plus_plus}.get(config.adv_estimator)


def _per_trajectory(config: AlgorithmConfig) -> TrajectoryEstimator:
    """Estimators that look at one number per trajectory."""
    if names_code(config.adv_estimator):
        return own_per_trajectory(config)
    if config.adv_estimator == "remax":
        return _remax
    if config.adv_estimator == "gdpo":
        return partial(_gdpo, config.gdpo_reward_weights)
    estimate = advantage_estimators[config.adv_estimator]
    takes = inspect.signature(estimate).parameters

    def compare(batch: TensorDict, rewards_N: Tensor) -> Tensor:
        known = {
            "norm_by_std": config.norm_adv_by_std_in_grpo,
            "tokens_N": tokens_per_trajectory(batch[columns.LOSS_MASK], batch[columns.TRAJECTORY_INDEX])[0],
        }
        group_index_N = columns.trajectory_rewards(batch)[1]
        return estimate(rewards_N, group_index_N, **{k: v for k, v in known.items() if k in takes})

    return compare


def _remax(batch: TensorDict, rewards_N: Tensor) -> Tensor:
    """A prompt whose greedy rollout failed has nothing to be compared with: 0."""
    if columns.GREEDY_REWARDS not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        raise DataError(
            "algorithm.adv_estimator=remax: these rollouts have no greedy answer to be compared with; save them with "
            "remax (trainer.debug_rollout_data), or train on them with another estimator"
        )
    greedy_N = batch[columns.GREEDY_REWARDS][columns.first_rows(batch)]
    return remax(rewards_N, torch.where(torch.isnan(greedy_N), rewards_N, greedy_N)).float()


def _gdpo(weights: dict[str, float], batch: TensorDict, rewards_N: Tensor) -> Tensor:
    parts_NK = columns.reward_parts(batch, list(weights))
    return gdpo(parts_NK, columns.trajectory_rewards(batch)[1], weights_K=torch.tensor(list(weights.values())))
