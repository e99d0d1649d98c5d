"""One micro-batch's share of the loss: policy term, entropy bonus, KL term, and what is logged of them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.corrections import effective_sample_size, importance_weights, truncate
from verl_mt.algorithms.kl import kl_penalty
from verl_mt.algorithms.losses import ppo_clip_loss
from verl_mt.algorithms.masked import masked_fill_zero, masked_mean
from verl_mt.config.actor import ActorConfig
from verl_mt.data import batch as columns
from verl_mt.modeling.log_probs import LogProbs
from verl_mt.workers.update_metrics import UpdateMetrics


def policy_loss(
    config: ActorConfig,
    output: LogProbs,
    micro: TensorDict,
    weights_BT: Tensor,
    old_BT: Tensor,
    metrics: UpdateMetrics,
) -> Tensor:
    """The loss that is differentiated.

    Args:
        config: which terms there are.
        output: of the current policy.
        micro: rows of the batch.
        weights_BT: of each token in the loss; see `token_weights`.
        old_BT: log-probs that ratios are taken to; NaN = the current ones, detached.
        metrics: collects the terms.

    Returns:
        A scalar with gradient.
    """
    log_probs_BT, entropy_BT = output.log_probs_BT, output.entropy_BT
    assert entropy_BT is not None
    old_BT = torch.where(torch.isnan(old_BT), log_probs_BT.detach(), old_BT)
    clip: dict[str, Any] = {
        "clip_low": config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        "clip_high": config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
        "clip_c": config.clip_ratio_c,
    }
    sampled_BT = micro[columns.LOSS_MASK] & micro[columns.SAMPLED]
    loss_BT, numbers = ppo_clip_loss(log_probs_BT, old_BT, micro[columns.ADVANTAGES], sampled_BT, **clip)
    if config.tis_clip is not None:
        loss_BT = loss_BT * _drift_weights(old_BT, micro, sampled_BT, config.tis_clip, numbers)
    given_BT = micro[columns.LOSS_MASK] & ~micro[columns.SAMPLED]
    if given_BT.any():
        # Tokens that nobody sampled are trained on request; they stay out of the metrics.
        loss_BT = loss_BT + ppo_clip_loss(log_probs_BT, old_BT, micro[columns.ADVANTAGES], given_BT, **clip)[0]
    pg_loss = (loss_BT * weights_BT).sum()
    loss = pg_loss - config.entropy_coeff * (entropy_BT * weights_BT).sum()
    metrics.add_sum("actor/pg_loss", pg_loss)
    if config.use_kl_loss:
        kl_BT = kl_penalty(log_probs_BT, micro[columns.REF_LOG_PROBS], config.kl_loss_type)
        kl_loss = (masked_fill_zero(kl_BT, micro[columns.LOSS_MASK]) * weights_BT).sum()
        loss = loss + config.kl_loss_coef * kl_loss
        metrics.add_sum("actor/kl_loss", kl_loss)
    metrics.add_sum("actor/loss", loss)
    numbers["entropy"] = masked_fill_zero(entropy_BT.detach(), sampled_BT).sum() / sampled_BT.sum().clamp(min=1)
    metrics.add_token_means(numbers, sampled_BT.sum())
    return loss


def _drift_weights(
    old_BT: Tensor, micro: TensorDict, sampled_BT: Tensor, upper: float, numbers: dict[str, Tensor]
) -> Tensor:
    """Truncated pi_old / pi_rollout where the sampler gave log-probs, 1 elsewhere."""
    known_BT = sampled_BT & micro[columns.HAS_LOG_PROBS].unsqueeze(1)
    raw_BT = importance_weights(old_BT, micro[columns.ROLLOUT_LOG_PROBS], known_BT)
    numbers["tis_weight"] = masked_mean(truncate(raw_BT, upper), known_BT)
    numbers["tis_clipfrac"] = masked_mean((raw_BT > upper).to(raw_BT.dtype), known_BT)
    numbers["tis_ess"] = effective_sample_size(raw_BT, known_BT)
    return torch.where(known_BT, truncate(raw_BT, upper), torch.ones_like(raw_BT))
