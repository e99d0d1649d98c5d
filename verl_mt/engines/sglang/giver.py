"""What a rank of the worker group does to give its weights to the engine beside it: through this machine's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_mt.engines.sglang.buckets import Buckets, payload

_SLACK_S = 10.0


class WeightGiver:
    """Lives in the rank's process; its buffer is used for every update. See `FromRanks`.

    Args:
        expected: name -> shape of all weights.
        dtype: torch's name of the engine's.
        num_ranks: of the engine; each opens the buffer.
        timeout_s: deadline of each call of the engine.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], dtype: str, num_ranks: int, timeout_s: float):
        self._buckets = Buckets(expected, getattr(torch, dtype))
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s

    def give(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, call: Callable[..., Any]
    ) -> None:
        """Send all of them; the engine is in a weight update already, and stays in it.

        Raises:
            EngineError: a tensor that does not fit the model, or the engine refused, or is gone.
        """
        for bucket in self._buckets.pack(tensors, bucket_bytes):
            # Each is opened once: a handle that several ranks share would be gone with the first of them.
            payloads = [payload(bucket.buffer, bucket.entries) for _ in range(self._num_ranks)]
            body: dict[str, Any] = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket"}
            body["flush_cache"] = bucket.is_last
            if bucket.is_last:
                body["weight_version"] = str(version)
            # The engine's own deadline is there; this one is for a process that does not answer any more.
            call("call", "update_weights_from_tensor", body, self._timeout_s, timeout_s=self._timeout_s + _SLACK_S)
