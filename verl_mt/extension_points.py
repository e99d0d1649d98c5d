"""Find extensions: which object a name of some group stands for.

An extension declares entry points in its `pyproject.toml`, and so can any other package::

    [project.entry-points."verl_mt.engines"]
    my_engine = "my_package.engine:MyEngine"

The library's own are the lines of `extensions/entry_points.txt`, of which the build makes its metadata. The file is
read first: a checkout on `PYTHONPATH` has no metadata, and that of every installed package takes longer to read.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from verl_mt.errors import PluginError
from verl_mt.import_paths import read_table

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger(__name__)

_DISTRIBUTION = "verl_mt"


def find(group: str, name: str) -> str | None:
    """The path that `name` stands for, `package.module:attribute`; None = no extension has the name.

    Reads the metadata of installed packages only if the library's own extensions do not have the name.

    Args:
        group: a group of entry points: `verl_mt.engines`.

    Raises:
        PluginError: two installed packages have it.
    """
    return own(group).get(name) or _installed(group).get(name)


def known(group: str) -> dict[str, str]:
    """Name -> path of all entry points of a group, installed packages included.

    Raises:
        PluginError: two installed packages have one name.
    """
    return {**_installed(group), **own(group)}


def own(group: str) -> dict[str, str]:
    """Name -> path of this distribution's entry points of a group. Reads no metadata."""
    return {name: value.partition(" [")[0] for name, value in read_table().get(group, {}).items()}


def extra_of(group: str, name: str) -> str | None:
    """The extra of this distribution that brings what the entry point needs (`path [extra]`); None = it needs none."""
    return read_table().get(group, {}).get(name, "").partition(" [")[2].rstrip("]") or None


@functools.cache
def _all_installed() -> Any:
    """Of all groups, for `select`: each look into the metadata reads that of every package."""
    from importlib import metadata  # 60 ms, of which `--help` needs none

    return metadata.entry_points()


@functools.cache
def _installed(group: str) -> dict[str, str]:
    found: dict[str, EntryPoint] = {}
    for point in _all_installed().select(group=group):
        if point.dist is not None and point.dist.name.replace("-", "_") == _DISTRIBUTION:
            continue
        if point.name in own(group):
            log.warning(
                "%s: its entry point %r of the group %s is not used, since verl_mt has one of that name; rename it",
                point.dist.name if point.dist is not None else point.value, point.name, group,
            )  # fmt: skip
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            names = [each.dist.name if each.dist is not None else each.value for each in (other, point)]
            raise PluginError(
                f"two installed packages have an entry point {point.name!r} of the group {group}: {names[0]} "
                f"({other.value}) and {names[1]} ({point.value}). Uninstall one of them, or give the path itself "
                "instead of the name"
            )
    return {name: point.value.partition(" [")[0] for name, point in found.items()}
