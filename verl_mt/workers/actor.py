"""The trained policy: from a batch with advantages to new weights."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl_mt.algorithms.corrections import bounded_ratio, effective_sample_size
from verl_mt.algorithms.masked import masked_fill_zero
from verl_mt.config.actor import ActorConfig
from verl_mt.data import batch as columns
from verl_mt.errors import DataError
from verl_mt.modeling import lora
from verl_mt.workers.loss import ActorLoss, MicroBatchLoss, WholeMiniBatch
from verl_mt.workers.micro_batch import compute_log_probs, micro_batches
from verl_mt.workers.rank_batch import BatchStats, RankBatch, for_whole, rank_batch_of
from verl_mt.workers.rollout_correction import RolloutCorrection, with_log_probs
from verl_mt.workers.sharding import ALONE, Ranks, dummy_pass, expect_backward, model_of, packs, score
from verl_mt.workers.trainable import Trainable, UpdatePlan, num_mini_batches


class ActorWorker(Trainable):
    """Owns the policy's module, its optimizer and its learning-rate schedule.

    The module stays in eval mode: dropout would make the policy that is trained another one than the one that sampled.

    With a sharded module there is one such worker per rank, and its calls are collective: every rank trains on its
    `RankBatch`, and returns the same numbers. `update` and `compute_log_probs` take the whole batch, on every
    rank; `train` and `log_probs` take the rank batch alone.

    Args:
        module: a Hugging Face causal language model (the local engine decodes with the same object), or a
            `ShardedPolicy`.
        config: its part of the configuration.
        temperature: that of sampling; log-probs are of logits / temperature.
        total_steps: training steps (rollout batches) of the whole run, for the schedule.
        train_batch_size: prompts per training step, for the schedule; null mini-batches need none.
        norm_constant: the L of `seq-mean-token-sum-norm`, in tokens.
        seed: of the shuffling between mini-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ActorConfig,
        *,
        temperature: float,
        total_steps: int,
        train_batch_size: int | None = None,
        norm_constant: float | None = None,
        seed: int = 0,
    ):
        optim, mini = config.optim, config.ppo_mini_batch_size
        key, offload = "actor_rollout_ref.actor", config.optimizer_offload
        plan = UpdatePlan(
            optim, config.ppo_epochs, mini, config.shuffle, config.grad_clip, key, offload, config.param_offload
        )
        super().__init__(module, plan, total_steps=total_steps, train_batch_size=train_batch_size, seed=seed)
        self.config = config
        self.loss = ActorLoss(config)
        self._temperature = temperature
        self._norm_constant = norm_constant

    def update(self, batch: TensorDict) -> dict[str, float]:
        """Train on a whole rollout batch: `ppo_epochs` passes of mini-batches of `ppo_mini_batch_size` prompts.

        With one mini-batch and one epoch the policy that is updated is the one that sampled: the old log-probs are
        the current ones, detached (ratio exactly 1), and one forward pass does everything. Otherwise the old
        log-probs are computed once, before the first change of the weights.

        Loss denominators are taken over a whole mini-batch; no micro-batch split changes the gradient. A last
        mini-batch of fewer prompts weighs as much less (`_token_weights`).

        With `skip_zero_advantage` and no term beside the advantage (KL, entropy, one of the loss's own), rows whose
        advantages are all 0 add exactly nothing to the gradient and skip the forward pass; the denominators still count
        them. If a mini-batch has nothing else, the optimizer does not step, while the schedule advances. If the whole
        batch has nothing else, one pass without gradient measures what a step reports.

        Args:
            batch: made by `build_batch`, with `advantages` (and `ref_log_probs` for a KL term). Its `old_log_probs`
                are filled in with what the weights gave before the first change, NaN in rows that were not computed;
                so is `clipped`.

        Returns:
            `actor/*` and `rollout/logprob_diff_*`; means over the tokens that went through the model, which are
            `actor/token_share` of those in the loss. A number that could not be measured is absent.

        Raises:
            DataError: a column is missing.
            VerlMTError: loss or gradient was not finite three times in a row.
        """
        whole = batch.exclude(columns.OLD_LOG_PROBS, columns.CLIPPED, *columns.ID_COLUMNS)
        rank_batch = rank_batch_of(whole, self.ranks, self.first_mini_batches)
        metrics, filled = self.train(rank_batch)
        everything = torch.arange(len(batch))
        for name, column in filled.items():
            batch[name] = rank_batch.together(column, everything).to(batch.device or "cpu")
        return metrics | against_sampler(batch, self.loss.correction)

    def train(self, rank_batch: RankBatch) -> tuple[dict[str, float], dict[str, Tensor]]:
        """`update` on this rank's rows.

        Returns:
            What `update` returns, but for what compares with the sampler (`against_sampler`, of the whole batch); and
            the columns that it fills in [b, T].
        """
        here = self._prepare(rank_batch.rows)
        rank_batch, stats = replace(rank_batch, rows=here), rank_batch.stats
        metrics = UpdateMetrics()
        active_B = self._active_rows(stats, metrics)
        metrics.covers(stats, active_B if active_B.any() else stats.num_in_loss_B > 0)
        old_bT = self._old_log_probs(rank_batch, active_B)
        for number, rows in enumerate(self._mini_batches(stats.prompt_B)):
            metrics.lr = self._set_lr(number)
            active = rows[active_B[rows]]
            if len(active) == 0:
                continue
            # Until the weights change, a ratio to them is 1 but for the rounding between two passes.
            unchanged = metrics.num_updates == 0
            exactly_one = self.loss.policy_loss.beside_advantage and unchanged
            self.optimizer.zero_grad(set_to_none=True)
            loss, seen_bT = self._forward_backward(
                rank_batch, rows, active, self._asked_old(here) if exactly_one else old_bT, metrics
            )
            if unchanged:  # these are log-probs of before the first change too
                before_bT = here[columns.OLD_LOG_PROBS]
                before_bT.copy_(torch.where(torch.isnan(seen_bT), before_bT, seen_bT))
            metrics.updated(self._step(self.ranks.sum(loss)))
        if not active_B.any():
            # No row moves the policy: measure the step's numbers, agreement with the sampler among them.
            in_loss = (stats.num_in_loss_B > 0).nonzero().squeeze(1)
            with torch.no_grad():
                _, seen_bT = self._forward_backward(rank_batch, in_loss, in_loss, old_bT, metrics)
            here[columns.OLD_LOG_PROBS].copy_(seen_bT)
            metrics.grad_norms.append(torch.zeros((), device=self.device))
        self._num_batches += 1
        return metrics.summary(self.ranks), {name: here[name] for name in (columns.OLD_LOG_PROBS, columns.CLIPPED)}

    def compute_log_probs(self, batch: TensorDict) -> Tensor:
        """[B, T] of the current weights where the loss mask is set, 0 elsewhere, on the batch's device."""
        return for_whole(batch, self.ranks, self.log_probs)

    def log_probs(self, rank_batch: RankBatch) -> Tensor:
        """`compute_log_probs` of this rank's rows [b, T]."""
        return self._compute_log_probs(rank_batch.to(self.device), torch.arange(len(rank_batch.stats)))

    def progress(self) -> dict[str, Any]:
        return {"lora": lora.describe(lora.lora_of(model_of(self.module))), **super().progress()}

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Take a `progress`; `tensors` then has the names that its checkpoint has.

        Raises:
            CheckpointError: other adapters than the module's.
        """
        lora.require_same(progress.get("lora"), lora.lora_of(model_of(self.module)))
        super().load_progress(progress)

    def _prepare(self, rows: TensorDict) -> TensorDict:
        needed = [columns.ADVANTAGES, *([columns.REF_LOG_PROBS] if self.config.use_kl_loss else [])]
        missing = [name for name in needed if name not in rows.keys()]  # noqa: SIM118 - a TensorDict iterates over its rows
        if missing:
            raise DataError(f"the batch has no column {', '.join(missing)}. Fill it in before the update")
        here = rows.copy().to(self.device)
        here[columns.OLD_LOG_PROBS] = torch.full_like(here[columns.ROLLOUT_LOG_PROBS], math.nan)
        here[columns.CLIPPED] = torch.full_like(here[columns.ROLLOUT_LOG_PROBS], math.nan)
        here[columns.ADVANTAGES] = masked_fill_zero(here[columns.ADVANTAGES], here[columns.LOSS_MASK])
        return here

    def _active_rows(self, stats: BatchStats, metrics: UpdateMetrics) -> Tensor:
        """bool [B]: which rows go through the model."""
        in_loss_B = stats.num_in_loss_B > 0
        terms = self.config.use_kl_loss or self.config.entropy_coeff != 0
        if not self.config.skip_zero_advantage or terms or self.loss.policy_loss.beside_advantage:
            return in_loss_B
        moved_B = stats.moves_B
        if self.loss.policy_loss.depends_on == "trajectory":
            # A trajectory's ratio is over all its records, and needs the old log-probs of each.
            moved_B = torch.isin(stats.trajectory_B, stats.trajectory_B[moved_B])
        metrics.num_skipped = int((in_loss_B & ~moved_B).sum())
        return in_loss_B & moved_B

    def _old_log_probs(self, rank_batch: RankBatch, active_B: Tensor) -> Tensor:
        """[b, T] that ratios are taken to; NaN = the current ones, detached.

        What is computed for it goes into the batch's column, which `rollout/logprob_diff_*` are measured from.
        """
        here, stats = rank_batch.rows, rank_batch.stats
        mini, correction = self.config.ppo_mini_batch_size, self.loss.correction
        whole = correction is not None and correction.needs_batch
        one_update = self.config.ppo_epochs == 1 and num_mini_batches(len(torch.unique(stats.prompt_B)), mini) == 1
        # With a single update the policy that is updated is the one that would be asked: its log-probs are the old ones
        # to the bit, and a pass is saved. With `never` they are computed all the same, as other libraries do.
        on_policy = one_update and self.config.use_sampler_log_probs != "never"
        old = self._asked_old(here)
        if on_policy and not whole:
            return old
        # A correction decides over trajectories and the batch, so it needs the rows that move nothing too. Ratios are
        # nevertheless taken to the current log-probs where the step is on-policy: its own were of another pass.
        rows = ((active_B | whole) & self._lacks_old(stats)).nonzero().squeeze(1)
        if len(rows):
            here[columns.OLD_LOG_PROBS] = self._compute_log_probs(rank_batch, rows)
        if correction is not None and correction.needs_batch:
            everything = WholeMiniBatch.of(rank_batch, torch.arange(len(stats)), here[columns.OLD_LOG_PROBS])
            factors = correction.factors(everything.old_NT, everything.batch)
            here[columns.CORRECTION] = rank_batch.back(factors, everything.numbers)
        return old if on_policy else torch.where(torch.isnan(old), here[columns.OLD_LOG_PROBS], old)

    def _asked_old(self, here: TensorDict) -> Tensor:
        """[b, T]: the sampler's log-probs where ratios are to be taken to it; NaN elsewhere."""
        nothing = torch.full_like(here[columns.ROLLOUT_LOG_PROBS], math.nan)
        if self.config.use_sampler_log_probs != "always":
            return nothing
        by_sampler = here[columns.SAMPLED] & here[columns.HAS_LOG_PROBS].unsqueeze(1)
        return torch.where(by_sampler, here[columns.ROLLOUT_LOG_PROBS], nothing)

    def _lacks_old(self, stats: BatchStats) -> Tensor:
        """bool [B]: rows of the loss with a token whose old log-prob takes a separate pass."""
        by_sampler_B = stats.num_sampled_B * stats.has_log_probs_B
        if self.config.use_sampler_log_probs != "always":
            by_sampler_B = torch.zeros_like(by_sampler_B)
        return stats.num_in_loss_B > by_sampler_B

    def _compute_log_probs(self, rank_batch: RankBatch, rows: Tensor, *, entropy: bool = False) -> Tensor:
        return compute_log_probs(
            self.module,
            rank_batch,
            rows,
            temperature=self._temperature,
            max_tokens=self.config.ppo_max_token_len,
            max_rows=self.config.ppo_micro_batch_size,
            entropy=entropy,
        )

    def _forward_backward(
        self, rank_batch: RankBatch, rows: Tensor, active: Tensor, old_bT: Tensor, metrics: UpdateMetrics
    ) -> tuple[Tensor, Tensor]:
        """Forward and (where gradients are on) backward over the active ones of a mini-batch's rows.

        Args:
            rank_batch: this rank's.
            rows, active: of the batch.
            old_bT: see `_old_log_probs`.
            metrics: gets the micro-batches'.

        Returns:
            This rank's share of the loss, and the log-probs of its rows [b, T], NaN in those that did not pass.
        """
        config, here = self.config, rank_batch.rows
        weights_bT = self._token_weights(rank_batch, rows, mode=config.aggregation, norm_constant=self._norm_constant)
        sampled = rows[rank_batch.stats.num_sampled_B[rows] > 0]
        whole = WholeMiniBatch.of(rank_batch, sampled, old_bT, self._compute_log_probs, self._generator)
        mini = self.loss.over_mini_batch(whole, weights_bT)
        if config.top_entropy_quantile < 1:
            entropies_bT = self._compute_log_probs(rank_batch, rows, entropy=True)
            mini = replace(mini, share_BT=self.loss.uncertain(whole, entropies_bT))
        loss, seen_bT = torch.zeros((), device=self.device), torch.full_like(old_bT, math.nan)
        parts = micro_batches(
            rank_batch,
            active,
            max_tokens=config.ppo_max_token_len,
            max_rows=config.ppo_micro_batch_size,
            packed=packs(self.module),
        )
        with self._training_mode():
            for number, part in enumerate(parts):
                expect_backward(self.module, last=number == len(parts) - 1)
                if part is None:
                    dummy_pass(self.module, self.device)
                    continue
                micro, of_micro, old = here[part], mini.part(part), old_bT[part]
                output = score(
                    self.module,
                    micro[columns.INPUT_IDS],
                    micro[columns.ATTENTION_MASK],
                    wanted_BT=micro[columns.LOSS_MASK],
                    temperature=self._temperature,
                    with_entropy=True,
                    entropy_grad=config.entropy_coeff != 0,
                    media=columns.media_of(micro),
                    expected_slope=partial(self.loss.slope_where_known, micro, of_micro, old),
                )
                found = self.loss.of_micro_batch(output, micro, of_micro, old)
                if torch.is_grad_enabled():
                    found.loss.backward()
                if self.ranks.counts:
                    metrics.add(found)
                    loss += found.loss.detach()
                seen_bT[part] = output.log_probs_BT.detach().float()
                if found.clipped_BT is not None:
                    here[columns.CLIPPED][part] = torch.fmax(here[columns.CLIPPED][part], found.clipped_BT)
        return loss, seen_bT


def against_sampler(batch: TensorDict, correction: RolloutCorrection | None) -> dict[str, float]:
    """How far the sampler is from the policy before its first update, over trained tokens that both gave log-probs; and
    what a correction made of it. Of a whole batch, behind its update.

    |difference| of the log-probs, the k1 and k3 estimates of KL(sampler || policy), quantiles of the ratio policy to
    sampler, and the effective sample size of these ratios, as a share. What is not finite is absent. The |difference|
    is of tokens that were sampled by the very weights that are trained (`AGES` 0).
    """
    own = batch[columns.OLD_LOG_PROBS]
    found: dict[str, float] = {}
    compared_BT = with_log_probs(batch) & ~torch.isnan(own)
    difference_BT = own - batch[columns.ROLLOUT_LOG_PROBS]
    log_ratio = difference_BT[compared_BT].float()
    by_these_BT = compared_BT if (ages_BT := batch.get(columns.AGES)) is None else compared_BT & (ages_BT == 0)
    if len(same := difference_BT[by_these_BT].float().abs()):
        found = {"rollout/logprob_diff_max": same.max().item(), "rollout/logprob_diff_mean": same.mean().item()}
    if len(log_ratio):
        ratio = bounded_ratio(log_ratio)
        ordered = ratio.sort().values
        found |= {
            "rollout/sampler_kl": (torch.expm1(log_ratio) - log_ratio).mean().item(),
            "rollout/sampler_kl_k1": -log_ratio.mean().item(),
            "rollout/ratio_p01": ordered[round(0.01 * (len(ordered) - 1))].item(),
            "rollout/ratio_p50": ordered[round(0.5 * (len(ordered) - 1))].item(),
            "rollout/ratio_p99": ordered[round(0.99 * (len(ordered) - 1))].item(),
            "rollout/ratio_max": ordered[-1].item(),
            "rollout/ratio_ess": effective_sample_size(ratio).item(),
        }
    if correction is not None:
        found |= correction.metrics(own, batch)
    return {name: value for name, value in found.items() if math.isfinite(value)}


@dataclass
class UpdateMetrics:
    """The numbers of one update, collected over micro-batches without waiting for the device; `summary` gives plain
    numbers under their logged names."""

    num_updates: int = 0
    num_skipped: int = 0
    num_nonfinite: int = 0
    lr: float = 0.0
    token_share: float = math.nan
    """Of the batch's trained tokens that were sampled: those that go through the model, which the means are over."""
    grad_norms: list[Tensor] = field(default_factory=list)
    _sums: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _token_sums: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _token_counts: list[Tensor] = field(default_factory=list)

    def add(self, micro: MicroBatchLoss) -> None:
        """A micro-batch's share of its mini-batch's numbers; a mean whose name has no slash is `actor/`'s."""
        for name, value in micro.sums.items():
            self._sums[name].append(value.detach())
        self._token_counts.append(micro.num_tokens)
        for name, mean in micro.means.items():
            self._token_sums[name if "/" in name else f"actor/{name}"].append(mean.detach() * micro.num_tokens)

    def updated(self, grad_norm: Tensor | None) -> None:
        """An optimizer step with its gradient's norm; None = it was dropped, because that was not finite."""
        if grad_norm is None:
            self.num_nonfinite += 1
        else:
            self.num_updates += 1
            self.grad_norms.append(grad_norm)

    def covers(self, stats: BatchStats, rows_B: Tensor) -> None:
        """The rows that go through the model."""
        self.token_share = (stats.num_sampled_B[rows_B].sum() / stats.num_sampled_B.sum()).item()

    def summary(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Sums are means over the mini-batches that were run; token means are over their tokens; both over all ranks.
        What is not finite (the loss of an update that was dropped) is absent."""
        tried = self.num_updates + self.num_nonfinite
        result = {
            "actor/lr": self.lr,
            "actor/num_updates": float(self.num_updates),
            "actor/skipped_zero_advantage_sequences": float(self.num_skipped),
            "actor/nonfinite_updates": float(self.num_nonfinite),
            "actor/token_share": self.token_share,
        }
        sums, token_sums, tokens = self._over(ranks)
        for name, value in sums.items():
            result[name] = value / max(1, tried)
        for name, value in token_sums.items():
            result[name] = value / max(1, tokens)
        if self.grad_norms:
            result["actor/grad_norm"] = torch.stack(self.grad_norms).mean().item()
        return {name: value for name, value in result.items() if math.isfinite(value)}

    def _over(self, ranks: Ranks) -> tuple[dict[str, float], dict[str, float], float]:
        """Sums, token sums and numbers of tokens of all ranks; a rank without rows has none."""
        own = (
            {name: torch.stack(values).sum().item() for name, values in self._sums.items()},
            {name: torch.stack(values).sum().item() for name, values in self._token_sums.items()},
            sum(n.item() for n in self._token_counts),
        )
        sums: dict[str, float] = defaultdict(float)
        token_sums: dict[str, float] = defaultdict(float)
        tokens = 0.0
        for other_sums, other_token_sums, other_tokens in ranks.gather(own):
            tokens += other_tokens
            for name, value in other_sums.items():
                sums[name] += value
            for name, value in other_token_sums.items():
                token_sums[name] += value
        return sums, token_sums, tokens
