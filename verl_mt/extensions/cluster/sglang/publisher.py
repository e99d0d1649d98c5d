"""Handles of buffers for SGLang engines on the same machine."""

from __future__ import annotations

from typing import Any

from verl_mt.engines.base import Receiver
from verl_mt.extensions.cluster.replicas.buckets import Bucket, payload
from verl_mt.extensions.cluster.replicas.publisher import MemoryPublisher


class BucketPublisher(MemoryPublisher):
    """A handle of the buffer goes to each engine, which copies out of it."""

    def _body(self, bucket: Bucket, receiver: Receiver) -> dict[str, Any]:
        # Each is opened once: a handle that several ranks share would be gone with the first of them.
        payloads = [payload(bucket.buffer, bucket.entries) for _ in range(receiver.num_ranks)]
        return {
            "load_format": "flattened_bucket",
            "flush_cache": bucket.is_last,
            "serialized_named_tensors": payloads,
        }
