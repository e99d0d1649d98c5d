"""REAL: the samples of a prompt as two classes, those that did better than their group and the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_mt.algorithms.losses import sequence_log_ratio
from verl_mt.algorithms.masked import masked_fill_zero, masked_mean
from verl_mt.data import batch as columns

if TYPE_CHECKING:
    from verl_mt.workers.loss import WholeMiniBatch


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


def group_contrast(whole: WholeMiniBatch, *, real_tau: float) -> dict[str, Tensor]:
    """REAL: how the loss of a group moves with the score of each of its trajectories in the mini-batch."""
    if not len(whole):
        return {"slope_B": torch.empty(0)}
    batch, inside, old = whole.batch, whole.sampled_NT, whole.old_NT
    owner, group = batch[columns.TRAJECTORY_INDEX], batch[columns.GROUP_INDEX]
    known = inside & ~torch.isnan(old)  # the others have ratio 1
    current = whole.log_probs() if known.any() else old
    score = sequence_log_ratio(masked_fill_zero(current, known), masked_fill_zero(old, known), inside, owner)
    advantage = masked_fill_zero(batch[columns.ADVANTAGES], inside).sum(1)  # its sign counts
    names, place = torch.unique(owner, return_inverse=True)
    first = torch.zeros(len(names), dtype=torch.int64, device=place.device)
    first[place.flip(0)] = torch.arange(len(whole), device=place.device).flip(0)
    slopes = contrast_slopes(score[first], advantage[first], group[first], tau=real_tau)
    # The mean that follows is over what weighs as one sequence: where trajectories share an execution, over those.
    num_weighed = len(columns.weighed_together(batch).unique())
    return {"slope_B": (slopes * num_weighed)[place].to(old.dtype)}


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
