"""FIPO: PPO's clipped loss, with each token weighted by how the tokens after it moved."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mt.algorithms.losses import ppo_clip_loss
from verl_mt.algorithms.masked import masked_fill_zero, masked_mean

_UNSAFE = (0.8, 1.0)


def fipo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
    fipo_half_life: float = 32.0,
    fipo_weight_low: float = 1.0,
    fipo_weight_high: float = 1.2,
    fipo_safety_ratio: float = 4.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens whose future was made more probable count more (future-KL influenced policy optimization).

    With r_t = log_prob_t - old_log_prob_t and L PPO's clipped loss (`ppo_clip_loss`, its dual clip too)::

        F_t = sum over k >= t of gamma^(k - t) * r_k,          gamma = 2^(-1 / fipo_half_life)
        w_t = clip(exp(F_t), fipo_weight_low, fipo_weight_high), without gradient
        loss_t = w_t * L_t

    k - t counts tokens of the mask: what the model did not write moves no weight. A token whose ratio is above `clip_c`
    is left out of the sums; where A < 0 and the ratio is above `fipo_safety_ratio`, w_t is held in [0.8, 1]. On-policy
    every weight is 1. FIPO (arXiv:2603.19835), in the form of ms-swift's manual (`loss_type fipo`).

    Args:
        log_probs, old_log_probs, advantages, mask, clip_low, clip_high, clip_c: as for `ppo_clip_loss`; a row is a
            sequence.
        fipo_half_life: tokens over which a future token's part halves.
        fipo_weight_low, fipo_weight_high: weights stay between them.
        fipo_safety_ratio: 0 = no such bound.

    Returns:
        The loss [B, T], 0 where masked out, and masked means: those of `ppo_clip_loss`, and `fipo_weight`.
    """
    loss, metrics = ppo_clip_loss(
        log_probs, old_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c
    )
    with torch.no_grad():
        log_ratio = masked_fill_zero(log_probs - old_log_probs, mask)
        ratio = log_ratio.clamp(-20, 20).exp()
        counted = log_ratio if clip_c is None else torch.where(ratio > clip_c, torch.zeros_like(ratio), log_ratio)
        future = discounted_future(counted, mask, gamma=2 ** (-1 / fipo_half_life))
        weights = future.clamp(-20, 20).exp().clamp(fipo_weight_low, fipo_weight_high)
        if fipo_safety_ratio:
            unsafe = (advantages < 0) & (ratio > fipo_safety_ratio)
            weights = torch.where(unsafe, weights.clamp(*_UNSAFE), weights)
        metrics = metrics | {"fipo_weight": masked_mean(weights, mask)}
    return masked_fill_zero(weights * loss, mask), metrics


def discounted_future(values_BT: Tensor, mask_BT: Tensor, *, gamma: float) -> Tensor:
    """[B, T]: at each token of the mask the sum of the values from it on, a factor `gamma` for each token of the mask
    between; 0 elsewhere."""
    mask_BT = mask_BT.bool()
    order_BT = torch.argsort((~mask_BT).to(torch.int8), dim=1, stable=True)  # tokens of the mask first
    sums_BT = torch.where(mask_BT, values_BT, torch.zeros_like(values_BT)).gather(1, order_BT)
    step, length = 1, values_BT.shape[1]
    while step < length:  # after each pass a sum holds twice as many terms
        later_BT = torch.zeros_like(sums_BT)
        later_BT[:, :-step] = sums_BT[:, step:]
        sums_BT = sums_BT + gamma**step * later_BT
        step *= 2
    return torch.where(mask_BT, torch.zeros_like(values_BT).scatter(1, order_BT, sums_BT), torch.zeros_like(values_BT))
