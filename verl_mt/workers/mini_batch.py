"""What a loss needs of a whole mini-batch, so that no split into micro-batches or over ranks changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.covariance import choose_between, choose_largest, covariances, without_clipped
from verl_mt.algorithms.losses import sequence_log_ratio
from verl_mt.algorithms.masked import masked_fill_zero
from verl_mt.config.actor import ActorConfig
from verl_mt.config.policy_loss import read_policy_loss
from verl_mt.data import batch as columns


@dataclass(frozen=True)
class MiniBatch:
    """Numbers of the rows of a mini-batch, or of some of them."""

    weights_BT: Tensor
    """Of each token in the loss; see `token_weights`."""
    log_ratio_B: Tensor | None = None
    """GSPO: log of the trajectory's ratio, where it has several records; NaN, or None = the row is the sequence."""
    chosen_BT: Tensor | None = None
    """Clip-Cov, KL-Cov: the tokens that are treated otherwise."""
    drift_B: Tensor | None = None
    """Off-policy sequence masking: log of the trajectory's ratio to the sampler, in the same way."""

    def part(self, rows: Tensor) -> MiniBatch:
        """Of some rows."""
        columns_of = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: value[rows] for name, value in columns_of.items() if value is not None})


def mini_batch(
    config: ActorConfig,
    batch: TensorDict,
    rows: Tensor,
    weights_BT: Tensor,
    old_BT: Tensor,
    log_probs_of: Callable[[Tensor], Tensor],
    generator: torch.Generator,
) -> MiniBatch:
    """Collect them. Costs a forward pass without gradient over the rows that a choice depends on, where one does.

    Collective: every rank gives the same arguments and gets the same numbers.

    Args:
        config: the loss and its clip range.
        batch: the whole batch.
        rows: of the mini-batch, those without advantage too.
        weights_BT: of the batch's tokens, 0 outside of the mini-batch.
        old_BT: log-probs that ratios are taken to; NaN = the current ones.
        log_probs_of: rows -> [B, T] of the current weights, NaN in other rows.
        generator: draws Clip-Cov's tokens; on the CPU.
    """
    sampled_BT = batch[columns.LOSS_MASK] & batch[columns.SAMPLED]
    rows = rows[sampled_BT[rows].any(1)]
    options = read_policy_loss(config.policy_loss)
    if options.loss_mode == "gspo":
        return MiniBatch(weights_BT, log_ratio_B=split_ratios(batch, rows, sampled_BT, old_BT, log_probs_of))
    if options.loss_mode not in ("clip_cov", "kl_cov") or len(rows) == 0:
        return MiniBatch(weights_BT)
    chosen_BT = torch.zeros_like(sampled_BT)
    log_probs, advantages = log_probs_of(rows)[rows], batch[columns.ADVANTAGES][rows]
    values = covariances(log_probs, advantages, sampled_BT[rows])
    if options.loss_mode == "kl_cov":
        chosen_BT[rows] = choose_largest(values, sampled_BT[rows], fraction=options.kl_cov_ratio)
    else:
        old = torch.where(torch.isnan(old_BT[rows]), log_probs, old_BT[rows])
        low, high = config.clip_range
        chosen_BT[rows] = choose_between(
            without_clipped(values, log_probs, old, advantages, clip_low=low, clip_high=high),
            sampled_BT[rows],
            fraction=options.clip_cov_ratio,
            lower=options.clip_cov_lb,
            upper=options.clip_cov_ub,
            generator=generator,
        )
    return MiniBatch(weights_BT, chosen_BT=chosen_BT)


def split_ratios(
    batch: TensorDict, rows: Tensor, sampled_BT: Tensor, old_BT: Tensor, log_probs_of: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """[B], the mean of current log-prob - `old_BT` over the trajectory of each row that is not its only one: they may
    pass through the model one by one. NaN elsewhere; None where there is no such row.

    Args:
        batch: the whole batch.
        rows: of the mini-batch, those with a token of `sampled_BT`.
        sampled_BT: the tokens that the mean is over.
        old_BT: NaN = the current ones.
        log_probs_of: rows -> [B, T] of the current weights, NaN in other rows.
    """
    _, place, count = torch.unique(batch[columns.TRAJECTORY_INDEX][rows], return_inverse=True, return_counts=True)
    rows = rows[count[place] > 1]
    if len(rows) == 0:
        return None
    old = old_BT[rows]
    known = sampled_BT[rows] & ~torch.isnan(old)  # the others have ratio 1
    current = log_probs_of(rows)[rows] if known.any() else old
    result_B = torch.full((len(batch),), torch.nan, device=old.device)
    result_B[rows] = sequence_log_ratio(
        masked_fill_zero(current, known),
        masked_fill_zero(old, known),
        sampled_BT[rows],
        batch[columns.TRAJECTORY_INDEX][rows],
    )
    return result_B
