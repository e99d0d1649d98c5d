"""Config groups: folders of YAML files, one of which a choice such as `algorithm=dapo` names (docs/groups.md)."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from verl_mt.config_paths import group_folders

GROUPS = ("task", "scale", "engine", "algorithm", "logger", "experiment")
"""Those that `ppo_trainer.yaml` has a place for, in its order."""


def is_choice(override: str, folders: Sequence[Path] = ()) -> bool:
    """Whether an override chooses files of a config group: `algorithm=dapo`, `algorithm=dapo,rloo`, `~algorithm`,
    `optim@actor_rollout_ref.actor.optim=x`.

    A mapping is none (`algorithm={gamma:0.9}` sets keys of the section). Nor is a list of trackers: each file of
    `logger` sets `trainer.logger`, so that only the last one would count.

    Args:
        folders: where groups are looked for, besides the shipped ones and those of installed packages.
    """
    group, value = group_of(override), override.partition("=")[2]
    sets_keys = value.startswith(("{", "[") if group == "logger" else "{")
    if not group or not (value or override.startswith("~")) or sets_keys:
        return False
    found = any((folder / group).is_dir() for folder in (*folders, *group_folders()))
    return (found or _is_stored(group)) and parsed(override) is not None


def _is_stored(group: str) -> bool:
    """Whether the program has added the group to Hydra's ConfigStore. Hydra's own groups are there too."""
    return not group.startswith("hydra") and ConfigStore.instance().get_type(group) == ObjectType.GROUP


def parsed(override: str) -> Override | None:
    """An override in Hydra's grammar; None where it is none."""
    with contextlib.suppress(HydraException):
        return OverridesParser.create().parse_override(override)
    return None


def group_of(override: str) -> str:
    """The group of a choice: `algorithm` of `+algorithm@somewhere=dapo`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def in_place(choices: Sequence[str]) -> list[str]:
    """Choices in Hydra's words.

    A group that has a place in the defaults list is not appended, as `+experiment=NAME` asks for. To choose no file,
    `algorithm=null`, is `~algorithm`.
    """
    words = [word.lstrip("+") if group_of(word) in GROUPS else word for word in choices]
    return [f"~{word.lstrip('+').removesuffix('=null')}" if word.endswith("=null") else word for word in words]


def with_places(entries: Sequence[Any], chosen: Sequence[str], named: set[str], *, primary: bool) -> list[Any]:
    """A file's defaults list in which each group has one place: a chosen one at the end of the primary file's list.

    So a choice of the command line wins over the file.

    Args:
        entries: the file's list.
        chosen: groups of `GROUPS` that the command line chooses.
        named: groups in the lists of the files that were read before. Those of this file are added.
        primary: whether it is the primary file.
    """
    if primary:
        named.clear()
    places: list[Any] = []
    overriding: list[Any] = []
    for entry in entries:
        name, value = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if name.startswith("override "):
            overriding.append(entry)
        elif primary and name in chosen:
            continue
        elif name not in named or (value is not None and name not in chosen):
            places.append(entry)
    if primary:
        places += [{name: None} for name in chosen]
    named |= {next(iter(entry)) for entry in places if isinstance(entry, dict)}
    return places + overriding


def no_such_file(missing: str, options: Sequence[str], where: str) -> str:
    """What to tell about a name that is no file of its group.

    Args:
        missing: group/name.
        options: the names that the group has.
        where: who chose it.
    """
    group, _, wrong = missing.rpartition("/")
    near = difflib.get_close_matches(wrong, options, n=1)
    hint = f". Did you mean {group}={near[0]}?" if near else ""
    return f"{group}={wrong} ({where}): the group {group} has no file {wrong}.yaml. It has {', '.join(options)}{hint}"
