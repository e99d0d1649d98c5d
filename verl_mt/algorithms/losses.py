"""Per-token policy losses. Aggregation to one number is `aggregate.py`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mt.algorithms.masked import masked_fill_zero, masked_mean

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

    Schulman et al. 2017 (arXiv:1707.06347, eq. 7); separate bounds ("clip-higher"): DAPO, Yu et al. 2025
    (arXiv:2503.14476, section 3.1); dual clip: Ye et al. 2019 (arXiv:1912.09729, "dual-clip PPO").

    Args:
        log_probs: [B, T] of the sampled tokens, carries the gradient.
        old_log_probs: [B, T] under the policy that the ratio is taken to; no gradient.
        advantages: [B, T].
        mask: [B, T] tokens of the loss.
        clip_low, clip_high: the ratio is trusted in [1 - clip_low, 1 + clip_high].
        clip_c: largest factor on a negative advantage, above 1; None = off.

    Returns:
        The loss [B, T], 0 where masked out, and masked means without gradient: `clipfrac` (the clip was
        active), `clipfrac_lower` (the dual clip was active), `ppo_kl` (the mean of old_log_prob - log_prob).
    """
    log_ratio = masked_fill_zero(log_probs - old_log_probs, mask)
    ratio = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
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
            "ppo_kl": masked_mean(-log_ratio.detach(), mask),
        }
    return masked_fill_zero(loss, mask), metrics
