"""Weights on their way to SGLang: checked against the model's own shapes, then packed into flattened buckets."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing as mp
from torch import Tensor

from verl_mt.errors import EngineError

_ALIGNMENT = 16
"""Bytes; no dtype needs more to be viewed in a buffer of bytes."""


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    num_bytes: int


def verify(tensors: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names and shapes with the model's own, before the first bucket leaves.

    SGLang is not asked about this: a wrong shape kills it, and an unknown name is ignored without a word.

    Raises:
        EngineError: an unknown name, a name that comes twice, a wrong shape, weights that are missing.
    """
    missing = dict(expected)
    for name, tensor in tensors:
        if name not in expected:
            raise EngineError(f"weight update: the model has no weight {name!r}; it has {_some(expected)}")
        if name not in missing:
            raise EngineError(f"weight update: {name!r} comes twice")
        if tuple(tensor.shape) != missing.pop(name):
            raise EngineError(
                f"weight update: {name!r} has shape {tuple(tensor.shape)}, the model's has {expected[name]}"
            )
    if missing:
        raise EngineError(f"weight update: {len(missing)} of {len(expected)} weights are missing: {_some(missing)}")


class Buckets:
    """Packs tensors into one buffer, again and again.

    The buffer is allocated once, in shared memory where it is on the CPU: the engine opens it by its handle and copies
    out of it. It holds its bytes until the next bucket is packed.

    Args:
        dtype: floating-point tensors are converted to it on the way, so that no byte is sent in vain.
    """

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0
        """Sent in the current update."""

    def pack(self, tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[tuple[Tensor, list[Entry]]]:
        """The filled part of the buffer, and what lies where. A bucket is overwritten when the next one is asked for.

        Args:
            tensors: any number; each stays as it is until its bucket was yielded.
            limit: bytes of a bucket; a tensor that is larger gets a bucket of its own.
        """
        self.num_bytes = 0
        group: list[tuple[Entry, Tensor]] = []
        size = 0
        for name, tensor in tensors:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            num_bytes = tensor.numel() * dtype.itemsize
            if group and size + num_bytes > limit:
                yield self._fill(group, size)
                group, size = [], 0
            group.append((Entry(name, tensor.shape, dtype, size, num_bytes), tensor))
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if group:
            yield self._fill(group, size)

    def _fill(self, group: list[tuple[Entry, Tensor]], size: int) -> tuple[Tensor, list[Entry]]:
        device = group[0][1].device
        if self._buffer.numel() < max(size, _ALIGNMENT) or self._buffer.device != device:
            self._buffer = _allocate(max(size, _ALIGNMENT), device)
        buffer = self._buffer[:size]
        with torch.no_grad():
            for entry, tensor in group:
                part = buffer[entry.start : entry.start + entry.num_bytes]
                part.view(entry.dtype).view(entry.shape).copy_(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.num_bytes += size
        return buffer, [entry for entry, _ in group]


def payload(buffer: Tensor, entries: list[Entry]) -> bytes:
    """What `update_weights_from_tensor` takes as a `flattened_bucket`: a handle to the buffer, not its bytes."""
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,
            start_idx=entry.start,
            end_idx=entry.start + entry.num_bytes,
            numel=entry.num_bytes,
        )
        for entry in entries
    ]
    stream = io.BytesIO()
    with _file_system_sharing():
        ForkingPickler(stream, 4).dump({"flattened_tensor": buffer, "metadata": metadata})
    return stream.getvalue()


def _allocate(size: int, device: torch.device) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        with _file_system_sharing():
            buffer.share_memory_()
    return buffer


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    """Shared memory by name. File descriptors, torch's default, only reach a process's own children."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        mp.set_sharing_strategy(before)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:3]) + (f", ... ({len(every)})" if len(every) > 3 else "")
