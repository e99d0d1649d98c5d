"""The worker group that the YAML declares: actor and, where an algorithm needs them, reference policy and critic.

`InlineWorkerGroup` has them in this process, `RayWorkerGroup` (ray_group.py) on Ray; the trainer sees no difference.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.data import batch as columns
from verl_mt.engines.base import EngineHost, Receiver
from verl_mt.errors import CheckpointError, VerlMTError
from verl_mt.modeling.lora import Adapter, adapter_of, require_peft
from verl_mt.modeling.passes import passes_of, use_passes
from verl_mt.modeling.weights import named_weights
from verl_mt.plugins import Registry
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.critic import CriticWorker, update_policy_and_critic
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.setup import AlgorithmNeeds, Placement, WorkerSetup, load_workers
from verl_mt.workers.sharding import model_of
from verl_mt.workers.state import count_parameters
from verl_mt.workers.trainable import offload, onload

_INLINE = Placement()
_NOTHING = AlgorithmNeeds()


@dataclass(frozen=True)
class Publication:
    """A weight update that ranks hand to engines; see `FromRanks`."""

    version: int
    publisher: str
    arguments: tuple[Any, ...]
    bucket_bytes: int
    adapters: bool = False
    """See `Capabilities.takes_adapters`."""


class WorkerGroup(abc.ABC):
    """Actor, reference policy and critic, wherever they live."""

    num_parameters: int
    """Of the policy."""
    num_trained: int
    """Those of them that change: with low-rank adapters only these."""
    where: str
    """For people: on what the policy lives."""
    offloads = False
    """The policy's weights wait in CPU memory during rollouts (`actor.param_offload`)."""

    @property
    @abc.abstractmethod
    def policy_module(self) -> nn.Module:
        """The policy as one module in this process, with its current weights. Inline it is the very module that is
        trained; elsewhere a copy on the CPU, made at the first access."""

    @abc.abstractmethod
    def refresh_policy_module(self) -> None:
        """Bring a copy that `policy_module` handed out up to date, in place. Nothing to do where there is none."""

    @abc.abstractmethod
    def update(self, batch: TensorDict) -> dict[str, float]:
        """Train on a rollout batch with advantages; see `ActorWorker.update`, and with a critic `CriticWorker.update`.
        In the critic's warm-up only the latter learns."""

    @abc.abstractmethod
    def compute_log_probs(self, batch: TensorDict) -> Tensor:
        """[B, T] by the current policy; see `ActorWorker.compute_log_probs`."""

    @abc.abstractmethod
    def add_ref_log_probs(self, batch: TensorDict) -> None:
        """Fill in the batch's `ref_log_probs`; does nothing where there is no reference policy."""

    @abc.abstractmethod
    def add_values(self, batch: TensorDict) -> None:
        """Fill in the batch's `values`; does nothing where there is no critic."""

    @abc.abstractmethod
    def give_back_memory(self) -> None:
        """Device memory that training holds in reserve goes back to the device, where the engine needs it."""

    def offload(self) -> None:  # noqa: B027 - there may be no place to put them
        """Offload weights before a rollout (`actor.param_offload`), until something needs them. Call it as well after
        weights were published or written."""

    @abc.abstractmethod
    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every weight, as in the model's checkpoint, each once; see `named_weights`. Tensors
        are to be used or copied before the next one is asked for."""

    def engine_hosts(self) -> tuple[EngineHost, ...]:
        """Places for the engines that the configuration asks for; none where the workers are this process.

        Raises:
            ConfigError: there is no room for them.
        """
        return ()

    def publish(self, update: Publication, receivers: Sequence[Receiver]) -> list[VerlMTError | None]:
        """Let the ranks publish their weights to engines; see `FromRanks`."""
        raise NotImplementedError(f"{type(self).__name__} has no ranks elsewhere")

    @abc.abstractmethod
    def adapter(self) -> Adapter | None:
        """The low-rank adapters; None where all weights are trained."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What changes and is not written by `save_shards`. The reference policy never changes."""

    @abc.abstractmethod
    def save_shards(self, folder: Path) -> dict[str, str]:
        """Write what is too large for one process to hold into a checkpoint's folder; inline that is nothing. Returns
        the digest of each file by its name below the folder."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Take what any placement has saved.

        Args:
            state: a `state_dict`.
            folder: the checkpoint, for one that has shards.

        Raises:
            CheckpointError: of another model, or incomplete.
        """

    def check(self, doing: str) -> None:  # noqa: B027 - workers in this process are there
        """Notice a worker that is lost while nothing is asked of it, as in a rollout. Returns at once; to be called now
        and then.

        Args:
            doing: what is being done meanwhile, for the error.

        Raises:
            WorkerError: one is.
        """

    def close(self) -> None:  # noqa: B027 - workers in this process need no end
        """End the workers' processes. Idempotent."""


@dataclass
class InlineWorkerGroup(WorkerGroup):
    """Workers that live in this process."""

    actor: ActorWorker
    ref: RefWorker | None = None
    """None where no KL term needs it."""
    critic: CriticWorker | None = None
    """None where no estimator needs it."""

    def __post_init__(self) -> None:
        self.num_parameters, self.num_trained = count_parameters(self.actor.module)
        self.where = str(self.actor.device)
        self.offloads = self.actor.offloads
        self._lock = threading.RLock()  # a generator that is collected puts weights away wherever this thread stands
        self._users = 0

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """The weights are on the device meanwhile, whoever says that they may go: an engine that comes back gets
        them in another thread, perhaps in the middle of an update. Runs in any thread. Waits for an onload or
        offload in another one."""
        with self._lock:
            self._users += 1
        try:
            with self._lock:
                onload(self.actor, self.critic)
            yield
        finally:
            with self._lock:
                self._users -= 1

    @property
    def policy_module(self) -> nn.Module:
        with self._at_hand():
            return self.actor.module

    def refresh_policy_module(self) -> None:
        """It is the module that is trained."""

    def update(self, batch: TensorDict) -> dict[str, float]:
        with self._at_hand():
            return update_policy_and_critic(self.actor, self.critic, batch)

    def compute_log_probs(self, batch: TensorDict) -> Tensor:
        with self._at_hand():
            return self.actor.compute_log_probs(batch)

    def add_ref_log_probs(self, batch: TensorDict) -> None:
        if self.ref is not None:
            with self._at_hand():  # whose adapters may be all that the two differ in
                policy, reference = model_of(self.actor.module), model_of(self.ref.module)
                # Computed alike, so that the KL of an unchanged policy is exactly 0.
                if hasattr(policy, "is_gradient_checkpointing"):
                    compiled = None if policy.is_gradient_checkpointing else passes_of(policy).packed_pass
                    use_passes(reference, replace(passes_of(reference), packed_pass=compiled))
                batch[columns.REF_LOG_PROBS] = self.ref.compute_log_probs(batch)

    def add_values(self, batch: TensorDict) -> None:
        if self.critic is not None:
            with self._at_hand():
                batch[columns.VALUES] = self.critic.compute_values(batch)

    def give_back_memory(self) -> None:
        torch.cuda.empty_cache()

    def offload(self) -> None:
        """Runs in any thread. Does nothing while another thread uses the weights."""
        with self._lock:
            if not self._users:
                offload(self.actor, self.critic)

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        with self._at_hand():
            yield from named_weights(self.actor.module)

    def adapter(self) -> Adapter | None:
        with self._at_hand():
            found = adapter_of(self.actor.module)
            if found is not None and self.offloads:  # as in `state_dict`: live ones may be offloaded under his hands
                found = replace(found, tensors={name: t.to("cpu", copy=True) for name, t in found.tensors.items()})
            return found

    def state_dict(self) -> dict[str, Any]:
        with self._at_hand():
            critic = {} if self.critic is None else {"critic": self.critic.state_dict()}
            state = {"actor": self.actor.state_dict(), **critic}
            if self.offloads:  # whoever writes them takes his time, and live ones may be offloaded under his hands
                for of_worker in state.values():
                    of_worker["tensors"] = {name: t.to("cpu", copy=True) for name, t in of_worker["tensors"].items()}
            return state

    def save_shards(self, folder: Path) -> dict[str, str]:
        return {}  # all of the state is in `state_dict`

    def load_state_dict(self, state: dict[str, Any], folder: Path | None = None) -> None:
        with self._at_hand():
            load_workers_state(self.actor, self.critic, state, folder)


def load_workers_state(
    actor: ActorWorker, critic: CriticWorker | None, state: dict[str, Any], folder: Path | None
) -> None:
    """Let one rank's actor and critic take a checkpoint of any placement; collective for sharded ones.

    Raises:
        CheckpointError: of another model, incomplete, or without a critic where there is one now, or the other way.
    """
    actor.load_checkpoint(state["actor"], folder, "actor")
    if (critic is None) != ("critic" not in state):
        now, then = ("no", "a") if critic is None else ("a", "no")
        raise CheckpointError(
            f"the checkpoint has {then} critic, and this run has {now}: algorithm.adv_estimator was "
            f"{'gae' if then == 'a' else 'another one than gae'}. Resume with the one that the run was started with"
        )
    if critic is not None:
        critic.load_checkpoint(state["critic"], folder, "critic")


placements: Registry[Callable[[WorkerSetup], WorkerGroup]] = Registry("placement", group="verl_mt.placements")
"""Places of the ranks beside this process."""


def build_worker_group(
    config: ActorRolloutRefConfig,
    *,
    total_steps: int,
    train_batch_size: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    placement: Placement | str = _INLINE,
    algorithm: AlgorithmNeeds = _NOTHING,
) -> WorkerGroup:
    """Load the policy and put the workers around it.

    Args:
        config: model, actor, rollout (for its temperature and response length) and ref.
        total_steps: training steps of the whole run, for the learning-rate schedule.
        train_batch_size: prompts per training step, for the same; null where a step is one mini-batch anyway.
        device: where the workers compute: cpu, cuda, or auto = cuda if it is there.
        seed: of the shuffling between mini-batches.
        placement: in this process, or on Ray; a bare word means one worker.
        algorithm: what `algorithm.*` wants of them; by default nothing.

    Raises:
        ConfigError: a placement, model or device that cannot be had.
        WorkerError: a worker died while it started.
    """
    if config.model.lora_rank:
        require_peft()
    if isinstance(placement, str):
        placement = Placement(kind=placement)
    setup = WorkerSetup(config, total_steps, train_batch_size, str(device), seed, placement, algorithm)
    if placement.kind == "ray":
        return cast(WorkerGroup, placements.find(placement.kind)(setup))
    return InlineWorkerGroup(*load_workers(setup))
