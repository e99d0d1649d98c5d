"""The worker group on Ray: one actor process per rank, spread over the machines of a cluster.

Ray places the processes, carries batches, numbers and weights between them and this one, and tells when one is lost.
What the ranks say to each other (gradients, shards) goes through torch.distributed, not through Ray.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tensordict import TensorDict
from torch import Tensor, nn

from verl_mt import engines
from verl_mt.config.rollout import RolloutConfig
from verl_mt.data import batch as columns
from verl_mt.engines.base import EngineHost, Receiver
from verl_mt.errors import CheckpointError, ConfigError, VerlMTError, WorkerError
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.extensions.cluster.start_log import phase, start_log
from verl_mt.extensions.cluster.workers.engine_hosts import RayHost, how_it_ended
from verl_mt.extensions.cluster.workers.rank_worker import RankWorker
from verl_mt.extensions.cluster.workers.ray_cluster import (
    bundle,
    cluster_in_words,
    connect,
    packages_on_machines,
    require_room,
    require_same_versions,
    require_travel,
    resolve_device,
    usable,
)
from verl_mt.modeling.lora import Adapter
from verl_mt.workers.actor import against_sampler
from verl_mt.workers.critic import value_metrics
from verl_mt.workers.rank_batch import RankBatch, assemble, deal
from verl_mt.workers.setup import WorkerSetup, load_policy
from verl_mt.workers.sharded_checkpoint import has_shards
from verl_mt.workers.worker_group import Publication, WorkerGroup

_PLACEMENT_TIMEOUT_S = 120.0
_GRACE_S = 5.0
"""How long the other ranks get to fail too, once one has: the one that died is the one to name."""
_CHECK_EVERY_S = 1.0
_UPDATING = "updating the policy"
_CALL = 10
"""A call may take as many times longer than the ranks wait for each other in one exchange."""
_OWN_GPUS_ALONE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Where `ray start` had it set to 1, as other libraries' scripts do, an engine would see all GPUs and take the first,
which may be training's."""
_SENT = (
    columns.INPUT_IDS, columns.ATTENTION_MASK, columns.SAMPLED, columns.LOSS_MASK, columns.ROLLOUT_LOG_PROBS,
    columns.ADVANTAGES, columns.REF_LOG_PROBS, columns.TRAJECTORY_INDEX, columns.PROMPT_INDEX, columns.HAS_LOG_PROBS,
    columns.VALUES, columns.RETURNS, columns.MEDIA, columns.EXECUTION_INDEX, columns.GROUP_INDEX,
)  # fmt: skip
"""Columns that workers read; the others stay here."""


class RayWorkerGroup(WorkerGroup):
    """`trainer.nnodes` x `trainer.n_workers_per_node` ranks.

    Methods run in the trainer's main thread, or in a thread that publishes weights. They wait for the ranks' processes,
    by Ray.

    Raises:
        ConfigError: the cluster has not the machines, CPUs or GPUs for it, or the model cannot be loaded.
        PluginError: an object of a Python call that cannot be sent to the ranks.
        WorkerError: a worker died while it started.
    """

    def __init__(self, setup: WorkerSetup):
        placement, rollout = setup.placement, setup.config.rollout
        require_travel(placement.objects)
        machines, on_each = keys_of(rollout).devices_apart or (0, 0)
        with phase("joining the Ray cluster"):
            self._ours = connect(placement, machines * on_each)
        start_log.info("%s", cluster_in_words())
        self._group: PlacementGroup | None = None
        self._workers: list[Any] = []
        self._hosts: list[RayHost] = []
        self._apart: PlacementGroup | None = None
        """The placement of engines on separate devices."""
        self._names: list[str] = []
        self._broken: str | None = None
        self._gave = False
        """Whether ranks have groups or buffers for publishing weights to engines."""
        self._replica: Any = None
        self._stale = False
        self._order = threading.RLock()
        """Held while a call goes out, for all ranks must get all calls in one order, and while the group ends."""
        self._checks: list[Any] = []
        """Calls that only a rank that is gone does not answer."""
        self._checked_at = 0.0
        try:
            self._setup = resolve_device(setup)
            require_room(self._setup)
            require_same_versions(("verl_mt", "torch", *packages_on_machines(rollout)), usable(self._setup))
            engine = rollout.name
            self._patience_s = setup.patience_s
            if self._setup.device == "cuda" and engines.samples_from_policy(engine):
                raise ConfigError(
                    f"trainer.device=auto found GPUs, but actor_rollout_ref.rollout.name={engine} with "
                    "trainer.placement=ray samples on the CPU: use sglang, or set trainer.device=cpu"
                )
            with phase(f"loading the model on {placement.num_ranks} Ray worker(s)"):
                self._place()
                self.num_parameters, self.num_trained = self._start()
        except BaseException:
            self.close()
            raise
        self.offloads = setup.config.actor.param_offload
        self._has_ref, self._has_critic = setup.has_ref, setup.algorithm.critic is not None
        self._correction = setup.algorithm.correction
        self.where = f"{self._setup.device}, {placement.num_ranks} Ray worker(s) on {placement.nnodes} machine(s)"

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the ranks, on their machines."""
        return [pid for pid, _ in self._call("describe", doing="telling its process id")]

    @property
    def policy_module(self) -> nn.Module:
        if self._replica is None:
            self._replica = load_policy(self._setup, device="cpu")
            self._stale = True
        self.refresh_policy_module()
        return self._replica

    @torch.no_grad()
    def refresh_policy_module(self) -> None:
        if self._replica is None or not self._stale:
            return
        parameters = dict(self._replica.named_parameters())
        for name, tensor in self._weights(converted=False):
            parameters[name].copy_(tensor)
        self._stale = False

    def update(self, batch: TensorDict) -> dict[str, float]:
        shares = self._shares(batch, for_update=True)
        told = self._of_shares("update", shares, _UPDATING)
        filled = [columns_of_part for _, columns_of_part in told]
        for name in filled[0]:
            batch[name] = assemble(batch, shares, [of_part[name] for of_part in filled])
        self._stale = self._stale or bool(filled[0])
        metrics = told[0][0] | (value_metrics(batch) if self._has_critic else {})
        return metrics | (against_sampler(batch, self._correction) if filled[0] else {})

    def compute_log_probs(self, batch: TensorDict) -> Tensor:
        return self._column("log_probs", batch, "computing log-probs")

    def add_ref_log_probs(self, batch: TensorDict) -> None:
        if self._has_ref:
            doing = "computing the reference policy's log-probs"
            batch[columns.REF_LOG_PROBS] = self._column("ref_log_probs", batch, doing)

    def add_values(self, batch: TensorDict) -> None:
        if self._has_critic:
            batch[columns.VALUES] = self._column("values", batch, "computing the critic's values")

    def give_back_memory(self) -> None:
        self._call("give_back_memory", doing="giving memory back")

    def offload(self) -> None:
        if self.offloads:
            self._call("offload", doing="offloading weights")

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights(converted=True)

    def engine_hosts(self) -> tuple[EngineHost, ...]:
        if (wanted := keys_of(self._setup.config.rollout).started_on) is not None:
            size, apart = wanted
            self._hosts = [*(self._hosts_beside(size) if apart is None else self._hosts_apart(size, *apart))]
        return tuple(self._hosts)

    def _hosts_beside(self, ranks_per_engine: int) -> Iterator[RayHost]:
        placement = self._setup.placement
        gpus = self._call("gpus", doing="telling its devices")
        for first in range(0, placement.num_ranks, ranks_per_engine):
            last = first + ranks_per_engine - 1
            devices = tuple(gpu for rank in range(first, last + 1) for gpu in gpus[rank])
            name = f"rank {first}" if first == last else f"ranks {first} to {last}"
            options = {**self._beside(first), "num_cpus": 0, "num_gpus": 0}
            yield RayHost(name, first, ranks_per_engine, devices, with_engine_environment(options))

    def _hosts_apart(self, ranks_per_engine: int, nnodes: int, per_node: int) -> Iterator[RayHost]:
        gpu, needed = self._setup.device == "cuda", bundle(self._setup, per_node)
        self._apart = placement_group([needed] * nnodes, strategy="STRICT_SPREAD" if nnodes > 1 else "STRICT_PACK")
        if not self._apart.wait(_PLACEMENT_TIMEOUT_S):
            require_room(self._setup)  # a machine may have gone since it was asked
            raise WorkerError(
                f"the Ray cluster could not place engines on {nnodes} x {per_node} devices within "
                f"{_PLACEMENT_TIMEOUT_S:.0f} s: its machines are large enough, but in use. `ray status` shows the usage"
            )
        for number in range(nnodes * per_node // ranks_per_engine):
            where = PlacementGroupSchedulingStrategy(
                self._apart, placement_group_bundle_index=number // (per_node // ranks_per_engine)
            )
            options = {
                "runtime_env": {"env_vars": rank_environment(self._setup.config.rollout, os.environ)},
                "scheduling_strategy": where,
                "num_cpus": ranks_per_engine,
                "num_gpus": ranks_per_engine if gpu else 0,
            }
            yield RayHost(f"engine {number}", None, ranks_per_engine, None, with_engine_environment(options))

    def publish(self, update: Publication, receivers: Sequence[Receiver]) -> list[VerlMTError | None]:
        own: dict[int, list[Receiver]] = {}
        for receiver in receivers:
            own.setdefault(receiver.rank or 0, []).append(receiver)
        self._gave = True
        told = self._call("publish", update, own, doing="publishing weights to the engines")
        problems = {rank: iter(told[rank]) for rank in own}
        return [next(problems[receiver.rank or 0]) for receiver in receivers]

    def adapter(self) -> Adapter | None:
        found = self._call("adapter", doing="sending its adapters")[0]
        return found and Adapter(found[0], {name: packed.tensor() for name, packed in found[1].items()})

    def state_dict(self) -> dict[str, Any]:
        return self._call("progress", doing="telling its progress")[0]

    def save_shards(self, folder: Path) -> dict[str, str]:
        folder = folder.resolve()
        written = self._call("save_shards", folder, doing="writing a checkpoint")
        if not has_shards(folder):
            raise CheckpointError(
                f"the workers wrote their shards, but {folder} has none here: trainer.default_local_dir must be on a "
                "disk that all machines of the Ray cluster share"
            )
        return {name: digest for of_rank in written for name, digest in of_rank.items()}

    def load_state_dict(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Waits for all ranks."""
        folder = None if folder is None else folder.resolve()
        own = {name: state[name] for name in ("actor", "critic") if name in state}
        self._call("load", ray.put(own), folder, doing="loading a checkpoint")
        self._stale = True

    def check(self, doing: str) -> None:
        """Runs in the trainer's main thread and waits for nothing."""
        with self._order:
            if self._broken is not None:
                raise WorkerError(self._broken)
            if time.monotonic() < self._checked_at + _CHECK_EVERY_S:
                return
            # Not asked again while a rank has not answered: it may be publishing weights to an engine that came back.
            refs = self._checks or self._begin("describe")
            done, left = ray.wait(refs, num_returns=len(refs), timeout=0)
            over = not left or any(map(_failed, done))
            self._checks, self._checked_at = [] if over else refs, time.monotonic()
            if over:
                self._wait(refs, doing)

    def close(self) -> None:
        self._end_processes()
        if self._ours:
            self._ours = False
            ray.shutdown()

    def _end_processes(self) -> None:
        """Waits for the ranks to leave their groups, at most `_GRACE_S`, then kills them."""
        workers, self._workers = self._workers, []
        for host in self._hosts:
            host.resident = None  # it goes with the placement, or with the cluster
        if not ray.is_initialized():
            return
        if workers and self._gave and self._broken is None:
            with contextlib.suppress(RayError, GetTimeoutError):
                ray.get([worker.stop_giving.remote() for worker in workers], timeout=_GRACE_S)
        for worker in workers:
            ray.kill(worker)
        for group in (self._group, self._apart):
            if group is not None:
                with contextlib.suppress(RayError):  # The cluster may be what was lost.
                    remove_placement_group(group)
        self._group = self._apart = None

    def _place(self) -> None:
        """Runs in the trainer's main thread. Waits until the cluster can place the workers."""
        setup, placement = self._setup, self._setup.placement
        strategy = "STRICT_SPREAD" if placement.nnodes > 1 else "STRICT_PACK"
        self._group = placement_group([bundle(setup)] * placement.nnodes, strategy=strategy)
        if not self._group.wait(_PLACEMENT_TIMEOUT_S):
            require_room(setup)  # a machine may have gone since it was asked
            raise WorkerError(
                f"the Ray cluster could not place {placement.num_ranks} workers within {_PLACEMENT_TIMEOUT_S:.0f} s: "
                "its machines are large enough, but in use. `ray status` shows the usage"
            )
        remote = ray.remote(RankWorker)
        for number in range(placement.num_ranks):
            options = {
                **self._beside(number),
                "num_cpus": 1,
                "num_gpus": 1 if setup.device == "cuda" else 0,
                "max_restarts": 0,
            }
            self._workers.append(remote.options(**options).remote(setup, setup.ranks(number)))

    def _beside(self, rank: int) -> dict[str, Any]:
        """Options of a Ray actor on this rank's machine."""
        assert self._group is not None
        bundle_index = rank // self._setup.placement.n_workers_per_node
        return {
            "runtime_env": {"env_vars": rank_environment(self._setup.config.rollout, os.environ)},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle_index
            ),
        }

    def _start(self) -> tuple[int, int]:
        """Waits for all ranks."""
        self._names = [f"rank {k}" for k in range(len(self._workers))]
        described = self._call("describe", doing="starting")
        self._names = [f"rank {k} (process {pid} on {host})" for k, (pid, host) in enumerate(described)]
        address = self._wait([self._workers[0].address.remote()], "starting")[0]
        return self._call("start", address, self._patience_s, doing="loading the model")[0]

    def _weights(self, *, converted: bool) -> Iterator[tuple[str, Tensor]]:
        """Bucket by bucket; the next one is gathered while this one is used."""
        doing = "sending weights"
        count = self._call("num_buckets", doing=doing)[0]
        refs = self._begin("bucket", 0, converted) if count else []
        for number in range(count):
            upcoming = self._begin("bucket", number + 1, converted) if number + 1 < count else []
            for name, packed in self._wait(refs, doing)[0].items():
                yield name, packed.tensor()
            refs = upcoming

    def _shares(self, batch: TensorDict, *, for_update: bool = False) -> list[RankBatch]:
        """What each part of the ranks gets of a batch."""
        mini_batches: list[Tensor] = []
        size = self._setup.config.actor.ppo_mini_batch_size
        if for_update and size is not None and len(torch.unique(batch[columns.PROMPT_INDEX])) > size:
            mini_batches = self._call("first_mini_batches", batch[columns.PROMPT_INDEX], doing=_UPDATING)[0]
        return deal(batch.select(*_SENT, strict=False), self._setup.ranks(0), mini_batches)

    def _column(self, method: str, batch: TensorDict, doing: str) -> Tensor:
        """[B, T] of what the ranks compute for their rows."""
        shares = self._shares(batch)
        return assemble(batch, shares, self._of_shares(method, shares, doing))

    def _of_shares(self, method: str, shares: list[RankBatch], doing: str) -> list[Any]:
        """What each part returns for its rows. Waits for all ranks."""
        # Once into the object store for all ranks that share rows.
        refs = [ray.put(rank_batch) for rank_batch in shares]
        sequence = self._setup.ranks(0).sequence
        per_rank = [(refs[rank // sequence],) for rank in range(len(self._workers))]
        return self._wait(self._begin(method, each=per_rank), doing)[::sequence]

    def _call(self, method: str, *args: Any, doing: str) -> list[Any]:
        return self._wait(self._begin(method, *args), doing)

    def _begin(self, method: str, *args: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Of all ranks, with the same arguments; or `each` with its own. Runs in any thread and waits for nothing."""
        if self._broken is not None or not self._workers:
            raise WorkerError(self._broken or "the Ray workers have been closed")
        # An engine that comes back asks for weights from a thread of its own, perhaps in the middle of an update.
        with self._order:
            given = each or [args] * len(self._workers)
            return [getattr(worker, method).remote(*own) for worker, own in zip(self._workers, given)]

    def _wait(self, refs: list[Any], doing: str) -> list[Any]:
        """Results of all ranks; the first failure ends the group, because the others wait for the failed one. Runs in
        the thread that called, at most `_CALL` times `trainer.worker_timeout_s`."""
        results: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        pending = list(refs)

        def take(num_returns: int, timeout: float | None) -> list[Any]:
            """Runs in the thread that called. Waits for `num_returns` ranks."""
            done, left = ray.wait(pending, num_returns=num_returns, timeout=timeout)
            for ref in done:
                try:
                    results[refs.index(ref)] = ray.get(ref)
                except RayError as error:
                    errors[refs.index(ref)] = error
            return left

        limit, begun = self._patience_s, time.monotonic()
        deadline = begun + _CALL * limit
        while pending and not errors and time.monotonic() < deadline:
            pending = take(1, max(0.0, deadline - time.monotonic()))
        if not pending and not errors:
            return [results[k] for k in range(len(refs))]
        if pending and errors:
            pending = take(len(pending), _GRACE_S)
        missing = [self._names[refs.index(ref)] for ref in pending]
        rank, error = min(errors.items(), key=lambda item: (_seriousness(item[1]), item[0]), default=(0, None))
        if error is None:
            failure: VerlMTError = _not_come(missing, self._names, doing, _CALL * limit)
        # A rank gave up waiting for another: torch.distributed has no exception of its own for that.
        elif missing and _seriousness(error) == 2 and "timed out" in str(error).lower():
            failure = _not_come(missing, self._names, doing, limit)
        else:
            failure = self._explain(rank, error, doing)
            if missing and how_it_ended(error) is not None and time.monotonic() > begun + limit:
                # With NCCL it is those who wait that end, by its watchdog, once their time is up.
                first, _, rest = str(failure).partition("\n")
                hang = f"or was it ended because it had waited too long? {' and '.join(missing)} did not answer"
                failure = WorkerError(f"{first}; {hang}\n{rest}")
        with self._order:
            if self._broken is not None:  # another call met the cause first, and ended the ranks under this one
                raise WorkerError(self._broken) from error
            self._broken = str(failure)
            # Not yet Ray itself: the rollout's thread still asks engines through it, and would end this process.
            self._end_processes()
        raise failure from error

    def _explain(self, rank: int, error: Exception, doing: str) -> VerlMTError:
        """An error of verl_mt as it is; anything else with the rank, its call and how to go on."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, VerlMTError):
            return error.cause
        name, total = self._names[rank], len(self._names)
        if (reason := how_it_ended(error)) is not None:
            why = "killed, or out of memory?"
            if isinstance(error, OutOfMemoryError):
                why = (
                    "its machine ran out of memory (fewer tokens at once by actor_rollout_ref.actor.ppo_max_token_len, "
                    "gradient checkpointing or fewer ranks on a machine need less):"
                )
            what = f"{name} of {total} died while {doing}; {why} {reason}"
        else:
            cause = error.cause if isinstance(error, RayTaskError) else error
            what = f"{name} of {total} failed while {doing}: {type(cause).__name__}: {cause}"
        return WorkerError(f"{what}\nThe same command goes on from the run's last checkpoint")


def _not_come(missing: Sequence[str], names: Sequence[str], doing: str, limit_s: float) -> WorkerError:
    """The error for ranks that neither answer nor fail."""
    who = "no rank answered within"
    if len(missing) < len(names):
        who = f"{' and '.join(missing)} of {len(names)} did not answer, and the others waited"
    return WorkerError(
        f"{who} {limit_s:g} s while {doing}: a machine or a connection that hangs? If a step really takes so "
        "long, raise trainer.worker_timeout_s\nThe same command goes on from the run's last checkpoint"
    )


def _failed(ref: Any) -> bool:
    """Of a call that is over. Waits for nothing."""
    try:
        ray.get(ref)
    except RayError:
        return True
    return False


def _seriousness(error: Exception) -> int:
    """0 = the cause, as a rule; higher = a consequence, such as a connection that the dead rank closed."""
    if how_it_ended(error) is not None:
        return 0
    return 1 if isinstance(error, RayTaskError) and isinstance(error.cause, VerlMTError) else 2


_FORWARDED = (
    "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "NCCL_", "GLOO_", "PYTORCH_", "OMP_", "MKL_", "ONEDNN_",
    "LRU_CACHE_CAPACITY", "VERL_MT_",
)  # fmt: skip
"""Beginnings of the names of environment variables that workers get from the process that starts them."""


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that workers get from this process: all that torch, transformers and verl_mt read.
    Others come from `ray start` or from the runtime environment of the job."""
    return {name: value for name, value in environment.items() if name.startswith(_FORWARDED)}


def rank_environment(rollout: RolloutConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a rank, and of an engine on Ray: those that both must have alike, then the forwarded ones."""
    return {**engines.rank_environment(rollout), **forwarded_environment(environment), **_OWN_GPUS_ALONE}


def with_engine_environment(options: dict[str, Any]) -> dict[str, Any]:
    """Of a Ray actor that holds an engine: SGLang's and vLLM's own settings, too, without the key of somebody's
    servers."""
    own = {name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "VLLM_"))}
    more = {name: value for name, value in own.items() if "KEY" not in name}
    return {**options, "runtime_env": {"env_vars": options["runtime_env"]["env_vars"] | more}}
