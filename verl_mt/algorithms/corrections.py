"""Weights that correct for a sampler that is not quite the trainer's policy.

With w = pi_train / pi_rollout per token, importance sampling is exact and has a large variance; every form bounds it.
What w is taken over has different names in different papers, so the names here say it: `token` (each its own),
`sequence` (the product over a sequence), `geometric` (the geometric mean over it).

Espeholt et al. 2018 (IMPALA, arXiv:1802.01561, section 4.1: truncated weights); Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training" (truncated importance sampling between engine and trainer).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verl_mt.algorithms.masked import masked_fill_zero, masked_mean, masked_sum

LEVELS = ("token", "sequence", "geometric")
_LOG_RATIO_BOUND = 20.0


def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    trajectory_index_B: Tensor | None = None,
) -> Tensor:
    """pi_train / pi_rollout of each token, or of the sequence that it belongs to.

    Args:
        log_probs: [B, T] by the trainer's policy before the update.
        rollout_log_probs: [B, T] by the sampler.
        mask: [B, T]; the sampled tokens. Other positions never change a weight.
        level: one of `LEVELS`.
        trajectory_index_B: int64, the trajectory of each row: a sequence is then all records of one. None = each row
            is a sequence.

    Returns:
        [B, T] without gradient, 0 where masked out.

    Raises:
        ValueError: an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}. Known: {', '.join(LEVELS)}")
    log_ratio = masked_fill_zero(log_probs.detach() - rollout_log_probs, mask)
    if level != "token":
        sums_B, counts_B = _per_sequence(log_ratio, mask, trajectory_index_B)
        of_sequence = sums_B if level == "sequence" else sums_B / counts_B
        log_ratio = of_sequence.unsqueeze(1).expand_as(log_ratio)
    return masked_fill_zero(bounded_ratio(log_ratio), mask)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), within [exp(-20), exp(20)]: finite, and a ratio beyond it says no more."""
    return log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()


def truncate(weights: Tensor, upper: float, lower: float = 0.0) -> Tensor:
    """min(w, upper), which lowers the variance and keeps the sign of the bias known; with `lower` also max(w, lower).

    Espeholt et al. 2018 (arXiv:1802.01561, section 4.1, rho-bar).

    Args:
        weights: any shape. Masked-out weights (0) are raised too: mask what comes out.
        upper, lower: bounds of a weight.
    """
    return weights.clamp(min=lower, max=upper)


def batch_normalise(weights: Tensor, mask: Tensor) -> Tensor:
    """w / mean(w) over the masked-in tokens of the batch; 0 where masked out.

    Self-normalised importance sampling (Owen 2013, "Monte Carlo theory, methods and examples", section 9.2), so that a
    step is as large as one without weights.

    Args:
        weights, mask: [B, T] of the WHOLE batch, whose mean it is.
    """
    mean = masked_mean(weights, mask)
    return masked_fill_zero(weights / torch.where(mean > 0, mean, torch.ones_like(mean)), mask)


def inside(weights: Tensor, mask: Tensor, lower: float, upper: float) -> Tensor:
    """The mask without tokens whose weight is outside of [lower, upper]: what the two policies disagree on is not
    trained. By token it is IcePop's (Ling team 2025, arXiv:2510.18855).

    Args:
        weights: [B, T], not truncated.
        mask: [B, T].
        lower, upper: bounds of a ratio, inclusive.

    Returns:
        bool [B, T].
    """
    return mask.bool() & (weights >= lower) & (weights <= upper)


def divergences(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    over: str,
    estimator: str,
    trajectory_index_B: Tensor | None = None,
) -> Tensor:
    """How far the trainer's policy is from the sampler, by token or over its sequence: what a rejection bounds.

    With d = log_prob - rollout_log_prob per token (Schulman 2020, http://joschu.net/blog/kl-approx.html)::

        k1   -d                  exp(-result) is the ratio trainer to sampler
        k2   d^2 / 2
        k3   exp(d) - d - 1

    Args:
        log_probs, rollout_log_probs, mask, trajectory_index_B: as for `importance_weights`.
        over: `token`, or `seq_sum`, `seq_mean`, `seq_max` of a sequence's tokens (seq_max not with k1).
        estimator: k1, k2 or k3.

    Returns:
        [B, T] without gradient, 0 where masked out.
    """
    d = masked_fill_zero(log_probs.detach() - rollout_log_probs, mask)
    bounded = d.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    values = {"k1": -d, "k2": 0.5 * d**2, "k3": torch.expm1(bounded) - bounded}[estimator]
    if over == "token":
        return masked_fill_zero(values, mask)
    if over == "seq_max":
        largest_B = values.amax(1)  # k2 and k3 are never negative, and 0 where masked out
        if trajectory_index_B is not None:
            _, place_B = torch.unique(trajectory_index_B, return_inverse=True)
            zeros = torch.zeros_like(largest_B)
            largest_B = zeros.scatter_reduce(0, place_B, largest_B, "amax")[place_B]
        of_sequence = largest_B
    else:
        sums_B, counts_B = _per_sequence(values, mask, trajectory_index_B)
        of_sequence = sums_B if over == "seq_sum" else sums_B / counts_B
    return masked_fill_zero(of_sequence.unsqueeze(1).expand_as(values), mask)


def within(divergences_BT: Tensor, mask: Tensor, *, estimator: str, lower: float, upper: float) -> Tensor:
    """The mask without what diverges too far: for k1 a ratio outside of [lower, upper], else a value above `upper`.

    With k1 by token it is IcePop's mask; over a sequence, rejection by its product (`seq_sum`) or its geometric mean
    (`seq_mean`).

    Args:
        divergences_BT: by `divergences`.
        mask: [B, T] the sampled tokens.
    """
    if estimator == "k1":
        return inside(bounded_ratio(-divergences_BT), mask, lower, upper)
    return mask.bool() & (divergences_BT <= upper)


def veto(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    threshold: float,
    trajectory_index_B: Tensor | None = None,
) -> Tensor:
    """The mask without whole sequences in which a single token's ratio is below `threshold`: the trainer's policy would
    practically never have said it. Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch".

    Args:
        log_probs, rollout_log_probs, mask, trajectory_index_B: as for `importance_weights`.
        threshold: of a ratio, such as 1e-4; compared before any bound.

    Returns:
        bool [B, T].
    """
    log_ratio = masked_fill_zero(log_probs.detach() - rollout_log_probs, mask)
    hopeless = (mask.bool() & (log_ratio < math.log(threshold))).to(log_ratio.dtype)
    return mask.bool() & (_per_sequence(hopeless, mask, trajectory_index_B)[0] == 0).unsqueeze(1)


def off_policy_sequences(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    delta: float,
    trajectory_index_B: Tensor | None = None,
    log_ratio_B: Tensor | None = None,
) -> Tensor:
    """The mask without the tokens of negative advantage in sequences that drifted from the policy that sampled them.

    A sequence has drifted if the mean of old_log_prob - log_prob over its tokens is above `delta`: what it should
    unlearn, it would hardly say any more. DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv:2512.02556, off-policy sequence
    masking).

    Args:
        log_probs, old_log_probs: [B, T], current policy and sampler.
        advantages: [B, T].
        mask: [B, T] the sampled tokens.
        delta: threshold in nats per token.
        trajectory_index_B: as for `importance_weights`.
        log_ratio_B: mean of log_prob - old_log_prob over each row's sequence, where its records are not all here (see
            `sequence_log_ratio`); NaN, or None = take it over what is here.
    """
    drift = masked_fill_zero(old_log_probs - log_probs, mask)
    sums_B, counts_B = _per_sequence(drift, mask, trajectory_index_B)
    mean_B = sums_B / counts_B
    if log_ratio_B is not None:
        mean_B = torch.where(torch.isnan(log_ratio_B), mean_B, -log_ratio_B.to(mean_B.dtype))
    drifted_B = mean_B > delta
    return mask.bool() & ~(drifted_B.unsqueeze(1) & (advantages < 0))


def effective_sample_size(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """(sum w)^2 / (n sum w^2) in (0, 1]: the share of tokens that a weighted mean is worth (Kong 1992); 1 for none.

    Args:
        weights, mask: any one shape; no mask = all of them.
    """
    count = (torch.ones_like(weights) if mask is None else mask.bool().to(weights.dtype)).sum()
    weights = weights if mask is None else masked_fill_zero(weights, mask)
    squares = (weights**2).sum()
    share = weights.sum() ** 2 / (count * squares).clamp(min=1e-30)
    return torch.where(squares > 0, share, torch.ones_like(share))


def _per_sequence(values: Tensor, mask: Tensor, trajectory_index_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B], of each row's sequence: the sum of its masked-in values, and how many there are. Where both are 0 their
    ratio, NaN, is of no token."""
    sums_B = masked_sum(values, mask, dim=-1)
    counts_B = mask.bool().sum(1).to(sums_B.dtype)
    if trajectory_index_B is None:
        return sums_B, counts_B
    _, place_B = torch.unique(trajectory_index_B, return_inverse=True)
    zeros = sums_B.new_zeros(len(place_B))
    return zeros.index_add(0, place_B, sums_B)[place_B], zeros.index_add(0, place_B, counts_B)[place_B]
