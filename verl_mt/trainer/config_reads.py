"""Who reads which key: `config_reads.json` of the run directory has, for every key that means something in the run, the
modules that read it while the run was put together, or when it will be read.

Every read of a section's field between start and end of a recording is noted, by the reader's module. Only while a
recording is active do sections look at who asks; otherwise reading a key costs what it costs in any dataclass. What the
room `config` reads itself (checks, YAML, copies) is no use of a key and does not count. The file says who could have
noticed a value, not that the value made a difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from verl_mt.config.checks import means_nothing
from verl_mt.config.declare import Section
from verl_mt.config.schema import Config, leaves
from verl_mt.data.run_files import atomic_file, writing

FILE = "config_reads.json"
T = TypeVar("T")

_NO_USE = ("verl_mt.config.", "dataclasses", "copy", "pprint")

_LATER = {"start": "another process", "step": "every step", "validation": "every validation"}
"""Who reads a key that nobody has read in this process at the start."""

_active: list[KeyReads] = []
_current: ContextVar[KeyReads | None] = ContextVar("verl_mt_key_reads", default=None)


class KeyReads:
    """Dotted key -> the modules that read it.

    Args:
        config: its sections are watched; a copy of it is not.
    """

    def __init__(self, config: Config):
        self.config = config
        self._prefixes = dict(_prefixes(config, ""))
        self._found: dict[str, set[str]] = {key: set() for key in leaves()}

    def __getitem__(self, key: str) -> list[str]:
        return sorted(self._found[key])

    def note(self, section: Section, name: str, reader: str) -> None:
        prefix = self._prefixes.get(id(section))
        if prefix is not None and not reader.startswith(_NO_USE):
            readers = self._found.get(prefix + name)
            if readers is not None:
                readers.add(reader)


@contextlib.contextmanager
def recording(config: Config) -> Iterator[KeyReads]:
    """Records the reads of all threads of this process."""
    reads = KeyReads(config)
    _active.append(reads)
    Section.__getattribute__ = _watched  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        _active.remove(reads)
        if not _active:
            del Section.__getattribute__


def reads_recorded(start: Callable[..., T]) -> Callable[..., T]:
    """Decorates what puts a run together from its config, the first argument."""

    @functools.wraps(start)
    def recorded(config: Config, *args: Any, **kwargs: Any) -> T:
        with recording(config) as reads:
            token = _current.set(reads)
            try:
                return start(config, *args, **kwargs)
            finally:
                _current.reset(token)

    return recorded


def write_reads(folder: Path) -> None:
    """`config_reads.json`, at the end of a start."""
    reads = _current.get()
    assert reads is not None, "the start is recorded"
    with writing(folder / FILE), atomic_file(folder / FILE) as file:
        file.write(json.dumps(readers(reads), indent=1).encode() + b"\n")


def readers(reads: KeyReads) -> dict[str, list[str]]:
    """Key -> who has read it, or will; empty for what means nothing in this configuration, whoever looks at it."""
    idle = means_nothing(reads.config)
    return {key: [] if key in idle else reads[key] or [_LATER[leaf.read]] for key, leaf in leaves().items()}


def _watched(section: Section, name: str) -> Any:
    if not name.startswith("_"):
        frame: FrameType | None = sys._getframe(1)
        # From inside a property of the section: who asks for the property reads the keys behind it.
        while frame is not None and (frame.f_locals.get("self") is section or frame.f_code is _watched.__code__):
            frame = frame.f_back
        reader = "" if frame is None else frame.f_globals.get("__name__", "")
        for reads in _active:
            reads.note(section, name, reader)
    return object.__getattribute__(section, name)


def _prefixes(section: Section, prefix: str) -> Iterator[tuple[int, str]]:
    yield id(section), prefix
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if isinstance(value, Section):
            yield from _prefixes(value, f"{prefix}{item.name}.")
