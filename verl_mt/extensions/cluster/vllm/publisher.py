"""Weights for vLLM engines: in files of /dev/shm on the same machine, else by a broadcast. Plain bytes, whatever torch
reads them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_mt.engines.base import Receiver
from verl_mt.errors import EngineError
from verl_mt.extensions.cluster.replicas import shared_memory
from verl_mt.extensions.cluster.replicas.broadcaster import WeightBroadcaster
from verl_mt.extensions.cluster.replicas.buckets import Bucket, Buckets
from verl_mt.extensions.cluster.replicas.publisher import MemoryPublisher


class FileBuckets(Buckets):
    """Buckets whose buffers have a path."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype):
        super().__init__(expected, dtype, device=torch.device("cpu"))
        self._paths: dict[int, str] = {}

    def path(self, buffer: Tensor) -> str:
        """Where another process opens this buffer."""
        return self._paths[buffer.data_ptr()]

    def _reserve(self, turn: int, size: int, device: torch.device) -> Tensor:
        if 0 < self._buffers[turn].numel() < size:
            # Engines have copied out of it. A file keeps its memory as long as it has a name or is mapped.
            os.unlink(self._paths.pop(self._buffers[turn].data_ptr()))
            self._buffers[turn] = torch.empty(0, dtype=torch.uint8)
        return super()._reserve(turn, size, device)

    def _allocate(self, size: int, device: torch.device) -> Tensor:
        path = Path("/dev/shm") / f"verl_mt_weights_{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            shared_memory.mark(path.name, os.getpid())
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            path.unlink()
            raise EngineError(
                f"weight update: {size / 2**20:.0f} MiB of shared memory in /dev/shm could not be had ({error}). Make "
                "/dev/shm larger, or lower actor_rollout_ref.rollout.update_weights_bucket_megabytes"
            ) from error
        finally:
            os.close(descriptor)
        buffer = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self._paths[buffer.data_ptr()] = str(path)
        return buffer


class FilePublisher(MemoryPublisher):
    """Each engine is told the path, and copies out of the file."""

    _buckets: FileBuckets

    def _make_buckets(
        self, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | None
    ) -> FileBuckets:
        return FileBuckets(expected, dtype)

    def _body(self, bucket: Bucket, receiver: Receiver) -> dict[str, Any]:
        return {"path": self._buckets.path(bucket.buffer), "entries": _entries(bucket)}


class Broadcaster(WeightBroadcaster):
    """By one broadcast to engines anywhere."""

    def _body(self, bucket: Bucket) -> dict[str, Any]:
        return {"entries": _entries(bucket)}


def _entries(bucket: Bucket) -> list[list[Any]]:
    """See `Weights` in `process.py`."""
    return [
        [entry.name, list(entry.shape), str(entry.dtype).removeprefix("torch."), entry.start]
        for entry in bucket.entries
    ]
