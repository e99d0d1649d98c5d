"""A policy loss of the user's: `actor_rollout_ref.actor.policy_loss.loss_mode=my_losses.py:my_loss`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_mt.algorithms.masked import masked_fill_zero
from verl_mt.config.policy_loss import KEY, PolicyLossOptions
from verl_mt.errors import ConfigError, UserCodeError, error_text
from verl_mt.plugins import load_object

_GIVEN = ("log_probs", "old_log_probs", "advantages", "mask")
_OFFERED = ("clip_low", "clip_high", "clip_c")
"""Keyword arguments that a function gets where it takes them."""


@functools.lru_cache
def load_own_loss(path: str, names: tuple[str, ...] = ()) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """(the function, which of the offered arguments it takes).

    Args:
        path: dotted path or `file.py:name`.
        names: further keys of `policy_loss`, which become keyword arguments.

    Raises:
        PluginError: the path leads nowhere.
        ConfigError: it is no function of four tensors, or takes no argument of one of the names.
    """
    function = load_object(path, what=f"{KEY}.loss_mode")
    if not callable(function):
        raise ConfigError(f"{KEY}.loss_mode={path} is a {type(function).__name__}, expected a function")
    takes = inspect.signature(function).parameters
    whatever = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    positional = [p for p in takes.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(_GIVEN) and not any(p.kind is p.VAR_POSITIONAL for p in takes.values()):
        raise ConfigError(
            f"{KEY}.loss_mode={path} takes {', '.join(takes) or 'nothing'}; expected ({', '.join(_GIVEN)}, ...)"
        )
    for name in names:
        if name not in takes and not whatever:
            raise ConfigError(f"{KEY}.{name}: {path} takes no argument of that name; it takes {', '.join(takes)}")
    return function, tuple(name for name in _OFFERED if name in takes or whatever)


def own_loss(
    options: PolicyLossOptions, tensors: tuple[Tensor, Tensor, Tensor, Tensor], offered: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the user's function makes of a micro-batch: (loss [B, T], 0 where the mask is; numbers for the log).

    Args:
        options: names the function and holds its own arguments.
        tensors: log_probs (with gradient), old_log_probs, advantages, mask; [B, T] each.
        offered: clip ranges.

    Raises:
        UserCodeError: it raised, or returned something else than a loss for each token.
    """
    function, takes = load_own_loss(options.loss_mode, tuple(options.own))
    where, mask_BT = f"{KEY}.loss_mode={options.loss_mode}", tensors[3]
    try:
        result = function(*tensors, **{name: offered[name] for name in takes}, **options.own)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserCodeError(f"{where} raised {error_text(error, named=True)}") from error
    loss, numbers = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or loss.shape != mask_BT.shape:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UserCodeError(
            f"{where} returned {got}; expected a loss for each token, {tuple(mask_BT.shape)}, alone or with a dict of "
            "numbers. How tokens become one number is actor.loss_agg_mode"
        )
    if torch.is_grad_enabled() and tensors[0].requires_grad and not loss.requires_grad:
        raise UserCodeError(f"{where} returned a loss without gradient: it must depend on log_probs")
    return masked_fill_zero(loss, mask_BT), {name: torch.as_tensor(value).detach() for name, value in numbers.items()}
