"""Registries as ms-swift shows them to its plug-ins: plain dicts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

from verl_mt.plugins import Registry, identity

T = TypeVar("T")

log = logging.getLogger(__name__)


class ReplacingNames(MutableMapping[str, T]):
    """`names['mine'] = C` registers, and takes the place of what had that name before, which is logged."""

    def __init__(self, registry: Registry[T]):
        self.registry = registry

    def __getitem__(self, name: str) -> T:
        return self.registry[name]

    def __setitem__(self, name: str, value: T) -> None:
        old = self.registry.pop(name, value)
        if identity(old) != identity(value):
            log.warning("%s %r: %s takes the place of %s", self.registry.kind, name, identity(value), identity(old))
        self.registry[name] = value

    def __delitem__(self, name: str) -> None:
        del self.registry[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.registry)

    def __len__(self) -> int:
        return len(self.registry)
