"""Per-token policy losses. Aggregation to one number is `aggregate.py`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mt.algorithms.masked import masked_fill_zero, masked_mean, masked_sum

_LOG_RATIO_BOUND = 20.0


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of PPO with separate bounds and an optional dual clip.

    With ratio = exp(log_prob - old_log_prob) and A the advantage, per token::

        L = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        L = min(L, -A * clip_c)                                  where A < 0 and clip_c is given

    Schulman et al. 2017 (arXiv:1707.06347, eq. 7). Separate bounds ("clip-higher"): DAPO, Yu et al. 2025
    (arXiv:2503.14476, section 3.1). Dual clip: Ye et al. 2019 (arXiv:1912.09729, "dual-clip PPO").

    Args:
        log_probs: [B, T] of the sampled tokens, carries the gradient.
        old_log_probs: [B, T] under the policy that the ratio is taken to. No gradient.
        advantages: [B, T].
        mask: [B, T] tokens of the loss.
        clip_low, clip_high: the ratio is trusted in [1 - clip_low, 1 + clip_high].
        clip_c: largest factor on a negative advantage, above 1. None = off.

    Returns:
        The loss [B, T], 0 where masked out, and masked means without gradient: `clipfrac` (the clip was
        active), `clipfrac_lower` (the dual clip was active), `ppo_kl` (the mean of old_log_prob - log_prob).
    """
    log_ratio = masked_fill_zero(log_probs - old_log_probs, mask)
    ratio = _exp(log_ratio)
    advantages = masked_fill_zero(advantages, mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(loss, dtype=torch.bool)
    if clip_c is not None:
        bound = -advantages * clip_c
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    with torch.no_grad():
        metrics = {
            "clipfrac": masked_mean((clipped > unclipped).to(loss.dtype), mask),
            "clipfrac_lower": masked_mean(dual.to(loss.dtype), mask),
            "ppo_kl": masked_mean(-log_ratio, mask),
        }
    return masked_fill_zero(loss, mask), metrics


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    log_ratio_B: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipping by the likelihood ratio of the whole sequence.

    With s the geometric mean of the ratios of a sequence's tokens in the mask, on each of its tokens::

        s = exp(mean_t (log_prob_t - old_log_prob_t))
        L_t = max(-A * s_t, -A * clip(s_t, 1 - clip_low, 1 + clip_high)),   s_t = s * prob_t / stop_gradient(prob_t)

    Zheng et al. 2025 (arXiv:2507.18071, section 4.1, in the token form of section 4.3). Where all tokens of a sequence
    have one advantage and one weight (every mode of `aggregate.py`), the gradient is that of the sequence form,
    because ds = s * mean_t d log_prob_t. Their clip range is 3e-4 / 4e-4, three orders of magnitude below PPO's.

    A sequence is a trajectory. Where one has several records, `log_ratio_B` must give the mean over all of them
    (`sequence_log_ratio`): a mean over one record would be the ratio of another sequence.

    Args:
        log_probs: [B, T] of the sampled tokens, carries the gradient.
        old_log_probs: [B, T] under the policy that the ratio is taken to. No gradient.
        advantages: [B, T], the same on all tokens of a sequence.
        mask: [B, T] tokens of the loss.
        clip_low, clip_high: s is trusted in [1 - clip_low, 1 + clip_high].
        log_ratio_B: log s of each row's sequence, no gradient. NaN = that row is a sequence, None = each row is.

    Returns:
        The loss [B, T], 0 where masked out, and masked means: `clipfrac`, `ppo_kl`.
    """
    log_ratio = masked_fill_zero(log_probs - old_log_probs, mask)
    mean_B = masked_mean(log_ratio.detach(), mask, dim=-1)
    if log_ratio_B is not None:
        mean_B = torch.where(torch.isnan(log_ratio_B), mean_B, log_ratio_B.to(mean_B.dtype))
    own = masked_fill_zero(log_probs - log_probs.detach(), mask)
    ratio = _exp(mean_B.unsqueeze(1) + own)
    advantages = masked_fill_zero(advantages, mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return masked_fill_zero(torch.maximum(unclipped, clipped), mask), {
        "clipfrac": masked_mean((clipped > unclipped).to(ratio.dtype), mask),
        "ppo_kl": masked_mean(-log_ratio.detach(), mask),
    }


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, trajectory_index_B: Tensor) -> Tensor:
    """[B]: the mean of log_prob - old_log_prob over the masked-in tokens of ALL records of each row's trajectory.

    Args:
        log_probs, old_log_probs: [B, T].
        mask: [B, T] tokens of the loss.
        trajectory_index_B: int64, the trajectory of each row. Any numbers.

    Returns:
        [B] without gradient. 0 where a trajectory has no token in the mask.
    """
    log_ratio_B = masked_sum(log_probs.detach() - old_log_probs, mask, dim=-1)
    _, place_B = torch.unique(trajectory_index_B, return_inverse=True)
    zeros = log_ratio_B.new_zeros(len(place_B))
    sums = zeros.index_add(0, place_B, log_ratio_B)
    counts = zeros.index_add(0, place_B, mask.bool().sum(1).to(zeros.dtype))
    return (sums / counts.clamp(min=1))[place_B]


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE weighted by a clipped ratio: no token loses its gradient, as clipped ones do with PPO.

    ::

        L = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log_prob

    MiniMax 2025 (MiniMax-M1, arXiv:2506.13585, section 3.1). They leave the lower end open: `clip_low` = 1.

    Args:
        log_probs, old_log_probs, advantages, mask, clip_low, clip_high: as for `ppo_clip_loss`. Both bounds are
            distances from 1 (a `clip_high` of 4 lets a ratio grow to 5).

    Returns:
        The loss [B, T], 0 where masked out, and masked means: `clipfrac` (the ratio was outside), `ppo_kl`.
    """
    log_ratio = masked_fill_zero(log_probs.detach() - old_log_probs, mask)
    ratio = _exp(log_ratio)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -bounded * masked_fill_zero(advantages, mask) * masked_fill_zero(log_probs, mask)
    return masked_fill_zero(loss, mask), {
        "clipfrac": masked_mean((bounded != ratio).to(ratio.dtype), mask),
        "ppo_kl": masked_mean(-log_ratio, mask),
    }


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
