"""Documented import paths of modules that live in an extension: `import verl_mt.rollout.scheduler` keeps working.

Each is one line of the group `verl_mt.import_paths` in `extensions/entry_points.txt`: documented path = real path. A
package's line holds for the modules in it too. Both names are the same module object. Single names, such as
`verl_mt.MultiTurnScheduler`, are lines of the group `verl_mt.import_names`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

TABLE = Path(__file__).with_name("extensions") / "entry_points.txt"
_PACKAGE = __name__.partition(".")[0] + "."


@functools.cache
def read_table() -> dict[str, dict[str, str]]:
    """Group -> name -> path, or `path [extra]`: the library's own entry points. Empty where its extensions are missing.

    Own code and not `configparser`, since it runs while the first module of the package is found.
    """
    if not TABLE.is_file():
        return {}
    table: dict[str, dict[str, str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            group = table.setdefault(line.strip("[] "), {})
        elif line.strip():
            name, _, path = line.partition("=")
            group[name.strip()] = path.strip()
    return table


class _Loader:
    """Loads a module under a second name."""

    def __init__(self, real: ModuleSpec):
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._real.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._real  # the import system has just put the second name's there

    def is_package(self, fullname: str) -> bool:
        return self._real.submodule_search_locations is not None

    def get_source(self, fullname: str) -> str | None:
        loader: Any = self._real.loader
        source: str | None = loader.get_source(self._real.name)
        return source

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`, which runs the code itself."""
        loader: Any = self._real.loader
        code: CodeType | None = loader.get_code(self._real.name)
        return code


def moved_names(module: str) -> list[str]:
    """Documented names of a module of the core whose objects live in an extension."""
    paths = read_table().get("verl_mt.import_names", {})
    return [path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == module]


def moved_name(module: str, name: str) -> Any:
    """One of them, for the module's `__getattr__`.

    Raises:
        AttributeError: it is none.
    """
    path = read_table().get("verl_mt.import_names", {}).get(f"{module}.{name}")
    if path is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, attribute = path.partition(":")
    return getattr(import_module(home), attribute)


class MovedModules:
    """Finds the real module of a documented path."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(_PACKAGE):
            return None
        moved = real_path(name)
        real = find_spec(moved) if moved is not None else None
        if real is None:
            return None
        loader: Any = _Loader(real)
        spec = ModuleSpec(name, loader, origin=real.origin, is_package=loader.is_package(name))
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations = list(real.submodule_search_locations or ())
        spec.has_location = real.has_location
        return spec


def real_path(name: str) -> str | None:
    """The path in an extension that a documented path stands for; None = it is no such path."""
    table, parts = read_table().get("verl_mt.import_paths", {}), name.split(".")
    for end in range(len(parts), 1, -1):
        moved = table.get(".".join(parts[:end]))
        if moved is not None:
            return ".".join([moved, *parts[end:]])
    return None


def install() -> None:
    """Once per process, when `verl_mt` is imported. First, because Python would find a module of a moved package in
    that package's folder, and load it a second time."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
