"""One rank of a worker group: its shards of the actor and of the reference policy, in a separate process.

Whoever starts the processes calls the same method on every rank, with the same arguments but for its share of a batch;
all methods but `address` and `describe` are collective. What all ranks would return alike is returned by rank 0 only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from verl_mt.engines.base import Publishers, Receiver, WeightPublisher
from verl_mt.errors import EngineError, VerlMTError, error_text
from verl_mt.modeling.lora import Adapter, Lora, is_adapter, lora_of, merged
from verl_mt.modeling.weights import as_in_checkpoint, by_layer
from verl_mt.plugins import load_object
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.cores import cores_per_worker
from verl_mt.workers.critic import CriticWorker, train_policy_and_critic
from verl_mt.workers.process import prepare_torch
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.setup import WorkerSetup, load_workers
from verl_mt.workers.sharded_checkpoint import save_shards
from verl_mt.workers.sharding import Ranks, model_of, whole
from verl_mt.workers.state import all_weights, count_parameters
from verl_mt.workers.trainable import offload, onload
from verl_mt.workers.worker_group import Publication, load_workers_state

_BUCKET_BYTES = 2**28
"""Weights that are gathered and sent at once; a larger layer is a separate bucket."""


@dataclass(frozen=True)
class Packed:
    """A tensor as bytes, which travel between processes without being pickled."""

    data: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        return cls(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> Tensor:
        """In separate memory."""
        return torch.from_numpy(self.data.copy()).view(self.dtype).reshape(self.shape)


def cuda_index(gpus: Sequence[str], environment: Mapping[str, str]) -> int:
    """torch's number of the GPU that Ray gave to this process.

    Ray lets a process see its own GPU alone, as number 0; with RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, which other
    libraries' scripts set, it sees all of them.
    """
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not gpus:
        return 0
    if visible:
        return visible.index(gpus[0]) if gpus[0] in visible else 0
    return int(gpus[0]) if gpus[0].isdecimal() else 0


class RankWorker:
    """Made in each process, then `start`ed with the address that rank 0 gave. Methods run in the main thread of a
    rank's process. `RayWorkerGroup` calls them on all ranks in one order, because their collectives wait for all ranks.
    """

    actor: ActorWorker
    ref: RefWorker | None
    critic: CriticWorker | None

    def __init__(self, setup: WorkerSetup, ranks: Ranks):
        self._setup = setup
        self._ranks = ranks
        self._publishers = Publishers()

    def address(self) -> str:
        """Where rank 0 will wait for the others."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def describe(self) -> tuple[int, str]:
        """(process id, machine)."""
        return os.getpid(), socket.gethostname()

    def gpus(self) -> tuple[str, ...]:
        """That Ray gave to this rank, as the machine names them."""
        import ray

        return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))

    def start(self, address: str, patience_s: float) -> tuple[int, int]:
        """Join the others and load the models. Waits for all ranks.

        Args:
            address: of rank 0.
            patience_s: how long ranks wait for each other.

        Returns:
            The numbers of the policy's parameters: all, trained.
        """
        setup = self._setup
        cuda = torch.device(setup.device).type == "cuda"
        placement = setup.placement
        prepare_torch(threads=cores_per_worker(placement), seed=setup.seed, deterministic=placement.deterministic)
        if cuda:
            torch.cuda.set_device(cuda_index(self.gpus(), os.environ))
        if self._ranks.size > 1:
            import torch.distributed as dist

            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            ranks, patience = self._ranks, timedelta(seconds=patience_s)
            dist.init_process_group(
                backend, init_method=address, rank=ranks.rank, world_size=ranks.size, timeout=patience
            )
        self.actor, self.ref, self.critic = load_workers(setup, self._ranks)
        return count_parameters(self.actor.module)

    def first_mini_batches(self, prompt_B: Tensor) -> list[Tensor] | None:
        """See `Trainable.first_mini_batches`; of the policy."""
        return self._once(self.actor.first_mini_batches(prompt_B))

    def update(self, rank_batch: RankBatch) -> tuple[dict[str, float] | None, dict[str, Tensor] | None]:
        """Metrics, and the columns that the update filled in: none where only the critic learned."""
        onload(self.actor, self.critic)
        metrics, filled = train_policy_and_critic(self.actor, self.critic, self._mine(rank_batch))
        return self._once(metrics), self._of_part({name: column.cpu() for name, column in filled.items()})

    def values(self, rank_batch: RankBatch) -> Tensor | None:
        """By the critic."""
        assert self.critic is not None
        onload(self.actor, self.critic)
        return self._of_part(self.critic.values(self._mine(rank_batch)).cpu())

    def log_probs(self, rank_batch: RankBatch) -> Tensor | None:
        """By the current policy."""
        self.actor.onload()
        return self._of_part(self.actor.log_probs(self._mine(rank_batch)).cpu())

    def ref_log_probs(self, rank_batch: RankBatch) -> Tensor | None:
        """By the reference policy."""
        assert self.ref is not None
        self.actor.onload()  # whose adapters may be all that the two differ in
        return self._of_part(self.ref.log_probs(self._mine(rank_batch)).cpu())

    def give_back_memory(self) -> None:
        """To the device, what its allocator holds in reserve."""
        torch.cuda.empty_cache()

    def num_buckets(self) -> int | None:
        """How many calls of `bucket` give all weights."""
        return self._once(len(self._buckets()))

    @torch.no_grad()
    def bucket(self, number: int, converted: bool) -> dict[str, Packed] | None:
        """Whole weights of some layers, merged with adapters, in the names and shapes of the model's checkpoint or of
        the module that transformers makes of it."""
        self.actor.onload()
        gathered = self._gather(self._buckets()[number], converted if self._ranks.rank == 0 else None)
        return self._once({name: Packed.of(tensor) for name, tensor in gathered.items()})

    @torch.no_grad()
    def publish(self, update: Publication, receivers: Mapping[int, Sequence[Receiver]]) -> list[VerlMTError | None]:
        """Publish the weights to the engines that get them from this rank; see `FromRanks`.

        Waits for all ranks that gather weights, and for the engines of this rank.

        Args:
            update: what is given, and how.
            receivers: rank -> its engines.

        Returns:
            For each of its own what went wrong, or None.
        """
        onload(self.actor)
        own = receivers.get(self._ranks.rank, ())
        gathering: list[BaseException] = []

        def gathered() -> Iterator[tuple[str, Tensor]]:
            try:
                if update.adapters:
                    yield from self._whole_adapter(own)
                    return
                for bucket in self._buckets():
                    yield from self._gather(bucket, True if own else None).items()
            except Exception as error:
                gathering.append(error)
                raise

        tensors, problems = gathered(), cast(list[VerlMTError | None], [])
        if own:
            try:
                problems = self._publisher(update).publish(tensors, update.version, update.bucket_bytes, own)
            except Exception as error:
                if gathering:
                    raise  # no rank goes on from that
                problem = error if isinstance(error, VerlMTError) else EngineError(error_text(error, named=True))
                problems = [problem] * len(own)
        for _ in tensors:  # gathering is collective: the other ranks wait for this one
            pass
        # Before the engine takes its cache back: the weights, and the memory that they were gathered in.
        self.offload()
        self.give_back_memory()
        return problems

    def offload(self) -> None:
        """Offload weights before a rollout (`param_offload`)."""
        offload(self.actor, self.critic)

    def stop_giving(self) -> None:
        """Leave the groups of engines that get weights by broadcasts, and give back what holds weights on their way:
        servers, and names in /dev/shm, outlive this process."""
        self._publishers.close()

    def _publisher(self, update: Publication) -> WeightPublisher:
        import ray

        kind = load_object(update.publisher, what="a weight publisher")
        return self._publishers.get(kind, update.arguments, ray.util.get_node_ip_address())

    def _gather(self, bucket: dict[str, Tensor], converted: bool | None) -> dict[str, Tensor]:
        """Whole tensors; None = the others' need alone, nothing is done with them here."""
        # Gathering is collective; merging and converting is not, and would be done for nothing on all but some.
        gathered = {name: whole(tensor) for name, tensor in bucket.items()}
        if converted is None:
            return {}
        model = model_of(self.actor.module)
        if converted:
            return as_in_checkpoint(model, gathered)
        lora = lora_of(model)
        return gathered if lora is None else merged(lora, gathered)

    @torch.no_grad()
    def adapter(self) -> tuple[Lora, dict[str, Packed]] | None:
        """Low-rank adapters, if there are some."""
        model = model_of(self.actor.module)
        lora = lora_of(model)
        if lora is None:
            return None
        self.actor.onload()
        tensors = {name: Packed.of(whole(p)) for name, p in model.named_parameters() if is_adapter(name)}
        return self._once((lora, tensors))

    def _whole_adapter(self, wanted: object) -> Iterator[tuple[str, Tensor]]:
        """Name in peft's files and whole tensor. Collective; nothing where it is not wanted."""
        model = model_of(self.actor.module)
        tensors = {name: whole(p) for name, p in model.named_parameters() if is_adapter(name)}
        return Adapter(cast(Lora, lora_of(model)), tensors if wanted else {}).named()

    def progress(self) -> dict[str, Any] | None:
        """The small part of the state of actor and critic."""
        critic = {} if self.critic is None else {"critic": self.critic.progress()}
        return self._once({"actor": self.actor.progress(), **critic})

    def save_shards(self, folder: Path) -> dict[str, str]:
        """The large part, every rank its own. Returns the digests of this rank's files."""
        onload(self.actor, self.critic)
        digests = save_shards(self.actor.tensors(), folder)
        if self.critic is not None:
            digests |= save_shards(self.critic.tensors(), folder, "critic")
        return digests

    def load(self, state: dict[str, Any], folder: Path | None) -> None:
        """Take a checkpoint of any placement."""
        onload(self.actor, self.critic)
        load_workers_state(self.actor, self.critic, state, folder)

    def _once(self, value: Any) -> Any:
        return value if self._ranks.rank == 0 else None

    def _mine(self, rank_batch: RankBatch) -> RankBatch:
        """As this one of the ranks that have it sees it."""
        return replace(rank_batch, ranks=self._ranks)

    def _of_part(self, value: Any) -> Any:
        """What the first of the ranks that share rows returns for them."""
        return value if self._ranks.counts else None

    def _buckets(self) -> list[dict[str, Tensor]]:
        """Names and live tensors; a layer is never torn apart, because its tensors may be converted together."""
        buckets: list[dict[str, Tensor]] = []
        size = 0
        for layer in by_layer(all_weights(self.actor.module)):
            layer_size = sum(t.numel() * t.element_size() for t in layer.values())
            if not buckets or size + layer_size > _BUCKET_BYTES:
                buckets.append({})
                size = 0
            buckets[-1] |= layer
            size += layer_size
        return buckets
