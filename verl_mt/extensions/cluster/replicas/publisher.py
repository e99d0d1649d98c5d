"""Publish a policy's weights to engines on the same machine, through its memory.

A publisher runs in the process that holds the weights: a rank's, or this one if the policy is here. It waits for
answers, so it never runs on an event loop.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from verl_mt.engines.base import Receiver, WeightPublisher
from verl_mt.errors import EngineError, VerlMTError, error_text
from verl_mt.extensions.cluster.replicas.buckets import Bucket, Buckets


class MemoryPublisher(WeightPublisher):
    """Through the memory of this machine: a handle of the buffer goes to each engine, which copies out of it.

    Its buffers are used for every update. See `FromRanks`.

    Args:
        expected: name -> shape of all weights.
        dtype: torch's name of the engines'.
        timeout_s: deadline of each call of an engine.
        through_host: the buffers lie in main memory, also where weights and engines are on a GPU.
        address: of this machine; the engines are on it.
    """

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]],
        dtype: str,
        timeout_s: float,
        through_host: bool = False,
        *,
        address: str,
    ):
        device = torch.device("cpu") if through_host else None
        self._buckets = self._make_buckets(expected, getattr(torch, dtype), device)
        self._timeout_s = timeout_s

    def _make_buckets(
        self, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | None
    ) -> Buckets:
        return Buckets(expected, dtype, device=device)

    @abc.abstractmethod
    def _body(self, bucket: Bucket, receiver: Receiver) -> dict[str, Any]:
        """What tells this engine where the bucket lies."""

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, receivers: Sequence[Receiver]
    ) -> list[VerlMTError | None]:
        """Send all of them to all engines, which are in a weight update already, and stay in it. One that goes away, or
        refuses, is left out from then on.

        Runs in a thread of the trainer or in the main thread of a rank. Waits for the engines, each in a thread.

        Raises:
            EngineError: a tensor that does not fit the model.
        """
        problems: dict[Receiver, VerlMTError] = {}
        asked: dict[Receiver, Future[None]] = {}
        with ThreadPoolExecutor(len(receivers)) as threads:
            # One rank of several may still copy on its GPU when the engine has answered; not when it answers again.
            several = any(receiver.num_ranks > 1 and receiver.on_gpu for receiver in receivers)
            for bucket in self._buckets.pack(tensors, bucket_bytes, num_buffers=3 if several else 2):
                # The engines have copied the last bucket while this one was packed; its buffer is written next.
                problems |= failures(asked)
                if len(problems) == len(receivers):
                    break
                asked = {}
                for receiver in receivers:
                    if receiver not in problems:
                        own = self._body(bucket, receiver)
                        if bucket.is_last:
                            own["weight_version"] = str(version)
                        asked[receiver] = threads.submit(
                            receiver.call, "update_weights_from_tensor", own, self._timeout_s
                        )
            problems |= failures(asked)
        return [problems.get(receiver) for receiver in receivers]

    def close(self) -> None:
        """Give the buffers back. Idempotent."""
        self._buckets.close()


def failures(asked: Mapping[Receiver, Future[None]]) -> dict[Receiver, VerlMTError]:
    """Of those that were asked, what those answered that failed."""
    told = {receiver: future.exception() for receiver, future in asked.items()}
    return {
        receiver: error if isinstance(error, VerlMTError) else EngineError(error_text(error, named=True))
        for receiver, error in told.items()
        if isinstance(error, Exception)
    }
