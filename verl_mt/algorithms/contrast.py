"""REAL: the samples of a prompt as two classes, those that did better than their group and the others."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mt.algorithms.masked import masked_fill_zero, masked_mean


def contrast_slopes(scores_N: Tensor, advantages_N: Tensor, group_index_N: Tensor, *, tau: float) -> Tensor:
    """d loss / d score of each trajectory, for the loss summed over groups and divided by their number.

    With s the scores of a group's trajectories, P those of positive advantage and Q the others::

        loss = log(1 + sum over Q of exp(s / tau)) + log(1 + sum over P of exp(-s / tau))

    A group without one of the two has no loss. No slope is larger than 1 / tau.

    Args:
        scores_N: mean log ratio over a trajectory's tokens.
        advantages_N: their signs count.
        group_index_N: int64; any numbers.
        tau: above 0.

    Returns:
        [N], no gradient.
    """
    slopes_N = torch.zeros_like(scores_N)
    groups = group_index_N.unique()
    for group in groups:
        of_group = group_index_N == group
        positive, negative = of_group & (advantages_N > 0), of_group & (advantages_N <= 0)
        if positive.any() and negative.any():
            for members, sign in ((negative, 1.0), (positive, -1.0)):
                scaled = sign * scores_N[members] / tau
                # A softmax beside one more entry of 0.
                share = torch.softmax(torch.cat([scaled, scaled.new_zeros(1)]), 0)[:-1]
                slopes_N[members] = sign * share / tau
    return slopes_N / len(groups)


def real_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, slope_B: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rewards as labels: a classification of trajectories by their log ratios instead of weighted log-probs.

    The loss of `contrast_slopes`, linear around the current weights::

        L_t = slope * (log_prob_t - old_log_prob_t)

    on each token of a trajectory, so that with `seq-mean-token-mean` its gradient is that of the loss. "Rewards as
    Labels" (arXiv:2602.05630), as ms-swift's `loss_type real` has it: the score of a trajectory is its mean log ratio
    to the old policy, and of rewards nothing counts but the sign of the advantage.

    Args:
        log_probs, old_log_probs, advantages, mask: as for `ppo_clip_loss`.
        slope_B: of each row's trajectory, times the sequences of the mini-batch that the mean over it counts.

    Returns:
        The loss [B, T], 0 where masked out, and masked means: `ppo_kl`, `slope` (of its absolute value).
    """
    log_ratio = masked_fill_zero(log_probs - old_log_probs, mask)
    slope = slope_B.unsqueeze(1).to(log_ratio.dtype).expand_as(log_ratio)
    return masked_fill_zero(slope * log_ratio, mask), {
        "ppo_kl": masked_mean(-log_ratio.detach(), mask),
        "slope": masked_mean(slope.abs(), mask),
    }
