"""Weights on their way to an engine: checked against the model's own shapes, then packed into flattened buckets."""

from __future__ import annotations

import fcntl
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor

from verl_mt.errors import EngineError
from verl_mt.extensions.cluster.replicas import shared_memory

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


class WeightCheck:
    """Compares what comes with the model's own names and shapes.

    SGLang is not asked about this: a wrong shape kills it, and an unknown name is ignored without a word.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]]):
        self._expected = expected
        self._missing = dict(expected)

    def take(self, name: str, tensor: Tensor) -> None:
        """Raises:
        EngineError: an unknown name, a name that comes twice, a wrong shape.
        """
        if name not in self._expected:
            raise EngineError(f"weight update: the model has no weight {name!r}. It has {_some(self._expected)}")
        if name not in self._missing:
            raise EngineError(f"weight update: {name!r} comes twice")
        if tuple(tensor.shape) != self._missing.pop(name):
            raise EngineError(
                f"weight update: {name!r} has shape {tuple(tensor.shape)}, the model's has {self._expected[name]}"
            )

    def finish(self) -> None:
        """Raises:
        EngineError: weights are missing.
        """
        if self._missing:
            raise EngineError(
                f"weight update: {len(self._missing)} of {len(self._expected)} weights are missing: "
                f"{_some(self._missing)}"
            )


def verify(tensors: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check a whole update before any of it leaves.

    Raises:
        EngineError: see `WeightCheck`.
    """
    check = WeightCheck(expected)
    for name, tensor in tensors:
        check.take(name, tensor)
    check.finish()


class Bucket(NamedTuple):
    """A full buffer."""

    buffer: Tensor
    entries: list[Entry]
    is_last: bool


class Buckets:
    """Packs updates into a few buffers by turns, again and again, and checks them on the way.

    They are allocated once (others than the first only where an update is more than one bucket), in shared memory where
    they are on the CPU: the engine opens a buffer by its handle and copies out of it, while the other one is filled.

    Args:
        expected: name -> shape of all weights.
        dtype: floating-point tensors are converted to it on the way, so that no byte is sent in vain.
        dense: tensors lie without gaps, and a bucket has one dtype; for a broadcast, whose other side knows only names,
            shapes and dtypes.
        device: of the buffers; None = that of the tensors.
    """

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        dense: bool = False,
        device: torch.device | None = None,
    ):
        self._expected = expected
        self._dtype = dtype
        self._alignment = 1 if dense else _ALIGNMENT
        self._device = device
        self._total = sum(_aligned(math.prod(shape) * dtype.itemsize) for shape in expected.values())
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def pack(self, tensors: Iterable[tuple[str, Tensor]], limit: int, num_buffers: int = 2) -> Iterator[Bucket]:
        """Buckets, each of which holds until the next one but one is asked for.

        Args:
            tensors: each is copied before the next one is asked for.
            limit: bytes of a bucket; a tensor that is larger gets a bucket of its own.
            num_buffers: with n of them a bucket holds until the n-th after it is asked for.

        Raises:
            EngineError: see `WeightCheck`; what was yielded before may have been sent.
        """
        check = WeightCheck(self._expected)
        self._buffers += [torch.empty(0, dtype=torch.uint8)] * (num_buffers - len(self._buffers))
        entries: list[Entry] = []
        size = turn = 0
        capacity = max(_ALIGNMENT, min(limit, self._total))
        for name, tensor in tensors:
            check.take(name, tensor)
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            num_bytes = tensor.numel() * dtype.itemsize
            mixed = bool(entries) and self._alignment == 1 and entries[-1].dtype != dtype
            if entries and (mixed or size + num_bytes > capacity):
                yield self._full(turn, entries, size, is_last=False)
                entries, size, turn = [], 0, (turn + 1) % num_buffers
            buffer = self._reserve(turn, max(capacity, size + num_bytes), self._device or tensor.device)
            with torch.no_grad():
                buffer[size : size + num_bytes].view(dtype).view(tensor.shape).copy_(tensor)
            entries.append(Entry(name, tensor.shape, dtype, size, num_bytes))
            size += _aligned(num_bytes, self._alignment)
        check.finish()
        if entries:
            yield self._full(turn, entries, size, is_last=True)

    def close(self) -> None:
        """Give the buffers back. Idempotent."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        shared_memory.sweep(ending=os.getpid())

    def _reserve(self, turn: int, size: int, device: torch.device) -> Tensor:
        buffer = self._buffers[turn]
        if buffer.numel() < size or buffer.device != device:
            buffer = self._buffers[turn] = self._allocate(size, device)
        return buffer

    def _allocate(self, size: int, device: torch.device) -> Tensor:
        return _allocate(size, device)

    def _full(self, turn: int, entries: list[Entry], size: int, *, is_last: bool) -> Bucket:
        buffer = self._buffers[turn]
        if buffer.device.type == "cuda":
            torch.cuda.synchronize(buffer.device)
        return Bucket(buffer[:size], entries, is_last)


def describe(entries: list[Entry]) -> dict[str, list[Any]]:
    """What lies in a dense bucket, as `update_weights_from_distributed` takes it."""
    return {
        "names": [entry.name for entry in entries],
        "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in entries],
        "shapes": [list(entry.shape) for entry in entries],
    }


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
    if device.type != "cpu":
        with _whole_segments():
            return _empty_on(size, device)
    with _file_system_sharing(), _standard_error_of_our_own():
        # Not share_memory_(), which would copy, and so touch, every page of it.
        storage = torch.UntypedStorage._new_shared(size)
        shared_memory.mark(storage._share_filename_cpu_()[1].decode().lstrip("/"), os.getpid())
        return torch.tensor([], dtype=torch.uint8).set_(storage)


def _empty_on(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def _whole_segments() -> Iterator[None]:
    """Memory of expandable segments has no handle that another process could open (CUDA IPC)."""
    named = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" not in named.lower().replace(" ", ""):
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def _aligned(size: int, alignment: int = _ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    """Shared memory by name. File descriptors, torch's default, only reach a process's own children."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        mp.set_sharing_strategy(before)


@contextmanager
def _standard_error_of_our_own() -> Iterator[None]:
    """With the first shared memory torch starts a process that lives until the last one that opened it has ended. That
    may be a server which outlives us: whoever reads our output would wait for its end, too."""
    try:
        flags = fcntl.fcntl(2, fcntl.F_GETFD)
    except OSError:  # closed
        yield
        return
    fcntl.fcntl(2, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
    try:
        yield
    finally:
        fcntl.fcntl(2, fcntl.F_SETFD, flags)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:3]) + (f", ... ({len(every)})" if len(every) > 3 else "")
