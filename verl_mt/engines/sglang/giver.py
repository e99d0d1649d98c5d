"""What a rank of the worker group does to give its weights to engines: to the one beside it through this machine's
memory, or to all that stand elsewhere by one broadcast."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mt.engines.sglang.buckets import Buckets, describe, payload
from verl_mt.engines.sglang.weight_group import join_as_first, open_store
from verl_mt.errors import EngineError, EngineGoneError, VerlMTError, error_text

Call = Callable[..., Any]
_SLACK_S = 10.0
_LEAVE_S = 10.0


class WeightGiver:
    """Lives in the rank's process; its buffer is used for every update. See `FromRanks`.

    Args:
        expected: name -> shape of all weights.
        dtype: torch's name of the engine's.
        num_ranks: of the engine; each opens the buffer.
        timeout_s: deadline of each call of the engine.
        address: of this machine; the engine is on it.
    """

    def __init__(
        self, expected: Mapping[str, tuple[int, ...]], dtype: str, num_ranks: int, timeout_s: float, *, address: str
    ):
        self._buckets = Buckets(expected, getattr(torch, dtype))
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s

    def give(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, calls: Sequence[Call]
    ) -> list[VerlMTError | None]:
        """Send all of them; the engine is in a weight update already, and stays in it.

        Raises:
            EngineError: a tensor that does not fit the model, or the engine refused, or is gone.
        """
        (call,) = calls
        for bucket in self._buckets.pack(tensors, bucket_bytes):
            # Each is opened once: a handle that several ranks share would be gone with the first of them.
            payloads = [payload(bucket.buffer, bucket.entries) for _ in range(self._num_ranks)]
            body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket"}
            body |= _progress(version, bucket.is_last)
            # The engine's own deadline is there; this one is for a process that does not answer any more.
            call("call", "update_weights_from_tensor", body, self._timeout_s, timeout_s=self._timeout_s + _SLACK_S)
        return [None]


class WeightBroadcaster:
    """Lives in rank 0's process: one process group of this rank and all engines, in which each byte is sent once.

    Args: those of `WeightGiver`; `address` is where the engines' machines reach this one.
    """

    def __init__(
        self, expected: Mapping[str, tuple[int, ...]], dtype: str, num_ranks: int, timeout_s: float, *, address: str
    ):
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._backend = "nccl" if on_gpu else "gloo"
        self._buckets = Buckets(expected, getattr(torch, dtype), dense=True, device=device)
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._address = address
        self._members: list[Call] = []
        self._group: Any = None
        self._name = ""

    def give(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, calls: Sequence[Call]
    ) -> list[VerlMTError | None]:
        """Send all of them to all engines, which are in a weight update already, and stay in it. An engine that goes
        away breaks the broadcast off for all.

        Raises:
            EngineError: a tensor that does not fit the model.
        """
        with ThreadPoolExecutor(len(calls)) as threads:
            try:
                if self._members != list(calls):
                    self._join(threads, list(calls))
                for bucket in self._buckets.pack(tensors, bucket_bytes):
                    body = {**describe(bucket.entries), "group_name": self._name, "load_format": "flattened_bucket"}
                    body |= _progress(version, bucket.is_last)
                    with self._asked(threads, calls, "update_weights_from_distributed", [body] * len(calls)):
                        self._group.broadcast(bucket.buffer, 0).wait()
                        if bucket.buffer.device.type == "cuda":
                            torch.cuda.synchronize(bucket.buffer.device)
            except _BrokenOffError as broken:
                self._leave(threads)
                return broken.problems
        return [None] * len(calls)

    def _join(self, threads: ThreadPoolExecutor, calls: list[Call]) -> None:
        self._leave(threads)
        store, self._name = open_store(self._address, self._timeout_s), f"verl_mt-{uuid.uuid4().hex}"
        world = 1 + self._num_ranks * len(calls)
        bodies = [
            {
                "master_address": self._address,
                "master_port": store.port,
                "rank_offset": 1 + number * self._num_ranks,
                "world_size": world,
                "group_name": self._name,
                "backend": self._backend,
            }
            for number in range(len(calls))
        ]
        with self._asked(threads, calls, "init_weights_update_group", bodies):
            self._group = join_as_first(store, self._name, world, self._backend, self._timeout_s)
        self._members = calls

    def _leave(self, threads: ThreadPoolExecutor) -> None:
        """Engines that are still there forget the group; so does this process."""
        body = {"group_name": self._name}
        asked = [
            threads.submit(c, "call", "destroy_weights_update_group", body, _LEAVE_S, timeout_s=_LEAVE_S + _SLACK_S)
            for c in self._members
        ]
        for future in asked:
            with contextlib.suppress(VerlMTError):
                future.result()
        group, self._group, self._members = self._group, None, []
        if group is not None:
            dist.destroy_process_group(group)

    @contextlib.contextmanager
    def _asked(
        self, threads: ThreadPoolExecutor, calls: Sequence[Call], name: str, bodies: Sequence[dict[str, Any]]
    ) -> Iterator[None]:
        """All engines are asked, and meanwhile this process does its part.

        Raises:
            _BrokenOffError: what went wrong with each.
        """
        deadline = self._timeout_s + _SLACK_S
        asked: list[Future[Any]] = [
            threads.submit(call, "call", name, body, self._timeout_s, timeout_s=deadline)
            for call, body in zip(calls, bodies, strict=True)
        ]
        here: str | None = None
        try:
            yield
        except RuntimeError as error:  # as torch.distributed raises where a member is gone
            here = error_text(error)
        told = [future.exception() for future in asked]
        if here is None and not any(told):
            return
        reason = here or next(error_text(error) for error in told if error is not None)
        raise _BrokenOffError(
            [e if isinstance(e, EngineError) else EngineGoneError(f"a broadcast broke off: {reason}") for e in told]
        )


class _BrokenOffError(Exception):
    def __init__(self, problems: list[VerlMTError | None]):
        super().__init__(problems)
        self.problems = problems


def _progress(version: int, is_last: bool) -> dict[str, Any]:
    return {"flush_cache": is_last} | ({"weight_version": str(version)} if is_last else {})
