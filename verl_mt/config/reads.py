"""Who reads which key: every read of a section's field between start and end of a recording, by the reader's module.

Only while a recording is active do sections look at who asks; otherwise reading a key costs what it costs in any
dataclass. What this room reads itself (checks, YAML, copies) is no use of a key and does not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from verl_mt.config.knob import Section
from verl_mt.config.schema import Config, leaves

_NO_USE = ("verl_mt.config.", "dataclasses", "copy", "pprint")
_GIVEN = "_given_keys"

_active: list[KeyReads] = []


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


def given_keys(config: Config) -> frozenset[str]:
    """Keys that a command line, or a YAML file of the user's own, has set; empty for a config made in Python."""
    return vars(config).get(_GIVEN, frozenset())


def set_given(config: Config, keys: frozenset[str]) -> None:
    """Remember what was set, by whatever spelling; not part of the configuration."""
    vars(config)[_GIVEN] = keys


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
