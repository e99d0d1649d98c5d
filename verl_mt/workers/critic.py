"""The critic: values of states for GAE, and how they follow the returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl_mt.algorithms.masked import masked_fill_zero, masked_mean, masked_sum
from verl_mt.algorithms.value_loss import explained_variance, value_loss
from verl_mt.config.actor import ActorConfig, CriticConfig
from verl_mt.data import batch as columns
from verl_mt.errors import DataError
from verl_mt.modeling.values import scatter
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.micro_batch import micro_batches
from verl_mt.workers.rank_batch import RankBatch, for_whole, rank_batch_of
from verl_mt.workers.sharding import ShardedCritic, expect_backward, hidden_states, packs, ranks_of
from verl_mt.workers.trainable import Trainable, UpdatePlan


@dataclass(frozen=True)
class CriticSchedule:
    """What the critic is told of the run."""

    total_steps: int
    """Training steps (rollout batches) of the whole run, for the learning rate."""
    train_batch_size: int | None = None
    """Prompts per training step, for the same; null mini-batches need none."""
    warmup_steps: int = 0
    """Steps at the beginning in which the policy waits for the critic."""
    norm_constant: float | None = None
    """The L of `seq-mean-token-sum-norm`, in tokens."""
    seed: int = 0
    """Of the shuffling between mini-batches."""


def filled_in(config: CriticConfig, actor: ActorConfig) -> CriticConfig:
    """With the actor's numbers where the critic has none."""
    rows = actor.ppo_micro_batch_size if config.ppo_max_token_len is None else None
    return replace(
        config,
        ppo_epochs=config.ppo_epochs or actor.ppo_epochs,
        ppo_mini_batch_size=config.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        ppo_micro_batch_size=config.ppo_micro_batch_size or rows,
        ppo_max_token_len=config.ppo_max_token_len or actor.ppo_max_token_len,
        loss_agg_mode=config.loss_agg_mode or actor.aggregation,
    )


class CriticWorker(Trainable):
    """Owns a value model (or a head on the policy's hidden states), its optimizer and its schedule.

    With a sharded module there is one such worker per rank; its methods are collective then, as the actor's are:
    `update` and `compute_values` of a batch that each has whole, `learn` and `values` of each one's `RankBatch`.

    Args:
        module: a `ValueModel`; a `ShardedCritic`; or a `ValueHead`, which reads the last hidden states of `policy`.
        config: its part of the configuration, `filled_in`.
        shuffle: prompts, between mini-batches.
        schedule: see there.
        policy: the actor's module, for a `ValueHead`; it is never changed here, and feels no gradient.
        param_offload: see `UpdatePlan`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: CriticConfig,
        *,
        schedule: CriticSchedule,
        shuffle: bool = True,
        policy: nn.Module | None = None,
        param_offload: bool = False,
    ):
        plan = UpdatePlan(
            config.optim, config.ppo_epochs or 1, config.ppo_mini_batch_size, shuffle, config.grad_clip, "critic"
        )
        plan = replace(plan, param_offload=param_offload)
        steps, prompts = schedule.total_steps, schedule.train_batch_size
        super().__init__(module, plan, total_steps=steps, train_batch_size=prompts, seed=schedule.seed)
        self.config = config
        self._schedule = schedule
        self._policy = policy
        if policy is not None:
            self.ranks = ranks_of(policy)

    @property
    def policy_waits(self) -> bool:
        """Whether the batch that was learned last belongs to the warm-up, in which only the critic learns."""
        return self._num_batches <= self._schedule.warmup_steps

    def compute_values(self, batch: TensorDict) -> Tensor:
        """float32 [B, T]: V of the state that each token of the loss mask was chosen in, 0 elsewhere, on the batch's
        device."""
        return for_whole(batch, self.ranks, self.values)

    @torch.no_grad()
    def values(self, rank_batch: RankBatch) -> Tensor:
        """`compute_values` of this rank's rows [b, T]."""
        rank_batch = rank_batch.to(self.device)
        mask_bT = rank_batch.rows[columns.LOSS_MASK]
        values_bT = torch.zeros(mask_bT.shape, device=self.device)
        for part in self._micro_batches(rank_batch, (rank_batch.stats.num_in_loss_B > 0).nonzero().flatten()):
            found_BT = self._forward(rank_batch.rows, part)
            if part is not None:
                values_bT[part] = found_BT.float()
        return masked_fill_zero(values_bT, mask_bT)

    def update(self, batch: TensorDict) -> dict[str, float]:
        """Learn from a whole rollout batch: `ppo_epochs` passes of mini-batches of `ppo_mini_batch_size` prompts.

        Loss denominators are taken over a whole mini-batch; no micro-batch split changes the gradient.

        Args:
            batch: made by `build_batch`, with `values` (by the critic as it is now) and `returns`.

        Returns:
            `critic/*`: the loss (mean over mini-batches), the share of tokens whose value was held back by the clip,
            how much of the returns the values explained before this update, and their means.

        Raises:
            DataError: a column is missing.
            VerlMTError: loss or gradient was not finite three times in a row.
        """
        rank_batch = rank_batch_of(batch.exclude(*columns.ID_COLUMNS), self.ranks, self.first_mini_batches)
        return self.learn(rank_batch) | value_metrics(batch)

    def learn(self, rank_batch: RankBatch) -> dict[str, float]:
        """`update` on this rank's rows. Returns what `update` does, but for what tells of the values themselves
        (`value_metrics`, of the whole batch)."""
        names = (columns.VALUES, columns.RETURNS)
        missing = [name for name in names if name not in rank_batch.rows.keys()]  # noqa: SIM118 - iterates over its rows
        if missing:
            raise DataError(f"the batch has no column {', '.join(missing)}. Compute values and advantages first")
        rank_batch = rank_batch.to(self.device)
        seen = _Seen()
        for mini, rows in enumerate(self._mini_batches(rank_batch.stats.prompt_B)):
            seen.lr = self._set_lr(mini)
            self._update_once(rank_batch, rows, seen)
        self._num_batches += 1
        return seen.metrics()

    def _update_once(self, rank_batch: RankBatch, rows: Tensor, seen: _Seen) -> None:
        """One mini-batch, one optimizer step."""
        here, num_in_loss = rank_batch.rows, rank_batch.stats.num_in_loss_B[rows]
        active = rows[num_in_loss > 0]
        if len(active) == 0:
            return
        self.optimizer.zero_grad(set_to_none=True)
        mode = self.config.loss_agg_mode or "token-mean"
        weights_bT = self._token_weights(rank_batch, rows, mode=mode, norm_constant=self._schedule.norm_constant)
        total = torch.zeros(2, device=self.device)
        with self._training_mode():
            parts = self._micro_batches(rank_batch, active)
            for number, part in enumerate(parts):
                expect_backward(self.module, last=number == len(parts) - 1)
                values_BT = self._forward(here, part)
                if part is None:
                    if values_BT.requires_grad:
                        (values_BT.sum() * 0.0).backward()
                    continue
                losses_BT, clipped_BT = value_loss(
                    values_BT,
                    here[columns.VALUES][part],
                    here[columns.RETURNS][part],
                    cliprange=self.config.cliprange_value,
                )
                mask_BT = here[columns.LOSS_MASK][part]
                loss = masked_sum(losses_BT * weights_bT[part], mask_BT)
                loss.backward()
                if self.ranks.counts:
                    total += torch.stack([loss.detach(), masked_sum(clipped_BT, mask_BT)])
        self._add_up_gradients()
        loss, num_clipped = self.ranks.sum(total)
        seen.add(loss, num_clipped, num_in_loss.sum().to(loss.device), self._step(loss))

    def _micro_batches(self, rank_batch: RankBatch, rows: Tensor) -> list[Tensor | None]:
        """This rank's; None = take part in a pass of the others."""
        return micro_batches(
            rank_batch,
            rows,
            max_tokens=self.config.ppo_max_token_len or 1,
            max_rows=self.config.ppo_micro_batch_size,
            packed=packs(self.module if self._policy is None else self._policy),
        )

    def _forward(self, here: TensorDict, part: Tensor | None) -> Tensor:
        """[B, T] of some rows; of a dummy row for None."""
        if part is None:
            ids = torch.ones(1, 2, dtype=torch.int64, device=self.device)
            real, wanted = torch.ones_like(ids), torch.tensor([[False, True]], device=self.device)
        else:
            names = (columns.INPUT_IDS, columns.ATTENTION_MASK, columns.LOSS_MASK)
            ids, real, wanted = (here[name][part] for name in names)
        if self._policy is not None:
            with torch.no_grad():
                hidden_NH = hidden_states(self._policy, ids, real, wanted_BT=wanted)
            return scatter(self.module(hidden_NH), wanted)
        values_BT = self.module(ids, real, wanted_BT=wanted)
        if isinstance(self.module, ShardedCritic) and not torch.is_grad_enabled():
            cast(Any, self.module).reshard()  # no backward pass is going to do it
        return values_BT

    def _add_up_gradients(self) -> None:
        """A head is whole on every rank, and every rank has its rows' gradient; shards are added up by
        FSDP2."""
        if self._policy is None or self.ranks.size == 1:
            return
        for parameter in self._parameters:
            own = parameter.grad if self.ranks.counts else None
            parameter.grad = self.ranks.sum(torch.zeros_like(parameter) if own is None else own)


@dataclass
class _Seen:
    """The numbers of an update."""

    lr: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    num_clipped: list[Tensor] = field(default_factory=list)
    num_tokens: list[Tensor] = field(default_factory=list)
    grad_norms: list[Tensor] = field(default_factory=list)
    num_nonfinite: int = 0

    def add(self, loss: Tensor, num_clipped: Tensor, num_tokens: Tensor, grad_norm: Tensor | None) -> None:
        """Of one mini-batch; without a gradient norm its update was dropped."""
        if grad_norm is None:
            self.num_nonfinite += 1
            return
        for kept, value in zip(
            (self.losses, self.num_clipped, self.num_tokens, self.grad_norms),
            (loss, num_clipped, num_tokens, grad_norm),
        ):
            kept.append(value)

    def metrics(self) -> dict[str, float]:
        """Under their logged names; what no update measured is absent."""
        result = {"critic/lr": self.lr, "critic/nonfinite_updates": float(self.num_nonfinite)}
        if self.losses:
            result["critic/vf_loss"] = torch.stack(self.losses).mean().item()
            result["critic/vf_clipfrac"] = (sum(self.num_clipped) / sum(self.num_tokens)).item()  # type: ignore[union-attr]
            result["critic/grad_norm"] = torch.stack(self.grad_norms).mean().item()
        return result


def value_metrics(batch: TensorDict) -> dict[str, float]:
    """How much of the returns the values explain that are in a whole batch, and the means of both."""
    mask, values, returns = batch[columns.LOSS_MASK], batch[columns.VALUES], batch[columns.RETURNS]
    return {
        "critic/explained_variance": explained_variance(values, returns, mask).item(),
        "critic/values/mean": masked_mean(values, mask).item(),
        "critic/returns/mean": masked_mean(returns, mask).item(),
    }


def update_policy_and_critic(actor: ActorWorker, critic: CriticWorker | None, batch: TensorDict) -> dict[str, float]:
    """One step's updates. The critic goes first: a head on the policy's hidden states learns on those that its values
    were made of."""
    if critic is None:
        return actor.update(batch)
    metrics = critic.update(batch)
    return metrics if critic.policy_waits else metrics | actor.update(batch)


def train_policy_and_critic(
    actor: ActorWorker, critic: CriticWorker | None, rank_batch: RankBatch
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The same on this rank's rows: what each of them can tell, and the columns that the policy's update filled in."""
    if critic is None:
        return actor.train(rank_batch)
    metrics = critic.learn(rank_batch)
    if critic.policy_waits:
        return metrics, {}
    more, filled = actor.train(rank_batch)
    return metrics | more, filled
