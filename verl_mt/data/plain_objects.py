"""Objects of a run as plain data, so that a file of it can be read without unpickling.

`torch.load(weights_only=True)` and `unpack` read tensors, numbers, texts and containers. `to_plain` turns everything
else that a run keeps into these: numpy arrays, images, dates, and the dataclasses in `_CLASSES`. `from_plain` turns it
back. A file can name no other class, so reading it runs no foreign code.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import io
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from verl_mt.data.dataset import DataRow
from verl_mt.data.ledger import TrajectoryRecord, TurnSpan
from verl_mt.data.media import MediaInput, from_wire, is_image, to_wire
from verl_mt.data.trajectory import Status, StopReason, TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.errors import DataError
from verl_mt.plugins import Registry

_KIND, _VALUE = "__kind__", "value"
_CLASSES: Registry[type] = Registry(
    "stored class",
    {
        cls.__qualname__: cls
        for cls in (
            DataRow, MediaInput, Status, StopReason, TimeSpan, Trajectory, TrajectoryGroup, TrajectoryRecord, TurnSpan
        )
    },
    group="verl_mt.stored_classes",
)  # fmt: skip
_TEXTS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (lambda d: (d.days, d.seconds, d.microseconds), lambda v: datetime.timedelta(*v)),
    decimal.Decimal: (str, decimal.Decimal),
}
"""Type -> how it is written and read: what cells of a parquet file are, besides numbers and texts."""
_TEXT_READERS = {cls.__name__: read for cls, (_, read) in _TEXTS.items()}
_PNG_MODES = {"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"}
_PLAIN = {type(None), bool, int, float, str, bytes}
_TEXT = {str}
_AS_IT_IS = (torch.Tensor, bytes)
_LONG = 64
"""Shortest list of numbers that becomes bytes: `weights_only=True` reads lists item by item."""
_NUMBERS = {int: "q", float: "d"}
"""How `struct` writes them."""


def to_plain(value: Any, at: str = "") -> Any:
    """Tensors, numbers, texts, bytes, dicts, lists and tuples only. Shares its tensors with `value`.

    Args:
        at: the place of `value` in what is written, for the error.

    Raises:
        DataError: an object that has no plain form; names its place and type.
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _AS_IT_IS):
        return value
    if kind is dict and _KIND not in value and set(map(type, value)) <= _TEXT:
        return _items(value, at)
    if isinstance(value, list):
        return _numbers(value) or [
            item if type(item) in _PLAIN else to_plain(item, f"{at}[{k}]") for k, item in enumerate(value)
        ]
    if kind is not dict and (name := kind.__qualname__) in _CLASSES and kind is _CLASSES[name]:
        if isinstance(value, enum.Enum):
            return {_KIND: name, _VALUE: value.value}
        return {_KIND: name, _VALUE: _items(vars(value), at)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | float) and not isinstance(value, np.generic):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        if _KIND not in value and all(isinstance(key, str) for key in value):
            return _items(value, at)
        pairs = [(to_plain(key, at), to_plain(item, f"{at}.{key}")) for key, item in value.items()]
        return {_KIND: "dict", _VALUE: pairs}
    if isinstance(value, tuple):
        return tuple(v if type(v) in _PLAIN else to_plain(v, f"{at}[{k}]") for k, v in enumerate(value))
    return _unlike_json(value, at)


def _unlike_json(value: Any, at: str) -> dict[str, Any]:
    """What is no JSON value in plain form."""
    kind = type(value)
    if isinstance(value, set | frozenset):
        return {_KIND: type(value).__name__, _VALUE: [to_plain(item, at) for item in value]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        array = np.array(value, dtype=value.dtype.newbyteorder("="))  # a copy, contiguous
        return {_KIND: "numpy", _VALUE: torch.from_numpy(array)}
    if is_image(value):
        if value.mode in _PNG_MODES:
            return {_KIND: "image", _VALUE: to_wire(value)}
        return {_KIND: "raw image", _VALUE: (value.mode, value.size, value.tobytes())}
    if kind in _TEXTS:
        return {_KIND: kind.__name__, _VALUE: _TEXTS[kind][0](value)}
    raise DataError(f"{at.lstrip('.') or 'the value'} is a {kind.__module__}.{kind.__qualname__}")


def _items(value: Mapping[str, Any], at: str) -> dict[str, Any]:
    return {
        key if type(key) is str else str(key): item if type(item) in _PLAIN else to_plain(item, f"{at}.{key}")
        for key, item in value.items()
    }


def from_plain(value: Any) -> Any:
    """Back from `to_plain`.

    Raises:
        DataError: not written by `to_plain`, or by a version that knows other classes.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: from_plain(item) for key, item in value.items()}
    kind = value[_KIND]
    try:
        return (_READERS[kind] if kind in _READERS else _object(kind))(value[_VALUE])
    except Exception as error:  # what somebody else has written shows as anything
        raise DataError(f"{kind!r} cannot be read: {type(error).__name__}: {error}") from error


def pack(value: Any) -> bytes:
    """A file's content: the SHA-256 of the rest, and `to_plain(value)` as a pickle that names no class.

    `torch.save` asks a Python function about each number and text, which takes several times as long.

    Raises:
        DataError: see `to_plain`.
    """
    stream = io.BytesIO()
    _Writer(stream, protocol=5).dump(to_plain(value))
    content = stream.getvalue()
    return hashlib.sha256(content).digest() + content


def unpack(content: bytes) -> Any:
    """Back from `pack`. Runs no code, whoever wrote it.

    Raises:
        DataError: damaged, of another version, or it names a class or a function.
    """
    digest, content = content[:32], content[32:]
    if hashlib.sha256(content).digest() != digest:
        raise DataError("it is damaged: its SHA-256 differs")
    return from_plain(_Reader(io.BytesIO(content)).load())


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1)
        numbers = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
        return _tensor, (str(value.dtype).removeprefix("torch."), tuple(value.shape), numbers)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_tensor.__module__, _tensor.__name__):
            return _tensor
        raise DataError(f"it names {module}.{name}: files of a run hold plain data only")


def _tensor(dtype: str, shape: tuple[int, ...], numbers: bytes) -> torch.Tensor:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise DataError(f"{dtype!r} is no type of numbers")
    return (
        torch.frombuffer(bytearray(numbers), dtype=found).reshape(shape) if numbers else torch.empty(shape, dtype=found)
    )


def _numbers(values: list[Any]) -> dict[str, Any] | None:
    """A long list of integers, or of floats, as bytes."""
    if len(values) < _LONG or (kind := type(values[0])) not in _NUMBERS or set(map(type, values)) != {kind}:
        return None
    try:
        return {_KIND: kind.__name__ + "s", _VALUE: struct.pack(f"<{len(values)}{_NUMBERS[kind]}", *values)}
    except struct.error:  # beyond 64 bits
        return None


def _unpacked(code: str) -> Callable[[bytes], list[Any]]:
    return lambda content: list(struct.unpack(f"<{len(content) // 8}{code}", content))


@functools.cache
def _object(name: str) -> Callable[[Any], Any]:
    cls = _CLASSES[name]
    if issubclass(cls, enum.Enum):
        return cls
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

    def read(attributes: dict[str, Any]) -> Any:
        plain = {name: from_plain(item) for name, item in attributes.items()}
        made = cls(**{name: item for name, item in plain.items() if name in names})
        for name in plain.keys() - names:  # a Sample may have further ones
            setattr(made, name, plain[name])
        return made

    return read


def _raw_image(value: tuple[str, tuple[int, int], bytes]) -> Any:
    from PIL import Image

    return Image.frombytes(*value)


_READERS: dict[str, Callable[[Any], Any]] = {
    **_TEXT_READERS,
    "dict": lambda pairs: {from_plain(key): from_plain(item) for key, item in pairs},
    "set": lambda items: set(from_plain(items)),
    "frozenset": lambda items: frozenset(from_plain(items)),
    "numpy": lambda tensor: tensor.numpy()[()],
    "ints": _unpacked(_NUMBERS[int]),
    "floats": _unpacked(_NUMBERS[float]),
    "numbers": lambda tensor: tensor.tolist(),  # as earlier versions wrote them
    "image": from_wire,
    "raw image": _raw_image,
}
