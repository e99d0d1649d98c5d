"""A launch command of another library, as words for ours: what its reader fills, and what all readers need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

ENV = re.compile(r"\$\{oc\.env:(\w+)(?:,([^{}]*))?\}")
"""`${oc.env:NAME}` or `${oc.env:NAME,default}`: a variable of the shell inside an override."""
Library = Literal["verl", "ms-swift", "slime"]


@dataclass
class Launch:
    """The launch commands of one script, as words for `python -m verl_mt.trainer`."""

    framework: Library | None = None
    env: dict[str, str] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)
    """What stands before the command: `ray job submit ... --`."""
    flags: list[str] = field(default_factory=list)
    """Hydra's flags, with their values."""
    overrides: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    """Overrides that the other library's defaults stand for, with the reason behind ` # `."""
    changed: list[str] = field(default_factory=list)
    """What is carried over with another meaning; migrate ends with 3 then."""
    dropped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    """Names of the commands that were read: `swift rollout`, `swift rlhf`."""
    wants_server: bool = False
    """Its trainer asks a rollout server that another command starts."""
    cut_at: str = ""
    """Where a line that is not continued cuts the command off, in words."""
    servers: int = 0
    """Engines that the script's rollout servers have."""
    server_devices: list[str] = field(default_factory=list)
    model_length: int | None = None
    """Longest sequence of those engines in tokens; None = the model's."""
    functions: list[str] = field(default_factory=list)
    """Definitions of the script's own functions that the shell needs for it."""


def override(key: str, values: Sequence[str]) -> str:
    """`key=value` with quotes that Hydra's grammar needs."""
    quoted = ["'" + value.replace("'", "\\'") + "'" for value in values]
    return f"{key}=True" if not quoted else f"{key}={quoted[0] if len(quoted) == 1 else '[' + ','.join(quoted) + ']'}"


def parses(word: str) -> bool:
    """Whether Hydra's grammar takes the word as an override."""
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def by_flag(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the values behind it; `--a=b` is `--a b`."""
    out: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            out.append((flag, [value] if equals else []))
        elif out:
            out[-1][1].append(word)
    return out


def replace(word: str, launch: Launch) -> None:
    """A flag of `swift rlhf` counts where `swift rollout` has another value for it."""
    key = word.partition("=")[0]
    old = next((w for w in launch.overrides if w.partition("=")[0] == key), None)
    if old is not None:
        launch.overrides.remove(old)
        if old != word:
            launch.notes.append(f"--{key}: {old.partition('=')[2]} gave way to {word.partition('=')[2]}")
    launch.overrides.append(word)
