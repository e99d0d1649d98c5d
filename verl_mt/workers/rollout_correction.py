"""Weights and masks of a rollout batch against a sampler that is not quite the trainer's policy.

Decided from the trainer's log-probs before the first update, over whole trajectories and the whole batch: no split
into mini-batches, micro-batches or over ranks changes a decision. What looks at one token only (`token` weights and
masks) is decided where the token passes, without log-probs computed beforehand. Tokens without a sampler's log-prob
have factor 1.

A rejected token loses its policy loss; the loss's denominators (and its KL and entropy terms) still count it, so that
rejecting makes a step smaller and never makes the other tokens' weights larger.
"""

from __future__ import annotations

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
from verl_mt.algorithms.masked import masked_fill_zero, masked_mean
from verl_mt.config.options import RolloutCorrectionOptions
from verl_mt.data import batch as columns


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

    @property
    def masks_sequences(self) -> bool:
        """Trajectories that drifted from the sampler unlearn nothing: `applied` then needs to know how far those did
        that have several records."""
        return self.options.off_policy_sequence_mask_delta is not None

    def applied(
        self, loss_BT: Tensor, log_probs_BT: Tensor, old_BT: Tensor, micro: TensorDict, drift_B: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The token losses times their factors, without those of tokens that are left out; means for the log.

        Args:
            loss_BT: of each token.
            log_probs_BT: of the current policy.
            old_BT: those that ratios are taken to.
            micro: the same rows; has the factors, where they were decided over the whole batch.
            drift_B: with `masks_sequences`, the mean of current log-prob - sampler's over the trajectory of each row
                that is not its only one; NaN = the row is the trajectory.
        """
        decided = columns.CORRECTION in micro.keys()  # noqa: SIM118 - a TensorDict iterates over its rows
        factor_BT = micro[columns.CORRECTION] if decided else self.factors(old_BT, micro)
        delta = self.options.off_policy_sequence_mask_delta
        if delta is None:
            return loss_BT * factor_BT, {}
        # Unlike the other decisions this one is taken with the current policy, anew in each mini-batch.
        known_BT = with_log_probs(micro)
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
        left_out = masked_mean((~kept_BT).float(), sampled_BT)
        factor_BT = masked_fill_zero(factor_BT, kept_BT)
        return loss_BT * factor_BT, {"rollout_corr/off_policy_sequence_masked_fraction": left_out}

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
        known = with_log_probs(batch) & ~torch.isnan(log_probs_BT)
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


def with_log_probs(batch: TensorDict) -> Tensor:
    """bool [B, T]: the sampled tokens of the loss that have a sampler's log-prob."""
    return batch[columns.LOSS_MASK] & batch[columns.SAMPLED] & batch[columns.HAS_LOG_PROBS].unsqueeze(1)


def _share_of_trajectories(chosen_BT: Tensor, known_BT: Tensor, batch: TensorDict) -> float:
    """Of the trajectories with a token in `known_BT`, of which there is one: those with one of them chosen."""
    trajectory_B = batch[columns.TRAJECTORY_INDEX]
    every = torch.unique(trajectory_B[known_BT.any(1)])
    some = torch.unique(trajectory_B[(chosen_BT & known_BT).any(1)])
    return len(some) / len(every)
