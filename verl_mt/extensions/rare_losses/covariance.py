"""Losses that keep the entropy up by treating the few tokens that would lower it most.

The change of the policy's entropy in one step is, to first order, minus the covariance of a token's log-prob with its
advantage. A few tokens hold most of it: those the policy is sure of already, and that are rewarded further.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617).
The choice of tokens is made once over a whole mini-batch, so no micro-batch split changes it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_mt.algorithms.losses import ppo_clip_loss
from verl_mt.algorithms.masked import masked_fill_zero, masked_mean
from verl_mt.data import batch as columns

if TYPE_CHECKING:
    from verl_mt.workers.loss import WholeMiniBatch

_LOG_RATIO_BOUND = 20.0


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log_prob - its mean) * (A - its mean) of each token; both means are over the tokens of the mask.

    Args:
        log_probs: [B, T] of a whole mini-batch, under the current policy.
        advantages: [B, T].
        mask: [B, T] tokens of the loss.

    Returns:
        [B, T] without gradient, 0 where masked out.
    """
    log_probs, advantages = masked_fill_zero(log_probs.detach(), mask), masked_fill_zero(advantages, mask)
    centred = (log_probs - masked_mean(log_probs, mask)) * (advantages - masked_mean(advantages, mask))
    return masked_fill_zero(centred, mask)


def without_clipped(
    covariances_BT: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """-inf at tokens that PPO clips: they have no gradient that could be left out.

    Args:
        covariances_BT: [B, T].
        log_probs, old_log_probs, advantages, clip_low, clip_high: as for `ppo_clip_loss`.
    """
    log_ratio = log_probs - old_log_probs
    too_high = (advantages > 0) & (log_ratio > math.log1p(clip_high))
    too_low = (advantages < 0) & (log_ratio.exp() < 1 - clip_low)
    return covariances_BT.masked_fill(too_high | too_low, -math.inf)


def choose_between(
    covariances_BT: Tensor,
    mask: Tensor,
    *,
    fraction: float,
    lower: float,
    upper: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Clip-Cov's tokens: drawn without order among those whose covariance is in [lower, upper].

    Args:
        covariances_BT: of the whole mini-batch; -inf = no candidate.
        mask: [B, T] tokens of the loss.
        fraction: of all tokens of the mask; at least one token is drawn where there is a candidate.
        lower, upper: the covariances of candidates.
        generator: on the CPU; the draw depends on nothing else.

    Returns:
        bool [B, T].
    """
    inside = mask.bool() & (covariances_BT >= lower) & (covariances_BT <= upper)
    places = inside.flatten().nonzero().squeeze(1)
    order = torch.randperm(len(places), generator=generator).to(places.device)
    return _at(places[order[: _count(fraction, mask)]], mask)


def choose_largest(covariances_BT: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """KL-Cov's tokens: those with the largest covariances; at least one where the mask has any.

    Returns:
        bool [B, T].
    """
    places = mask.bool().flatten().nonzero().squeeze(1)
    ranked = covariances_BT.flatten()[places].argsort(descending=True, stable=True)
    return _at(places[ranked[: _count(fraction, mask)]], mask)


def tokens_to_leave_out(
    whole: WholeMiniBatch,
    *,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """Clip-Cov: drawn among the tokens of middling covariance that PPO's clip does not hold already."""
    if not len(whole):
        return {"chosen": whole.sampled_NT}
    log_probs, advantages = whole.log_probs(), whole.batch[columns.ADVANTAGES]
    values = covariances(log_probs, advantages, whole.sampled_NT)
    old = torch.where(torch.isnan(whole.old_NT), log_probs, whole.old_NT)
    chosen_NT = choose_between(
        without_clipped(values, log_probs, old, advantages, clip_low=clip_low, clip_high=clip_high),
        whole.sampled_NT,
        fraction=clip_cov_ratio,
        lower=clip_cov_lb,
        upper=clip_cov_ub,
        generator=whole.generator,
    )
    return {"chosen": chosen_NT}


def tokens_to_hold_back(whole: WholeMiniBatch, *, kl_cov_ratio: float) -> dict[str, Tensor]:
    """KL-Cov: the tokens of the largest covariances."""
    if not len(whole):
        return {"chosen": whole.sampled_NT}
    values = covariances(whole.log_probs(), whole.batch[columns.ADVANTAGES], whole.sampled_NT)
    return {"chosen": choose_largest(values, whole.sampled_NT, fraction=kl_cov_ratio)}


def clip_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    chosen: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss without the chosen tokens, whose loss and gradient are 0.

    Args:
        log_probs, old_log_probs, advantages, mask, clip_low, clip_high: as for `ppo_clip_loss`.
        chosen: bool [B, T], by `choose_between`. The mean over tokens still counts them.

    Returns:
        The loss [B, T], and masked means: those of `ppo_clip_loss`, and `chosen_frac`.
    """
    loss, metrics = ppo_clip_loss(log_probs, old_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    metrics["chosen_frac"] = masked_mean(chosen.to(loss.dtype), mask)
    return masked_fill_zero(loss, ~chosen.bool()), metrics


def kl_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    chosen: Tensor,
    *,
    ppo_kl_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A * ratio without a clip, and a penalty on the chosen tokens: + ppo_kl_coef * |log_prob - old_log_prob|.

    Args:
        log_probs, old_log_probs, advantages, mask: as for `ppo_clip_loss`.
        chosen: bool [B, T], by `choose_largest`.
        ppo_kl_coef: weight of the penalty.

    Returns:
        The loss [B, T], 0 where masked out, and masked means: `ppo_kl`, `chosen_frac`.
    """
    log_ratio = masked_fill_zero(log_probs - old_log_probs, mask)
    ratio = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
    penalty = ppo_kl_coef * masked_fill_zero(log_ratio.abs(), chosen)
    loss = -masked_fill_zero(advantages, mask) * ratio + penalty
    return masked_fill_zero(loss, mask), {
        "ppo_kl": masked_mean(-log_ratio.detach(), mask),
        "chosen_frac": masked_mean(chosen.to(loss.dtype), mask),
    }


def _count(fraction: float, mask: Tensor) -> int:
    return max(1, int(fraction * int(mask.bool().sum())))


def _at(places: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[places] = True
    return chosen.reshape(mask.shape)
