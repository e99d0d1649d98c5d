"""Checkpoints of which every rank writes and reads its own part, in PyTorch's distributed checkpoint format."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from verl_mt.data.digests import HashingFile
from verl_mt.data.run_files import disk_refused
from verl_mt.errors import CheckpointError
from verl_mt.modeling.lora import lora_of, require_same
from verl_mt.workers.state import copy_into, is_master, is_weight, live_tensors, master_of

SHARDS = "actor"
"""Where in a checkpoint's folder the actor's shards are; the critic's are in `critic`."""

_FORMAT = "torch.distributed.checkpoint.metadata"
_METADATA = {
    *(
        (_FORMAT, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}  # fmt: skip
"""What `.metadata` names: module and name."""


class _Hashing(FileSystem):
    """The disk; keeps the digests of the files that this rank writes."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            file = HashingFile(stream)  # type: ignore[arg-type]
            try:
                yield file
            finally:
                self.error = file.error or self.error
        self.digests[Path(path).name] = file.digest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Reader(FileSystemReader):
    """PyTorch's, which unpickles `.metadata` whatever it names: this one takes only classes of that format."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f".metadata holds a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint does")


def save_shards(tensors: Mapping[str, Tensor], folder: Path, name: str = SHARDS) -> dict[str, str]:
    """Write them under a checkpoint's folder, flushed to disk; collective. Every rank must see the same folder.

    Args:
        tensors: live ones, shards where sharded.
        folder: the checkpoint's.
        name: of the worker that they belong to; its part of the folder.

    Returns:
        Of each file that this rank wrote its name below `folder` and its digest.

    Raises:
        CheckpointError: the disk refused.
    """
    writer = FileSystemWriter(folder / name, sync_files=True)
    writer.fs = disk = _Hashing()
    try:
        with _quiet_alone() as alone:
            dcp.save(dict(tensors), storage_writer=writer, no_dist=alone)
    except (CheckpointException, OSError) as error:
        if disk.error is not None:
            raise CheckpointError(disk_refused(folder / name, disk.error)) from error
        raise CheckpointError(f"cannot write {folder / name}: {_cause(error)}") from error
    return {f"{name}/{file}": digest for file, digest in disk.digests.items()}


def has_shards(folder: Path, name: str = SHARDS) -> bool:
    """Whether shards were written there, by all ranks."""
    return (folder / name / ".metadata").is_file()


def load_shards(tensors: Mapping[str, Tensor], folder: Path | None, name: str = SHARDS) -> None:
    """Read into these tensors, in place; collective. Any number of ranks may have written them. Weights or masters
    may be read without the rest.

    Raises:
        CheckpointError: no shards there, a part is missing, or they are of another model.
    """
    shapes = stored_shapes(folder, name)
    for kind in (is_weight, is_master):
        if all(map(kind, tensors)):
            shapes = {tensor: shape for tensor, shape in shapes.items() if kind(tensor)}
    differing = sorted(tensors.keys() ^ shapes.keys()) or [n for n in tensors if tensors[n].shape != shapes[n]]
    if differing:
        raise CheckpointError(
            f"{folder} is of another model: {len(differing)} tensors differ, among them {differing[0]}. Resume with "
            "the actor_rollout_ref.model.path that the run was started with"
        )
    assert folder is not None
    try:
        with _quiet_alone() as alone:
            dcp.load(dict(tensors), storage_reader=_Reader(folder / name), no_dist=alone)
    except (CheckpointException, Exception) as error:  # a missing or torn file shows as anything
        raise CheckpointError(
            f"{folder / name} cannot be read: {_cause(error)}. Delete this checkpoint to resume from an older one"
        ) from error


def stored_shapes(folder: Path | None, name: str = SHARDS) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what `save_shards` wrote.

    Raises:
        CheckpointError: no shards there.
    """
    if folder is None or not has_shards(folder, name):
        raise CheckpointError(
            f"{folder}: no shards of the {name} ({name}/.metadata). Is the checkpoint folder on a disk that all "
            "machines share?"
        )
    try:
        stored = _Reader(folder / name).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged file shows as anything
        raise CheckpointError(f"{folder / name / '.metadata'} cannot be read: {_cause(error)}") from error
    return {tensor: tuple(entry.size) for tensor, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def load_weights(module: nn.Module, state: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint's weights into a whole module, in place; whatever placement wrote it. A module in float32 gets
    the exact weights of what was trained in a lower precision.

    Args:
        module: a Hugging Face model of the checkpoint's architecture, with adapters if that has some.
        state: the `state_dict` of the worker group that wrote it.
        folder: the checkpoint.

    Raises:
        CheckpointError: of another model, or incomplete.
    """
    require_same(state["actor"].get("lora"), lora_of(module))
    live, saved = live_tensors(module), state["actor"].get("tensors")
    there = stored_shapes(folder) if saved is None else saved
    exact = {master_of(name): tensor for name, tensor in live.items() if tensor.dtype == torch.float32}
    exact = {name: tensor for name, tensor in exact.items() if name in there}  # none before the first update
    for part, kind in ((live, is_weight), (exact, is_master)):
        if part and saved is None:
            load_shards(part, folder)
        elif part:
            copy_into(part, {name: tensor for name, tensor in saved.items() if kind(name)})


@contextmanager
def _quiet_alone() -> Iterator[bool]:
    """Whether this process is the only one; torch warns of that, and here it is no accident."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not (dist.is_available() and dist.is_initialized())


def _cause(error: BaseException) -> str:
    """One line. torch wraps what happened on each rank, tracebacks included."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {error}"
