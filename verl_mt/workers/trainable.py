"""A module with its optimizer, its schedule and its share of randomness: what an actor and a critic have in common."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_mt.algorithms.aggregate import row_weights
from verl_mt.config.actor import OptimConfig
from verl_mt.data import batch as columns
from verl_mt.errors import VerlMTError
from verl_mt.workers.optimizer import build_adamw, lr_factor, warmup_steps_of
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.sharding import model_of, ranks_of, whole
from verl_mt.workers.state import copy_into, live_tensors

_log = logging.getLogger(__name__)
_MAX_NONFINITE = 3
"""Updates in a row without a finite loss and gradient before the run stops."""


@dataclass(frozen=True)
class UpdatePlan:
    """How a rollout batch becomes optimizer steps."""

    optim: OptimConfig
    ppo_epochs: int
    ppo_mini_batch_size: int | None
    """Prompts; None = the whole batch."""
    shuffle: bool
    grad_clip: float
    key: str
    """Where its section is in the configuration, for errors."""
    optimizer_offload: bool = False
    """The optimizer's state lies in CPU memory between steps."""
    param_offload: bool = False
    """The weights lie in CPU memory from `offload` to `onload`."""


class Trainable:
    """Owns the module, the optimizer and the learning-rate schedule.

    Args:
        module: in this process, or sharded over ranks; put into eval mode.
        plan: its part of the configuration.
        total_steps: training steps (rollout batches) of the whole run, for the schedule.
        train_batch_size: prompts per training step, for the schedule; null mini-batches need none.
        seed: of the shuffling between mini-batches.
    """

    def __init__(
        self, module: nn.Module, plan: UpdatePlan, *, total_steps: int, train_batch_size: int | None, seed: int
    ):
        self.module = module.eval()
        self.ranks = ranks_of(module)
        self.num_updates = 0
        self._plan = plan
        self._num_batches = 0
        self._updates_per_batch = updates_per_step(plan.ppo_epochs, plan.ppo_mini_batch_size, train_batch_size)
        self._total_updates = total_steps * self._updates_per_batch
        self._nonfinite_in_a_row = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._checkpointing = bool(getattr(model_of(module), "is_gradient_checkpointing", False))
        if self._checkpointing:
            # transformers checkpoints activations only in training mode, which must then not mean dropout.
            _disable_dropout(module)
        optim = plan.optim
        self._host = HostWeights(module) if plan.param_offload else None
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        for parameter in self._parameters:
            add_up_in_float32(parameter)
        offload = plan.optimizer_offload and self.device.type != "cpu"
        if plan.optimizer_offload and not offload:
            _log.warning("%s.optimizer_offload has nothing to move: the optimizer's state is in CPU memory", plan.key)
        betas = (optim.betas[0], optim.betas[1])
        self.optimizer = build_adamw(
            self._parameters, offload=offload, lr=optim.lr, betas=betas, weight_decay=optim.weight_decay
        )

    @property
    def device(self) -> torch.device:
        """Where the module lives."""
        return next(self.module.parameters()).device

    @property
    def offloads(self) -> bool:
        """Whether the weights leave the device when they are offloaded."""
        return self._host is not None

    def onload(self) -> None:
        """The weights are about to be used. Nothing to do where they are on the device."""
        if self._host is not None:
            self._host.onload()

    def offload(self) -> None:
        """The weights are not used for a while; with `param_offload` they leave the device."""
        if self._host is not None:
            self._host.offload()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to go on bit for bit. Tensors are not copied."""
        return {**self.progress(), "tensors": self.tensors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a `state_dict` of a module in one process, over however many ranks; tensors are written in place."""
        self.load_progress(state)
        copy_into(self.tensors(), state["tensors"])

    def load_checkpoint(self, state: dict[str, Any], folder: Path | None, name: str) -> None:
        """Take a checkpoint that any placement wrote; collective for a sharded module.

        Args:
            state: a `state_dict`; or a `progress`, where the ranks wrote their shards.
            folder: the checkpoint's.
            name: of the worker's shards in it.

        Raises:
            CheckpointError: of another model, or incomplete.
        """
        if "tensors" in state:
            self.load_state_dict(state)
            return
        from verl_mt.workers.sharded_checkpoint import (
            load_shards,  # half a second that one process does not need
        )

        self.load_progress(state)
        load_shards(self.tensors(), folder, name)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and, once the optimizer has stepped, its state: the live tensors by name, shards where sharded."""
        return live_tensors(self.module, self.optimizer if self.num_updates else None)

    def progress(self) -> dict[str, Any]:
        """The small rest of the state, the same on every rank."""
        return {
            "generator": self._generator.get_state(),
            "num_updates": self.num_updates,
            "num_batches": self._num_batches,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Take a `progress`; `tensors` then has the names that its checkpoint has."""
        self._generator.set_state(progress["generator"].cpu())
        self.num_updates = progress["num_updates"]
        self._num_batches = progress["num_batches"]
        self._nonfinite_in_a_row = progress["nonfinite_in_a_row"]
        self.optimizer.state.clear()

    def first_mini_batches(self, prompt_B: Tensor) -> list[Tensor]:
        """Rows of the mini-batches of the next batch's first epoch; draws nothing."""
        generator = torch.Generator()
        generator.set_state(self._generator.get_state())
        return [*self._epoch(prompt_B, generator)]

    def _mini_batches(self, prompt_B: Tensor) -> Iterator[Tensor]:
        """Rows of each mini-batch of each epoch: whole prompts, so that groups stay together.

        Args:
            prompt_B: the prompt of each row, on the CPU.
        """
        for _ in range(self._plan.ppo_epochs):
            yield from self._epoch(prompt_B, self._generator)

    def _epoch(self, prompt_B: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        prompts = torch.unique(prompt_B)
        size = self._plan.ppo_mini_batch_size or max(1, len(prompts))
        if self._plan.shuffle and len(prompts) > size:
            prompts = prompts[torch.randperm(len(prompts), generator=generator)]
        for chosen in prompts.split(size):
            yield torch.isin(prompt_B, chosen).nonzero().squeeze(1)

    def _token_weights(self, rank_batch: RankBatch, rows: Tensor, *, mode: str, norm_constant: float | None) -> Tensor:
        """float32 [b, T]: the weight of each token in the loss of a mini-batch; 0 outside of it.

        The last mini-batch may have fewer prompts than the others. Its loss is then scaled by their share of a full
        one: a mean over fewer prompts would make each of them weigh more.

        Args:
            rank_batch: this rank's.
            rows: of the batch, those of the mini-batch.
            mode, norm_constant: see `row_weights`.
        """
        stats = rank_batch.stats
        num_in_loss, weighed = stats.num_in_loss_B[rows], stats.weighed_B[rows]
        weights = row_weights(num_in_loss, weighed, mode=mode, norm_constant=norm_constant)
        size, num_prompts = self._plan.ppo_mini_batch_size, len(torch.unique(stats.prompt_B))
        if size is not None and num_prompts > size:  # else one mini-batch, whatever it lost on the way
            weights = weights * min(1.0, len(torch.unique(stats.prompt_B[rows])) / size)
        return rank_batch.rows[columns.LOSS_MASK].float() * rank_batch.back(weights, rows).unsqueeze(1)

    def _step(self, loss: Tensor) -> Tensor | None:
        """Clip and step; or drop a gradient that is not finite. Returns the gradient's norm; None if it was dropped.

        Raises:
            VerlMTError: it was the third such one in a row.
        """
        grad_norm = whole(nn.utils.clip_grad_norm_(self._parameters, self._plan.grad_clip or math.inf)).detach()
        finite = bool(torch.isfinite(grad_norm) & torch.isfinite(loss))
        if finite:
            self._nonfinite_in_a_row = 0
            self.optimizer.step()
            self.num_updates += 1
        else:
            self._nonfinite_in_a_row += 1
            if self._nonfinite_in_a_row >= _MAX_NONFINITE:
                raise VerlMTError(
                    f"loss {loss.item()} or gradient norm {grad_norm.item()} was not finite in "
                    f"{_MAX_NONFINITE} updates in a row (after {self.num_updates} good ones). Lower "
                    f"{self._plan.key}.optim.lr, or go back to an earlier checkpoint"
                )
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm if finite else None

    def _set_lr(self, mini: int) -> float:
        """The rate of a batch's mini-batch."""
        optim = self._plan.optim
        # Counted from the batch, so that a batch that lost prompts does not shift the schedule of the later ones.
        step = self._num_batches * self._updates_per_batch + min(mini, self._updates_per_batch - 1)
        factor = lr_factor(
            step,
            warmup_steps=warmup_steps_of(optim, self._total_updates),
            total_steps=self._total_updates,
            kind=optim.lr_scheduler_type,
            min_ratio=optim.min_lr_ratio,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = optim.lr * factor
        return optim.lr * factor

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        self.module.train(self._checkpointing)
        try:
            yield
        finally:
            self.module.eval()


class HostWeights:
    """Weights that wait in CPU memory. Tensors stay what they are, shards included: what moves is the memory behind
    them, so that optimizer and FSDP2 need not know. In between nobody may read one: there is no memory behind it.

    Args:
        module: on any device; on the CPU there is nothing to save, and it works all the same, but for memory that
            others have too (of a file that was opened and not read, or that an engine reads), which stays.
    """

    def __init__(self, module: nn.Module):
        local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
        storages = [tensor.untyped_storage() for tensor in local]
        self._storages = [*{storage._cdata: storage for storage in storages}.values()]  # tied ones once
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []

    def offload(self) -> None:
        """Idempotent."""
        if self._kept:
            return
        for storage in self._storages:
            if storage.resizable():
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                self._kept.append((storage, host.copy_(_as_bytes(storage))))
                storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._kept):
            # torch's allocator keeps what it is given; it is an engine in another process that wants it.
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Idempotent."""
        for storage, host in self._kept:
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host)
        self._kept = []


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def onload(*workers: Trainable | None) -> None:
    """See `Trainable.onload`; None = there is no such worker."""
    for worker in workers:
        if worker is not None:
            worker.onload()


def offload(*workers: Trainable | None) -> None:
    """See `Trainable.offload`."""
    for worker in workers:
        if worker is not None:
            worker.offload()


def num_mini_batches(num_prompts: int | None, size: int | None) -> int:
    """Per epoch; 1 where nothing is known of the prompts or the batch is not split."""
    return 1 if size is None or num_prompts is None else max(1, math.ceil(num_prompts / size))


def updates_per_step(epochs: int, mini_batch_size: int | None, num_prompts: int | None) -> int:
    """Optimizer steps of a training step."""
    return epochs * num_mini_batches(num_prompts, mini_batch_size)


def steps_of_actor(total_steps: int, critic_warmup: int) -> int:
    """Training steps of a run in which the actor learns too; at least 1, so that there is a schedule."""
    return max(1, total_steps - critic_warmup)


def add_up_in_float32(parameter: Tensor) -> None:
    """Let gradients of micro-batches be added up in float32, whatever the parameter's precision: in bfloat16 what a
    micro-batch adds to the sum of many is mostly rounded away (benchmarks/gradient_accumulation.py)."""
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return
    parameter.grad_dtype = None  # any

    def widen(parameter: Tensor) -> None:
        # The first one; the others are added to it. FSDP2 calls this for shards, which autograd never sees.
        if parameter.grad is not None and parameter.grad.dtype != torch.float32:
            parameter.grad = parameter.grad.float()

    parameter.register_post_accumulate_grad_hook(widen)


def _disable_dropout(module: nn.Module) -> None:
    for submodule in module.modules():
        if isinstance(submodule, nn.Dropout):
            submodule.p = 0.0
        if isinstance(getattr(submodule, "attention_dropout", None), float):
            setattr(submodule, "attention_dropout", 0.0)  # noqa: B010 - nn.Module's annotations know only tensors
