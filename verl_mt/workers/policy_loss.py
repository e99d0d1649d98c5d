"""One micro-batch's share of the loss: policy term, entropy bonus, KL term, and what is logged of them."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.covariance import clip_cov_loss, kl_cov_loss
from verl_mt.algorithms.kl import kl_penalty
from verl_mt.algorithms.losses import cispo_loss, gpg_loss, gspo_loss, ppo_clip_loss, sapo_loss
from verl_mt.algorithms.masked import masked_fill_zero
from verl_mt.config.actor import ActorConfig
from verl_mt.config.policy_loss import PolicyLossOptions, read_policy_loss
from verl_mt.data import batch as columns
from verl_mt.modeling.log_probs import LogProbs
from verl_mt.plugins import names_code
from verl_mt.workers.mini_batch import MiniBatch
from verl_mt.workers.own_loss import own_loss
from verl_mt.workers.rollout_correction import RolloutCorrection
from verl_mt.workers.update_metrics import UpdateMetrics


def policy_loss(
    config: ActorConfig,
    output: LogProbs,
    micro: TensorDict,
    mini: MiniBatch,
    old_BT: Tensor,
    metrics: UpdateMetrics,
    correction: RolloutCorrection | None = None,
) -> Tensor:
    """The loss that is differentiated.

    Args:
        config: which terms there are.
        output: of the current policy.
        micro: rows of the batch; gets the column `clipped`, where there is a gradient.
        mini: these rows' part of what was taken over the whole mini-batch.
        old_BT: log-probs that ratios are taken to; NaN = the current ones, detached.
        metrics: collects the terms.
        correction: against a sampler that is not quite the policy; what it decides over a whole batch is in `micro`.

    Returns:
        A scalar with gradient.
    """
    # A view: a gradient that is only looked at (`_note_clipped`) must not reach the hooks of a sharded policy's output.
    log_probs_BT, entropy_BT = output.log_probs_BT.view_as(output.log_probs_BT), output.entropy_BT
    assert entropy_BT is not None
    old_BT = torch.where(torch.isnan(old_BT), log_probs_BT.detach(), old_BT)
    weights_BT, advantages_BT = mini.weights_BT, micro[columns.ADVANTAGES]
    sampled_BT = micro[columns.LOSS_MASK] & micro[columns.SAMPLED]
    loss_BT, numbers = token_losses(config, log_probs_BT, old_BT, advantages_BT, sampled_BT, mini)
    if correction is not None:
        loss_BT = _corrected(loss_BT, correction, log_probs_BT.detach(), old_BT, micro, mini, numbers)
    given_BT = micro[columns.LOSS_MASK] & ~micro[columns.SAMPLED]
    if given_BT.any():
        # Tokens that nobody sampled are trained on request, each for itself; they stay out of ratios and metrics.
        options = read_policy_loss(config.policy_loss)
        if options.loss_mode in ("gspo", "clip_cov", "kl_cov") or names_code(options.loss_mode):
            options = PolicyLossOptions()
        given, _ = _loss_of_tokens(config, options, log_probs_BT, old_BT, advantages_BT, given_BT)
        loss_BT = loss_BT + given
    _note_clipped(micro, loss_BT, log_probs_BT)
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


def slope_where_known(
    config: ActorConfig,
    micro: TensorDict,
    mini: MiniBatch,
    old_BT: Tensor,
    correction: RolloutCorrection | None = None,
) -> Tensor | None:
    """d loss / d log-prob [B, T] before the log-probs are known; None if it depends on them.

    Where ratios are taken to the current policy itself they are 1, whatever the log-probs are, and so every policy loss
    of ours has the slope that it has at any log-probs.
    """
    if config.use_kl_loss or config.entropy_coeff != 0 or correction is not None:
        return None
    if names_code(read_policy_loss(config.policy_loss).loss_mode):
        return None  # it may look at more than ratios, and is not asked about log-probs that no policy has
    if not bool((torch.isnan(old_BT) | ~micro[columns.LOSS_MASK]).all()):
        return None
    guess_BT = torch.zeros_like(old_BT).requires_grad_()
    output = LogProbs(guess_BT, torch.zeros_like(old_BT))
    with torch.enable_grad():
        loss = policy_loss(config, output, micro.copy(), mini, old_BT, UpdateMetrics())
    return torch.autograd.grad(loss, guess_BT)[0]


def _note_clipped(micro: TensorDict, loss_BT: Tensor, log_probs_BT: Tensor) -> None:
    """Which tokens the policy loss, whichever it is, does not move at all although they have an advantage."""
    if not loss_BT.requires_grad:
        return
    (slope_BT,) = torch.autograd.grad(loss_BT.sum(), log_probs_BT, retain_graph=True)
    still_BT = micro[columns.LOSS_MASK] & (micro[columns.ADVANTAGES] != 0) & (slope_BT == 0)
    micro[columns.CLIPPED] = still_BT.float()


def token_losses(
    config: ActorConfig,
    log_probs_BT: Tensor,
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    mini: MiniBatch,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss that the configuration names: (loss [B, T], means for the log).

    Args:
        config: `policy_loss` and the clip ranges.
        log_probs_BT, old_BT, advantages_BT, mask_BT: as for `ppo_clip_loss`.
        mini: what sequences and chosen tokens are known by.
    """
    options = read_policy_loss(config.policy_loss)
    arguments = (log_probs_BT, old_BT, advantages_BT, mask_BT)
    low, high = config.clip_range
    if options.loss_mode == "gspo":
        return gspo_loss(*arguments, clip_low=low, clip_high=high, log_ratio_B=mini.log_ratio_B)
    if options.loss_mode in ("clip_cov", "kl_cov"):
        chosen_BT = torch.zeros_like(mask_BT) if mini.chosen_BT is None else mini.chosen_BT
        if options.loss_mode == "clip_cov":
            return clip_cov_loss(*arguments, chosen_BT, clip_low=low, clip_high=high)
        return kl_cov_loss(*arguments, chosen_BT, kl_coef=options.ppo_kl_coef)
    return _loss_of_tokens(config, options, *arguments)


def _loss_of_tokens(
    config: ActorConfig,
    options: PolicyLossOptions,
    log_probs_BT: Tensor,
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses in which each token stands for itself."""
    arguments = (log_probs_BT, old_BT, advantages_BT, mask_BT)
    low, high = config.clip_range
    if names_code(options.loss_mode):
        return own_loss(options, arguments, {"clip_low": low, "clip_high": high, "clip_c": config.clip_ratio_c})
    if options.loss_mode == "cispo":
        return cispo_loss(*arguments, clip_low=low, clip_high=high)
    if options.loss_mode == "sapo":
        return sapo_loss(*arguments, tau_pos=options.tau_pos, tau_neg=options.tau_neg)
    if options.loss_mode == "gpg":
        return gpg_loss(*arguments)
    return ppo_clip_loss(*arguments, clip_low=low, clip_high=high, clip_c=config.clip_ratio_c)


def _corrected(
    loss_BT: Tensor,
    correction: RolloutCorrection,
    log_probs_BT: Tensor,
    old_BT: Tensor,
    micro: TensorDict,
    mini: MiniBatch,
    numbers: dict[str, Tensor],
) -> Tensor:
    """The token losses times their factors, without those of tokens that are left out."""
    decided = columns.CORRECTION in micro.keys()  # noqa: SIM118 - a TensorDict iterates over its rows
    factor_BT = micro[columns.CORRECTION] if decided else correction.factors(old_BT, micro)
    kept_BT = correction.unlearns(log_probs_BT, micro, mini.drift_B, numbers)
    if kept_BT is not None:
        factor_BT = masked_fill_zero(factor_BT, kept_BT)
    return loss_BT * factor_BT
