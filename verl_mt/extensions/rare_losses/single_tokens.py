"""Losses of single tokens without a clip: SAPO and GPG."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mt.algorithms.masked import masked_fill_zero, masked_mean

_LOG_RATIO_BOUND = 20.0


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A soft gate on the ratio instead of a clip: the gradient fades with the distance from 1 and never stops.

    ::

        L = -A * 4 / tau * sigmoid(tau * (ratio - 1)),    tau = tau_pos where A > 0, else tau_neg

    At ratio 1 the gradient is that of PPO, for every tau. Gao et al. 2025 (Soft Adaptive Policy Optimization,
    arXiv:2511.20347).

    Args:
        log_probs, old_log_probs, advantages, mask: as for `ppo_clip_loss`.
        tau_pos, tau_neg: sharpness of the gate, positive; negative advantages fade faster, since they raise the
            probability of every other token.

    Returns:
        The loss [B, T], 0 where masked out, and masked means: `gate_slope` (the gradient's factor against PPO's
        without a clip; 1 = nothing faded), `ppo_kl`.
    """
    log_ratio = masked_fill_zero(log_probs - old_log_probs, mask)
    ratio = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
    advantages = masked_fill_zero(advantages, mask)
    tau = torch.where(advantages > 0, torch.full_like(log_ratio, tau_pos), torch.full_like(log_ratio, tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1))
    return masked_fill_zero(-advantages * 4 / tau * gate, mask), {
        "gate_slope": masked_mean((4 * gate * (1 - gate)).detach(), mask),
        "ppo_kl": masked_mean(-log_ratio.detach(), mask),
    }


def gpg_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient itself: L = -A * log_prob, without ratio or clip.

    Chu et al. 2025 (GPG, arXiv:2504.02546). Off-policy nothing corrects for the difference of the policies;
    `old_log_probs` are for the metric only.

    Returns:
        The loss [B, T], 0 where masked out, and the masked mean `ppo_kl`.
    """
    log_ratio = masked_fill_zero(log_probs.detach() - old_log_probs, mask)
    loss = -masked_fill_zero(advantages, mask) * masked_fill_zero(log_probs, mask)
    return masked_fill_zero(loss, mask), {"ppo_kl": masked_mean(-log_ratio, mask)}
