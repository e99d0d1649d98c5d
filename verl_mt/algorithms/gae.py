"""Returns and advantages per token, from rewards and values that skip what the model did not say.

Shape suffixes: `B` sequences, `T` tokens. A step in time is a token of the mask: an observation takes no time, is not
discounted over, and its value is never looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mt.algorithms.masked import masked_fill_zero, masked_whiten


def discounted_returns(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G of the next token in the mask; 0 where masked out.

    Args:
        rewards_BT: rewards of tokens; one at a masked-out position counts for the token before it in the mask.
        mask_BT: the sampled tokens.
        gamma: discount of one sampled token.
    """
    return gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)[1]


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens of the mask.

    With t' the next token in the mask behind t, and V = 0, A = 0 behind the last one::

        delta_t = r_t + gamma * V_t' - V_t
        A_t     = delta_t + gamma * lam * A_t'
        return  = A_t + V_t

    Schulman et al. 2016 (arXiv:1506.02438, eq. 16). A reward at a masked-out position (a tool's, the final one behind
    an observation) belongs to the token before it in the mask, so none is lost.

    Args:
        rewards_BT, values_BT: [B, T]; values at masked-out positions may be anything.
        mask_BT: the sampled tokens.
        gamma, lam: in [0, 1].

    Returns:
        (advantages, returns), both [B, T], 0 where masked out; not whitened. A row that is masked out whole is 0.
    """
    mask = mask_BT.bool()
    values = masked_fill_zero(values_BT, mask)
    rewards = torch.zeros_like(values) + rewards_BT
    next_value = next_advantage = pending = values.new_zeros(len(values))
    advantages = torch.empty_like(rewards)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        pending = pending + rewards[:, t]
        delta = pending + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = masked_fill_zero(advantage, here)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        pending = masked_fill_zero(pending, ~here)
    return advantages, masked_fill_zero(advantages + values, mask)


def whiten_tokens(advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the tokens of the batch, the variance with Bessel's correction; 0 where masked
    out, and 0 everywhere if all are equal (rounding, divided by nothing, would be left of them).

    Args:
        advantages_BT: float64, or there may be rounding left where all are equal but for it.
        mask_BT: the sampled tokens.
    """
    mask = mask_BT.bool()
    kept = advantages_BT[mask]
    if len(kept) == 0 or bool(kept.max() - kept.min() <= 1e-9 * kept.abs().max()):
        return torch.zeros_like(advantages_BT)
    return masked_whiten(advantages_BT, mask)
