"""The schema as a flat table of dotted keys, read from the dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_mt.config.schema import Config


@dataclass(frozen=True)
class Leaf:
    """One key that holds a value."""

    key: str
    type: Any
    default: Any
    doc: str
    metadata: dict[str, Any]

    @property
    def is_open(self) -> bool:
        """It may hold a mapping with keys of the user's own."""
        return typing.get_origin(self.type) is dict or (self.type is Any and self.metadata.get("choices") is None)


@dataclass(frozen=True)
class SectionNode:
    """One key that holds further keys."""

    key: str
    cls: type
    doc: str


def _walk(cls: type, prefix: str) -> Iterator[Leaf | SectionNode]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        key, hint, doc = prefix + item.name, hints[item.name], item.metadata["doc"]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield SectionNode(key, hint, doc)
            yield from _walk(hint, key + ".")
        else:
            made = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
            yield Leaf(key, hint, made, doc, dict(item.metadata))


@functools.cache
def leaves() -> dict[str, Leaf]:
    """Dotted key -> leaf, in the order of the schema."""
    return {node.key: node for node in _walk(Config, "") if isinstance(node, Leaf)}


@functools.cache
def sections() -> dict[str, SectionNode]:
    """Dotted key -> section, in the order of the schema."""
    return {node.key: node for node in _walk(Config, "") if isinstance(node, SectionNode)}


def open_parent(key: str) -> Leaf | None:
    """The leaf with a free mapping that `key` lies under: `a.kwargs` for `a.kwargs.x`; None if there is none."""
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        leaf = leaves().get(".".join(parts[:end]))
        if leaf is not None:
            return leaf if leaf.is_open else None
    return None
