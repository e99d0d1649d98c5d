"""Weights and masks of a rollout batch against a sampler that is not quite the trainer's policy.

Decided from the trainer's log-probs before the first update, over whole trajectories and the whole batch: no split
into mini-batches, micro-batches or over ranks changes a decision. What looks at one token only (`token` weights and
masks) is decided where the token passes, without log-probs computed beforehand. Tokens without a sampler's log-prob
have factor 1.

A rejected token loses its policy loss; the loss's denominators (and its KL and entropy terms) still count it, so that
rejecting makes a step smaller and never makes the other tokens' weights larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.corrections import (
    batch_normalise,
    divergences,
    effective_sample_size,
    importance_weights,
    off_policy_sequences,
    truncate,
    veto,
    within,
)
from verl_mt.algorithms.masked import masked_mean
from verl_mt.config.rollout_correction import RolloutCorrectionOptions
from verl_mt.data import batch as columns
from verl_mt.workers.mini_batch import split_ratios


@dataclass(frozen=True)
class _Decision:
    """All [B, T]; `known` = sampled tokens of the loss that both policies gave log-probs."""

    known: Tensor
    raw: Tensor
    weights: Tensor
    kept: Tensor
    not_vetoed: Tensor


@dataclass(frozen=True)
class RolloutCorrection:
    """What `algorithm.rollout_correction` asks for, applied to batches."""

    options: RolloutCorrectionOptions

    @property
    def needs_batch(self) -> bool:
        """The trainer's log-probs of the whole batch are needed before the first update."""
        return self.options.of_batch

    def factors(self, log_probs_BT: Tensor, batch: TensorDict) -> Tensor:
        """[B, T] by which the loss of each token is multiplied; 1 where there is nothing to correct.

        Args:
            log_probs_BT: by the trainer's policy before its update; NaN = not computed there.
            batch: the same rows. With `needs_batch` it must be the whole rollout batch.
        """
        made = self._decide(log_probs_BT, batch)
        factor = torch.where(made.kept & made.not_vetoed, made.weights, torch.zeros_like(made.weights))
        return torch.where(made.known, factor, torch.ones_like(factor))

    def drift(self, batch: TensorDict, rows: Tensor, log_probs_of: Callable[[Tensor], Tensor]) -> Tensor | None:
        """[B] the mean of current log-prob - sampler's over trajectories of a mini-batch that have several records,
        which may pass through the model one by one; NaN elsewhere. Collective, where there is something to compute.

        Args:
            batch: the whole batch.
            rows: of the mini-batch.
            log_probs_of: rows -> [B, T] of the current weights, NaN in other rows.
        """
        if self.options.off_policy_sequence_mask_delta is None:
            return None
        known_BT = _with_log_probs(batch)
        rows = rows[known_BT[rows].any(1)]
        return split_ratios(batch, rows, known_BT, batch[columns.ROLLOUT_LOG_PROBS], log_probs_of)

    def unlearns(
        self, log_probs_BT: Tensor, micro: TensorDict, drift_B: Tensor | None, numbers: dict[str, Tensor]
    ) -> Tensor | None:
        """bool [B, T]: the tokens that stay when trajectories that drifted from the sampler unlearn nothing; None: all.

        Unlike the other decisions it is taken with the current policy, anew in each mini-batch.

        Args:
            log_probs_BT: of the current policy.
            micro: the same rows.
            drift_B: their part of `drift`.
            numbers: gets the share of tokens that are left out.
        """
        delta = self.options.off_policy_sequence_mask_delta
        if delta is None:
            return None
        known_BT = _with_log_probs(micro)
        kept_BT = off_policy_sequences(
            log_probs_BT,
            micro[columns.ROLLOUT_LOG_PROBS],
            micro[columns.ADVANTAGES],
            known_BT,
            delta,
            log_ratio_B=drift_B,
        )
        kept_BT = kept_BT | ~known_BT
        sampled_BT = micro[columns.LOSS_MASK] & micro[columns.SAMPLED]
        numbers["rollout_corr/off_policy_sequence_masked_fraction"] = masked_mean((~kept_BT).float(), sampled_BT)
        return kept_BT

    def metrics(self, log_probs_BT: Tensor, batch: TensorDict) -> dict[str, float]:
        """What was weighted, cut and left out, over the tokens that both policies gave log-probs.

        Args:
            log_probs_BT, batch: as for `factors`.
        """
        if not self.options.corrects:
            return {}
        made, options = self._decide(log_probs_BT, batch), self.options
        if not made.known.any():
            return {}
        result: dict[str, float] = {}
        if options.rollout_is is not None:
            cut = (made.raw > options.rollout_is_threshold) | (made.raw < options.rollout_is_threshold_lower)
            weights = made.weights[made.known]
            result |= {
                "rollout_is_mean": weights.mean().item(),
                "rollout_is_min": weights.min().item(),
                "rollout_is_max": weights.max().item(),
                "rollout_is_eff_sample_size": effective_sample_size(made.weights, made.known).item(),
                "rollout_is_cut_fraction": masked_mean(cut.float(), made.known).item(),
            }
        if options.rollout_rs is not None:
            result["rollout_rs_masked_fraction"] = masked_mean((~made.kept).float(), made.known).item()
            result["rollout_rs_seq_masked_fraction"] = _share_of_trajectories(~made.kept, made.known, batch)
        if options.rollout_token_veto_threshold is not None:
            result["rollout_is_veto_fraction"] = _share_of_trajectories(~made.not_vetoed, made.known, batch)
        return {f"rollout_corr/{name}": value for name, value in result.items()}

    def _decide(self, log_probs_BT: Tensor, batch: TensorDict) -> _Decision:
        options = self.options
        known = _with_log_probs(batch) & ~torch.isnan(log_probs_BT)
        pair = (log_probs_BT, batch[columns.ROLLOUT_LOG_PROBS], known)
        trajectory_B = batch[columns.TRAJECTORY_INDEX]
        raw = weights = known.to(log_probs_BT.dtype)
        if options.rollout_is is not None:
            raw = importance_weights(*pair, level=options.rollout_is, trajectory_index_B=trajectory_B)
            weights = truncate(raw, options.rollout_is_threshold, options.rollout_is_threshold_lower)
            if options.rollout_is_batch_normalize:
                weights = batch_normalise(weights, known)
        kept = not_vetoed = known
        if options.rejection is not None:
            over, estimator = options.rejection, options.estimator
            values = divergences(*pair, over=over, estimator=estimator, trajectory_index_B=trajectory_B)
            lower, upper = options.bounds
            kept = within(values, known, estimator=estimator, lower=lower, upper=upper)
        if options.rollout_token_veto_threshold is not None:
            not_vetoed = veto(*pair, options.rollout_token_veto_threshold, trajectory_B)
        return _Decision(known, raw, weights, kept, not_vetoed)


def _with_log_probs(batch: TensorDict) -> Tensor:
    return batch[columns.LOSS_MASK] & batch[columns.SAMPLED] & batch[columns.HAS_LOG_PROBS].unsqueeze(1)


def _share_of_trajectories(chosen_BT: Tensor, known_BT: Tensor, batch: TensorDict) -> float:
    """Of the trajectories with a token in `known_BT`: those with one of them chosen."""
    trajectory_B = batch[columns.TRAJECTORY_INDEX]
    every = torch.unique(trajectory_B[known_BT.any(1)])
    some = torch.unique(trajectory_B[(chosen_BT & known_BT).any(1)])
    return len(some) / max(1, len(every))
