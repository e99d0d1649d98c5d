"""An advantage estimator of the user's: `algorithm.adv_estimator=my_estimators.py:my_estimator`.

Its parameters say what it is. `(rewards, groups, ...)` has one reward per trajectory and the number of each one's
group; `(rewards, mask, ...)` has the rewards of single tokens, over the sampled tokens of each trajectory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.aggregate import tokens_per_trajectory
from verl_mt.config.schema import AlgorithmConfig
from verl_mt.data import batch as columns
from verl_mt.errors import ConfigError, UserCodeError, error_text
from verl_mt.plugins import load_object
from verl_mt.trainer.advantage_step import TokenEstimator, TrajectoryEstimator

_KEY = "algorithm.adv_estimator"
_FORMS = "expected (rewards, groups, ...) or (rewards, mask, ...)"


def own_per_token(config: AlgorithmConfig) -> TokenEstimator | None:
    """None where the function has one reward per trajectory."""
    function, names = _load(config.adv_estimator)
    if not names[1].startswith("mask"):
        return None
    offered: dict[str, Any] = {name: getattr(config, name) for name in ("gamma", "lam") if name in names}

    def estimate(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        advantages = _call(config.adv_estimator, function, (rewards, mask), offered)
        # Nothing learns from returns: there is no critic.
        return torch.where(mask, advantages, torch.zeros_like(advantages)), rewards

    return estimate


def own_per_trajectory(config: AlgorithmConfig) -> TrajectoryEstimator:
    """The function as the trainer calls it; it gets those of its keyword arguments that are offered."""
    function, names = _load(config.adv_estimator)

    def estimate(batch: TensorDict, rewards_N: Tensor) -> Tensor:
        offered = {
            "norm_by_std": config.norm_adv_by_std_in_grpo,
            "tokens": tokens_per_trajectory(batch[columns.LOSS_MASK], batch[columns.TRAJECTORY_INDEX])[0],
            "batch": batch,
        }
        groups_N = columns.trajectory_rewards(batch)[1]
        given = {name: value for name, value in offered.items() if name in names[2:]}
        return _call(config.adv_estimator, function, (rewards_N, groups_N), given).float()

    return estimate


def _load(path: str) -> tuple[Callable[..., Any], list[str]]:
    function = load_object(path, what=_KEY)
    if not callable(function):
        raise ConfigError(f"{_KEY}={path} is a {type(function).__name__}, expected a function")
    names = list(inspect.signature(function).parameters)
    if len(names) < 2:
        raise ConfigError(f"{_KEY}={path} takes {', '.join(names) or 'nothing'}; {_FORMS}")
    return function, names


def _call(path: str, function: Callable[..., Any], tensors: tuple[Tensor, Tensor], offered: dict[str, Any]) -> Tensor:
    try:
        found = function(*tensors, **offered)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserCodeError(f"{_KEY}={path} raised {error_text(error, named=True)}") from error
    if not isinstance(found, Tensor) or found.shape != tensors[0].shape:
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise UserCodeError(f"{_KEY}={path} returned {got}; expected advantages of shape {tuple(tensors[0].shape)}")
    if not torch.isfinite(found).all():
        place = (~torch.isfinite(found)).nonzero()[0].tolist()
        bad = found[tuple(place)].item()
        raise UserCodeError(f"{_KEY}={path} returned {bad} at {place}: advantages must be finite")
    return found
