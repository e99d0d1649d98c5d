"""The step between a scored batch and its update: values, the KL penalty, advantages.

Which estimator fills them in is chosen once, by `advantage_estimator`: one of the shipped ones, or a function of the
user's, `algorithm.adv_estimator=my_estimators.py:my_estimator`. The parameters of such a function say what it is:
`(rewards, groups, ...)` has one reward per trajectory and the number of each one's group; `(rewards, mask, ...)` has
the rewards of single tokens, over the sampled tokens of each trajectory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.advantages import by_name as advantage_estimators
from verl_mt.algorithms.advantages import gdpo, remax
from verl_mt.algorithms.aggregate import tokens_per_trajectory
from verl_mt.algorithms.gae import discounted_returns, gae, whiten_tokens
from verl_mt.algorithms.kl import KLControl, kl_penalty
from verl_mt.algorithms.masked import masked_fill_zero
from verl_mt.algorithms.streams import Streams
from verl_mt.config.options import read_kl_control
from verl_mt.config.schema import AlgorithmConfig, Config
from verl_mt.data import batch as columns
from verl_mt.errors import ConfigError, DataError, UserCodeError, error_text
from verl_mt.plugins import load_object, names_code
from verl_mt.workers.worker_group import WorkerGroup

_KEY = "algorithm.adv_estimator"
_FORMS = "Expected (rewards, groups, ...) or (rewards, mask, ...)"
_OFFERED = {"groups": ("norm_by_std", "tokens", "batch"), "mask": ("gamma", "lam")}
"""Second parameter of a form -> the further ones that are filled in by name."""
_MADE_UP_TOKENS = 8

TrajectoryEstimator = Callable[[TensorDict, Tensor], Tensor]
"""(batch, rewards_N) -> advantages_N."""
TokenEstimator = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(rewards_NM, values_NM, mask_NM) -> (advantages_NM, returns_NM), over the streams of trajectories."""


@dataclass
class RewardPenalty:
    """The KL penalty in the reward."""

    kind: str
    """Its estimator; see `kl_penalty`."""
    control: KLControl


@dataclass
class AdvantageStep:
    """Calling it fills in a batch's advantages (and what the critic learns from) and returns metrics.

    Exactly one of the two estimators is there.
    """

    per_trajectory: TrajectoryEstimator | None = None
    per_token: TokenEstimator | None = None
    workers: WorkerGroup | None = None
    """Gives values and log-probs, where something asks for them."""
    penalty: RewardPenalty | None = None

    def __call__(self, batch: TensorDict) -> dict[str, float]:
        """Reference log-probs must be there where a penalty needs them."""
        if self.workers is not None:
            self.workers.add_values(batch)
        mask_BT = batch[columns.LOSS_MASK]
        streams = Streams.of(mask_BT, batch[columns.TRAJECTORY_INDEX], batch[columns.RECORD_INDEX])
        penalty_NM, metrics = self._penalise(batch, streams)
        metrics |= _greedy_metrics(batch)
        if self.per_trajectory is not None:
            rewards_N = columns.trajectory_rewards(batch)[0]
            if penalty_NM is not None:
                rewards_N = rewards_N - penalty_NM.sum(1)
            advantages_N = self.per_trajectory(batch, rewards_N).float()
            batch[columns.ADVANTAGES] = columns.expand_to_tokens(batch, advantages_N)
            return metrics
        assert self.per_token is not None
        rewards_NM = token_rewards(batch, streams)
        if penalty_NM is not None:
            rewards_NM = rewards_NM - penalty_NM
        # Values enter here as they are in float32; sums over long streams are taken in float64.
        values = batch.get(columns.VALUES, None)
        values_NM = torch.zeros_like(rewards_NM) if values is None else streams.gather(values).double()
        advantages_NM, returns_NM = self.per_token(rewards_NM, values_NM, streams.mask_NM)
        filled = {
            columns.ADVANTAGES: advantages_NM, columns.RETURNS: returns_NM, columns.TOKEN_REWARDS: rewards_NM,
        }  # fmt: skip
        for name, values_of_tokens in filled.items():
            batch[name] = streams.scatter(values_of_tokens.float())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What changes from step to step."""
        return {} if self.penalty is None else {"kl_control": self.penalty.control.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if self.penalty is not None:
            self.penalty.control.load_state_dict(state.get("kl_control", {}))

    def _penalise(self, batch: TensorDict, streams: Streams) -> tuple[Tensor | None, dict[str, float]]:
        """[N, M] of what is taken from each sampled token's reward; tokens that nobody sampled cost nothing."""
        if self.penalty is None:
            return None, {}
        assert self.workers is not None
        control = self.penalty.control
        log_probs = self.workers.compute_log_probs(batch)
        kl_BT = kl_penalty(log_probs, batch[columns.REF_LOG_PROBS], self.penalty.kind)
        counted_BT = batch[columns.LOSS_MASK] & batch[columns.SAMPLED]
        kl_NM = streams.gather(masked_fill_zero(kl_BT, counted_BT).double())
        num_N = streams.gather(counted_BT.double()).sum(1)
        mean = (kl_NM.sum(1) / num_N.clamp(min=1)).mean().item()
        metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": control.coef}
        taken_NM = control.coef * kl_NM
        control.update(mean, len(kl_NM))
        return taken_NM, metrics


def _greedy_metrics(batch: TensorDict) -> dict[str, float]:
    """Of the greedy answers that samples are compared with, where there are some."""
    if columns.GREEDY_REWARDS not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return {}
    greedy_N = batch[columns.GREEDY_REWARDS][columns.first_rows(batch)]
    known = ~torch.isnan(greedy_N)
    counts = {"rollout/greedy_failed": float((~known).sum())}
    return counts | ({"reward/greedy_mean": greedy_N[known].mean().item()} if known.any() else {})


def token_rewards(batch: TensorDict, streams: Streams) -> Tensor:
    """float64 [N, M]: what each token of a trajectory earned. What belongs to a turn stands at the turn's end; all the
    rest of the trajectory's reward on its last token, in whatever record that is."""
    rewards_N = columns.trajectory_rewards(batch)[0].double()
    placed = batch.get(columns.TURN_REWARDS, None)
    if placed is None:
        placed = torch.zeros_like(batch[columns.ROLLOUT_LOG_PROBS])
    rewards_NM = streams.gather_rewards(placed.double())
    rows = torch.arange(len(rewards_N), device=rewards_N.device)
    rest_N = rewards_N - _over_trajectories(batch, placed.double())
    rewards_NM[rows, (streams.length_N - 1).clamp(min=0)] += rest_N
    return rewards_NM


def _over_trajectories(batch: TensorDict, values_BT: Tensor) -> Tensor:
    _, index_B = torch.unique(batch[columns.TRAJECTORY_INDEX], return_inverse=True)
    sums = values_BT.new_zeros(int(index_B.max()) + 1)
    return sums.index_add(0, index_B, values_BT.sum(1))


def advantage_estimator(config: AlgorithmConfig, workers: WorkerGroup | None = None) -> AdvantageStep:
    """What fills in the batch's advantages.

    Args:
        config: `algorithm`.
        workers: for values and log-probs; None where neither is asked for.
    """
    per_trajectory, per_token = _estimators(config)
    penalty = None
    if config.use_kl_in_reward:
        options = read_kl_control(config.kl_ctrl)
        target = options.target_kl if options.type == "adaptive" else None
        penalty = RewardPenalty(config.kl_penalty, KLControl(options.kl_coef, target, options.horizon))
    return AdvantageStep(per_trajectory, per_token, workers, penalty)


Estimators = tuple[TrajectoryEstimator | None, TokenEstimator | None]
"""One of the two."""


def _estimators(config: AlgorithmConfig) -> Estimators:
    if names_code(config.adv_estimator):
        return own_estimator(config)
    per_token = {"gae": _with_critic, "reinforce_plus_plus": _reinforce_plus_plus}.get(config.adv_estimator)
    if per_token is not None:
        return None, partial(per_token, config)
    if config.adv_estimator == "remax":
        return _remax, None
    if config.adv_estimator == "gdpo":
        return partial(_gdpo, config.gdpo_reward_weights), None
    return partial(_compare, config), None


def _with_critic(config: AlgorithmConfig, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages, returns = gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
    return whiten_tokens(advantages, mask), returns


def _reinforce_plus_plus(
    config: AlgorithmConfig, rewards: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    returns = discounted_returns(rewards, mask, gamma=config.gamma)
    return whiten_tokens(returns, mask), returns


def _compare(config: AlgorithmConfig, batch: TensorDict, rewards_N: Tensor) -> Tensor:
    """The estimators that compare a group's rewards; each gets what it takes."""
    estimate = advantage_estimators[config.adv_estimator]
    known = {
        "norm_by_std": config.norm_adv_by_std_in_grpo,
        "tokens_N": tokens_per_trajectory(batch[columns.LOSS_MASK], batch[columns.TRAJECTORY_INDEX])[0],
    }
    takes = inspect.signature(estimate).parameters
    group_index_N = columns.trajectory_rewards(batch)[1]
    return estimate(rewards_N, group_index_N, **{k: v for k, v in known.items() if k in takes})


def _remax(batch: TensorDict, rewards_N: Tensor) -> Tensor:
    """A prompt whose greedy rollout failed has nothing to be compared with: 0."""
    if columns.GREEDY_REWARDS not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        raise DataError(
            "algorithm.adv_estimator=remax: these rollouts have no greedy answer to be compared with. Save them with "
            "remax (trainer.debug_rollout_data), or train on them with another estimator"
        )
    greedy_N = batch[columns.GREEDY_REWARDS][columns.first_rows(batch)]
    return remax(rewards_N, torch.where(torch.isnan(greedy_N), rewards_N, greedy_N)).float()


def _gdpo(weights: dict[str, float], batch: TensorDict, rewards_N: Tensor) -> Tensor:
    parts_NK = columns.reward_parts(batch, list(weights))
    return gdpo(parts_NK, columns.trajectory_rewards(batch)[1], weights_K=torch.tensor(list(weights.values())))


def try_own_estimator(config: Config) -> None:
    """Call a function of the user's once, on made-up rewards of one step, before anything is sampled.

    A function that takes `batch` is not called, because that holds columns of the user's rows and reward. Nor is an
    object, because the call could change its state.

    Raises:
        ConfigError: the name leads to no function, or to one with other parameters.
        UserCodeError: it raised, or returned something else than finite advantages.
    """
    path = config.algorithm.adv_estimator
    if not names_code(path):
        return
    per_trajectory, per_token = own_estimator(config.algorithm)
    function = load_object(path, what=_KEY)
    if not inspect.isfunction(function) or "batch" in inspect.signature(function).parameters:
        return
    n, num_prompts = config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    rewards_N = (torch.arange(num_prompts * n) % n).float() / n
    length_N = torch.arange(num_prompts * n) % _MADE_UP_TOKENS + 1
    mask_NM = torch.arange(_MADE_UP_TOKENS) < length_N[:, None]
    try:
        with torch.random.fork_rng(devices=[]):
            if per_trajectory is not None:
                index_N = torch.arange(len(rewards_N))
                made_up = {
                    columns.LOSS_MASK: mask_NM, columns.TRAJECTORY_INDEX: index_N, columns.GROUP_INDEX: index_N // n,
                    columns.REWARDS: rewards_N,
                }  # fmt: skip
                per_trajectory(TensorDict(made_up, batch_size=[len(rewards_N)]), rewards_N)
            if per_token is not None:
                rewards_NM = torch.zeros(mask_NM.shape, dtype=torch.float64)
                rewards_NM[torch.arange(len(length_N)), length_N - 1] = rewards_N.double()
                per_token(rewards_NM, torch.zeros_like(rewards_NM), mask_NM)
    except UserCodeError as error:
        text = f"{error} (tried at start on made-up rewards of {num_prompts} prompts x {n} samples. {_FORMS})"
        raise UserCodeError(text) from error.__cause__


def own_estimator(config: AlgorithmConfig) -> Estimators:
    """A function of the user's as the trainer calls it; it gets those of the offered keyword arguments that it takes.

    Raises:
        ConfigError: the name leads to no function, or to one with other parameters.
    """
    path = config.adv_estimator
    function = load_object(path, what=_KEY)
    if not callable(function):
        raise ConfigError(f"{_KEY}={path} is a {type(function).__name__}, expected a function")
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    if len(names) < 2:
        raise ConfigError(f"{_KEY}={path} takes {', '.join(names) or 'nothing'}. {_FORMS}")
    second = "mask" if names[1].startswith("mask") else "groups"
    unfilled = [
        p.name
        for p in list(parameters.values())[2:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in _OFFERED[second]
    ]
    if unfilled:
        raise ConfigError(
            f"{_KEY}={path} takes {', '.join(names)}, and nothing fills in {', '.join(unfilled)}: an estimator of "
            f"(rewards, {second}, ...) may take {', '.join(_OFFERED[second])} besides"
        )

    discounts: dict[str, Any] = {name: getattr(config, name) for name in ("gamma", "lam") if name in names}

    def per_token(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        advantages = _call(path, function, (rewards, mask), discounts)
        # Nothing learns from returns: there is no critic.
        return torch.where(mask, advantages, torch.zeros_like(advantages)), rewards

    def per_trajectory(batch: TensorDict, rewards_N: Tensor) -> Tensor:
        offered = {
            "norm_by_std": config.norm_adv_by_std_in_grpo,
            "tokens": tokens_per_trajectory(batch[columns.LOSS_MASK], batch[columns.TRAJECTORY_INDEX])[0],
            "batch": batch,
        }
        groups_N = columns.trajectory_rewards(batch)[1]
        given = {name: value for name, value in offered.items() if name in names[2:]}
        return _call(path, function, (rewards_N, groups_N), given).float()

    return (None, per_token) if second == "mask" else (per_trajectory, None)


def _call(path: str, function: Callable[..., Any], tensors: tuple[Tensor, Tensor], offered: dict[str, Any]) -> Tensor:
    try:
        found = function(*tensors, **offered)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserCodeError(f"{_KEY}={path} raised {error_text(error, named=True)}") from error
    if not isinstance(found, Tensor) or found.shape != tensors[0].shape:
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise UserCodeError(f"{_KEY}={path} returned {got}. Expected advantages of shape {tuple(tensors[0].shape)}")
    if not torch.isfinite(found).all():
        place = (~torch.isfinite(found)).nonzero()[0].tolist()
        bad = found[tuple(place)].item()
        raise UserCodeError(f"{_KEY}={path} returned {bad} at {place}: advantages must be finite")
    return found
