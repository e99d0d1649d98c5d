"""The policy's weights on their way to the inference engine."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from verl_mt.engines.base import (
    Capabilities,
    Disk,
    FromRanks,
    InferenceEngine,
    InPlace,
    Receiver,
    TensorBuckets,
    WeightUpdate,
)
from verl_mt.errors import ConfigError, EngineError, VerlMTError, error_text
from verl_mt.modeling.lora import Adapter, adapter_of, without_adapters
from verl_mt.modeling.weights import named_weights
from verl_mt.workers.worker_group import InlineWorkerGroup, Publication, WorkerGroup

log = logging.getLogger(__name__)


@dataclass
class LiveWeights:
    """The weights of a module or of a worker group; every iteration reads them again."""

    policy: nn.Module | WorkerGroup
    num_bytes: int = 0
    """That came through this process in the last iteration."""
    adapters: bool = False
    """The low-rank adapters alone."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        policy: Any = self.policy
        grouped, self.num_bytes = isinstance(policy, WorkerGroup), 0
        if self.adapters:
            state = cast(Adapter, policy.adapter() if grouped else adapter_of(policy)).named()
        else:
            state = policy.full_state() if grouped else named_weights(policy)
        try:
            for name, tensor in state:
                self.num_bytes += tensor.nbytes
                yield name, tensor
        finally:
            state = iter(())  # what holds the weights at hand ends before they go
            if isinstance(self.policy, WorkerGroup):
                self.policy.offload()


@dataclass(frozen=True)
class Transport:
    """How weights travel where engine and policy do not share them."""

    bucket_bytes: int = 512 * 1024 * 1024
    folder: Path | None = None
    """For engines that read files: where they and the trainer both look."""


def weight_update_for(
    capabilities: Capabilities, policy: nn.Module | WorkerGroup, version: int, transport: Transport | None = None
) -> WeightUpdate:
    """The lightest update that an engine takes: nothing moves, else memory, else files.

    Raises:
        ConfigError: it takes none that can be made here.
    """
    transport = transport or Transport()
    if "in_place" in capabilities.transports:
        if isinstance(policy, WorkerGroup):
            policy.refresh_policy_module()
        return InPlace(version)
    elsewhere = isinstance(policy, WorkerGroup) and not isinstance(policy, InlineWorkerGroup)
    size, adapters = transport.bucket_bytes, capabilities.takes_adapters
    if "from_ranks" in capabilities.transports and elsewhere:
        return FromRanks(version, partial(_publish, cast(WorkerGroup, policy), version, size, adapters))
    if "tensor_buckets" in capabilities.transports:
        return TensorBuckets(version, LiveWeights(policy, adapters=adapters), size, streamed=elsewhere)
    if "disk" in capabilities.transports and transport.folder is not None:
        path = transport.folder / f"version_{version:06d}"
        module: Any = policy.policy_module if isinstance(policy, WorkerGroup) else policy
        without_adapters(module).save_pretrained(path)
        if isinstance(policy, WorkerGroup):
            policy.offload()
        return Disk(version, str(path.resolve()))
    raise ConfigError(
        f"the engine takes weights only by {', '.join(sorted(capabilities.transports))}: there is no folder for files"
    )


async def _publish(
    workers: WorkerGroup,
    version: int,
    bucket_bytes: int,
    adapters: bool,
    receivers: Sequence[Receiver],
    publisher: str,
    arguments: tuple[Any, ...],
) -> list[VerlMTError | None]:
    # In a thread: the engines answer on this loop meanwhile.
    """Runs on the rollout's loop, because the engines answer there. Waits for a thread that publishes the weights."""
    update = Publication(version, publisher, arguments, bucket_bytes, adapters)
    return await asyncio.to_thread(workers.publish, update, receivers)


@dataclass
class WeightSync:
    """Gives the engine the policy's weights after every update, and the device's memory to training during it."""

    engine: InferenceEngine
    workers: WorkerGroup
    call: Callable[[Coroutine[Any, Any, None], Callable[[], None]], None]
    """Runs a coroutine on the rollout's event loop and waits for it; calls the function now and then meanwhile."""
    transport: Transport = Transport()
    trainer_bytes: int = 0
    """Of the last update, what came through this process on its way to the engine."""
    _last_folder: Path | None = None

    def release(self) -> None:
        """The policy is trained next: the engine's memory is wanted for it, and its weights are nobody's meanwhile."""
        if self.engine.capabilities.frees_memory:
            self._call(self.engine.release_memory())
        else:
            self._call(self.engine.hold_updates())

    def free_engine_memory(self) -> bool:
        """The policy's weights are wanted between two steps (by a checkpoint, an export), and wait in CPU memory: the
        engine frees this memory first. Returns whether it did, and has to get its memory and weights again
        (`push`)."""
        if not (self.workers.offloads and self.engine.capabilities.frees_memory):
            return False
        try:
            self.release()
        except EngineError as error:
            # What is to be saved is saved all the same; whether the engine still serves is seen when it gets weights.
            log.warning("the engine did not give its memory back: %s", error_text(error))
        return True

    @contextmanager
    def set_aside(self, version: int | None) -> Iterator[None]:
        """The policy's weights are in use between two steps: the engine's memory is free meanwhile. Afterwards it has
        its memory and the weights of `version` again; None = the run ends."""
        freed = self.free_engine_memory()
        yield
        self.workers.offload()
        if freed and version is not None:
            self.push(version)

    def push(self, version: int) -> None:
        """The weights changed: from here on the engine samples with them."""
        if self.engine.capabilities.frees_memory:
            # In this order: what torch's allocator keeps in reserve is not free to the engine, which would find the
            # device full.
            self.workers.give_back_memory()
            self._call(self.engine.resume_memory())
        update = weight_update_for(self.engine.capabilities, self.workers, version, self.transport)
        self._call(self.engine.apply(update))
        self.trainer_bytes = update.tensors.num_bytes if isinstance(update, TensorBuckets) else 0  # type: ignore[attr-defined]
        if isinstance(update, Disk):
            self.trainer_bytes = sum(file.stat().st_size for file in Path(update.path).glob("*.safetensors"))
            # The last folder stays: an engine that has to be started anew reads it again.
            if self._last_folder is not None and self._last_folder != Path(update.path):
                shutil.rmtree(self._last_folder, ignore_errors=True)
            self._last_folder = Path(update.path)

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        # An engine that went away with its machine is waited for, while the rank beside it is gone for good.
        self.call(coroutine, partial(self.workers.check, "publishing weights to the engines"))
