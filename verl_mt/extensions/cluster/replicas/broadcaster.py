"""Publish a policy's weights to engines anywhere, by one broadcast to all of them.

A publisher runs in the process that holds the weights: a rank's, or this one if the policy is here. It waits for
answers, so it never runs on an event loop.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mt.engines.base import Receiver, WeightPublisher
from verl_mt.errors import EngineGoneError, VerlMTError, error_text
from verl_mt.extensions.cluster.replicas.buckets import Bucket, Buckets, describe
from verl_mt.extensions.cluster.replicas.publisher import failures

_LEAVE_S = 10.0
_TOGETHER_S = 120.0
"""How long joining, and the broadcast of one bucket, may take; a member that refuses its part is noticed then."""
NCCL_ALIKE = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Where the user has not set them. A broadcast between processes that differ in these may hang or crash. SGLang sets
these values for itself."""


class WeightBroadcaster(WeightPublisher):
    """Over the network: one process group of this process and all engines, in which each byte reaches each engine once
    (gloo passes it on along a tree, NCCL from GPU to GPU).

    Args: those of `MemoryPublisher`, without `through_host`; `address` is where the engines' machines reach this one.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], dtype: str, timeout_s: float, *, address: str):
        self._expected, self._dtype = expected, getattr(torch, dtype)
        self._timeout_s, self._together_s = timeout_s, min(timeout_s, _TOGETHER_S)
        self._address = address
        self._members: list[Receiver] = []
        self._buckets = Buckets(expected, self._dtype, dense=True)
        self._group: Any = None
        self._name = ""

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, receivers: Sequence[Receiver]
    ) -> list[VerlMTError | None]:
        """Send all of them to all engines, which are in a weight update already, and stay in it. An engine that goes
        away breaks the broadcast off for all.

        Runs in a thread of the trainer or in the main thread of a rank. Waits for the broadcasts and for the engines,
        each in a thread.

        Raises:
            EngineError: a tensor that does not fit the model.
        """
        with ThreadPoolExecutor(len(receivers)) as threads:
            try:
                if self._members != list(receivers):
                    self._join(threads, list(receivers))
                asked: dict[Receiver, Future[None]] = {}
                for bucket in self._buckets.pack(tensors, bucket_bytes):
                    # The engines have loaded the last bucket while this one was packed.
                    _raise_broken(asked, None)
                    body = self._body(bucket) | ({"weight_version": str(version)} if bucket.is_last else {})
                    asked = self._ask(threads, "update_weights_from_distributed", dict.fromkeys(receivers, body))
                    self._do_here(asked, partial(self._broadcast, bucket.buffer))
                _raise_broken(asked, None)
            except _BrokenOffError as broken:
                self._leave(threads, _LEAVE_S)
                return [broken.problems[receiver] for receiver in receivers]
        return [None] * len(receivers)

    def _body(self, bucket: Bucket) -> dict[str, Any]:
        """What tells an engine which tensors the next broadcast holds."""
        named = {**describe(bucket.entries), "group_name": self._name}
        return named | {"load_format": "flattened_bucket", "flush_cache": bucket.is_last}

    def _broadcast(self, buffer: Tensor) -> None:
        """Waits for all engines of the group."""
        self._group.broadcast(buffer, 0).wait()
        if buffer.device.type == "cuda":
            torch.cuda.synchronize(buffer.device)

    def _join(self, threads: ThreadPoolExecutor, receivers: list[Receiver]) -> None:
        """Waits for all engines to join the group."""
        self._leave(threads, self._timeout_s)
        on_gpu = torch.cuda.is_available() and all(receiver.on_gpu for receiver in receivers)
        backend = "nccl" if on_gpu else "gloo"
        if on_gpu:  # a rank has them from its start; in the trainer's own process this is NCCL's first group
            os.environ.update({**NCCL_ALIKE, **os.environ})
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._buckets = Buckets(self._expected, self._dtype, dense=True, device=device)
        store, self._name = _open_store(self._address, self._together_s), f"verl_mt-{uuid.uuid4().hex}"
        world, bodies = 1, {}
        for receiver in receivers:
            bodies[receiver] = {
                "master_address": self._address,
                "master_port": store.port,
                "rank_offset": world,
                "group_name": self._name,
                "backend": backend,
            }
            world += receiver.num_ranks
        bodies = {receiver: {**body, "world_size": world} for receiver, body in bodies.items()}

        def join() -> None:
            self._group = _join_as_first(store, self._name, world, backend, self._together_s)

        asked = self._ask(threads, "init_weights_update_group", bodies)
        self._members = receivers
        self._do_here(asked, join)
        _raise_broken(asked, None)

    def _leave(self, threads: ThreadPoolExecutor, timeout_s: float) -> None:
        """Engines that are still there forget the group; so does this process. Waits for the engines, at most
        `timeout_s`."""
        body = {"group_name": self._name}
        asked = [
            threads.submit(receiver.call, "destroy_weights_update_group", body, timeout_s) for receiver in self._members
        ]
        for future in asked:
            with contextlib.suppress(VerlMTError):
                future.result()
        group, self._group, self._members = self._group, None, []
        if group is not None:
            dist.destroy_process_group(group)

    def close(self) -> None:
        """Leave the group, and give the buffers back. Idempotent. Waits for the engines, at most `_LEAVE_S`."""
        if self._members:
            with ThreadPoolExecutor(len(self._members)) as threads:
                self._leave(threads, _LEAVE_S)
        self._buckets.close()

    def _ask(
        self, threads: ThreadPoolExecutor, name: str, bodies: Mapping[Receiver, dict[str, Any]]
    ) -> dict[Receiver, Future[None]]:
        """Waits for nothing: each engine is asked in a thread."""
        return {
            receiver: threads.submit(receiver.call, name, body, self._timeout_s) for receiver, body in bodies.items()
        }

    @staticmethod
    def _do_here(asked: Mapping[Receiver, Future[None]], part: Callable[[], None]) -> None:
        """This process's part of what all are asked to do.

        Raises:
            _BrokenOffError: it failed.
        """
        try:
            part()
        except RuntimeError as error:  # as torch.distributed raises where a member is gone
            _raise_broken(asked, error_text(error))


class _BrokenOffError(Exception):
    """What went wrong with each engine."""

    def __init__(self, problems: Mapping[Receiver, VerlMTError]):
        super().__init__(problems)
        self.problems = problems


def _raise_broken(asked: Mapping[Receiver, Future[None]], here: str | None) -> None:
    """Wait for the answers; if one is an error, or this process (`here`) had one, it is broken off for all.

    Raises:
        _BrokenOffError: it is.
    """
    told = failures(asked)
    if here is None and not told:
        return
    reason = here or error_text(next(iter(told.values())))
    raise _BrokenOffError({r: told.get(r, EngineGoneError(f"a broadcast broke off: {reason}")) for r in asked})


# A process group of a sender (rank 0) and engines, beside those that either side has already.


def _open_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Where the members meet; the port is taken here, and the others are told which one it is. Waits for nothing.

    Args:
        address: of this machine, as the others reach it.
        timeout_s: of waiting for them.
    """
    return dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _join_as_first(store: dist.Store, name: Any, world_size: int, backend: str, timeout_s: float) -> Any:
    """The group, once all others have joined it; this process is its rank 0.

    Waits for the other members, at most `timeout_s`.

    Args:
        backend: `gloo`, or `nccl` where both sides have GPUs.
        timeout_s: of joining, and of each collective.
    """
    # torch makes groups only within a default group, which engines have no part in; what it has for this is private.
    # Engines do the same on their side, with the same names in the store.
    group, _ = dist.distributed_c10d._new_process_group_helper(
        world_size,
        0,
        [],
        dist.distributed_c10d.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=timeout_s),
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
