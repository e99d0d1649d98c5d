"""What a configuration cannot be: keys without an effect, and values that do not go together.

Both are declared beside the keys: `option(..., when=...)` and `Section.problems`. All problems of a configuration are
one error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from verl_mt.config.declare import Condition, check_option, no_effect, shown
from verl_mt.config.extended import problems_of
from verl_mt.config.redact import redact
from verl_mt.config.schema import Config, Leaf, explicit_keys, is_as_checked, leaves, sections, value_of
from verl_mt.errors import ConfigError


def check(config: Config) -> None:
    """Verify everything that involves more than one option.

    Raises:
        ConfigError: lists every problem with its keys, what was found and what to do.
    """
    unused = _unused_keys(config, switches=False)
    _raise([*unused, *(text for key in ("", *sections()) for text in _of_section(config, key)), *problems_of(config)])


def check_once(config: Config) -> None:
    """`check`, unless `compose` has done it and nothing was changed since.

    Raises:
        ConfigError: as `check`.
    """
    if not is_as_checked(config):
        check(config)


def reject_unused_keys(config: Config, among: tuple[str, ...] = ("",)) -> None:
    """At the start of a run: keys that were set have an effect in it, or were switched off on purpose.

    Args:
        among: beginnings of the keys that a command reads, where it is not training; the others it leaves alone.

    Raises:
        ConfigError: lists every such key with what it is for.
    """
    _raise(_unused_keys(config, switches=True, among=among))


def means_nothing(config: Config) -> set[str]:
    """Keys whose condition does not hold."""
    of = partial(value_of, config)
    return {key for key, leaf in leaves().items() if leaf.when is not None and not leaf.when.holds(of)}


def _raise(found: Iterable[str]) -> None:
    problems = list(found)
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {p}" for p in problems))


def _of_section(config: Config, key: str) -> Iterator[str]:
    """Problems of a section's values, which may have been set in Python, and of them together."""
    section = value_of(config, key) if key else config
    for item in dataclasses.fields(section):
        at, value, options = f"{key}.{item.name}".lstrip("."), getattr(section, item.name), item.metadata.get("options")
        try:
            check_option(at, value, item.metadata)
            if options is not None:
                yield from options.read(value, at).problems(config, at)
        except ConfigError as error:
            yield str(error)
    for cls in type(section).__mro__:
        if "problems" in vars(cls):
            yield from vars(cls)["problems"](section, config, key)


def _unused_keys(config: Config, *, switches: bool, among: tuple[str, ...] = ("",)) -> Iterator[str]:
    """A text for keys that were set to other values than their defaults and have no effect; keys with the same
    condition together.

    Args:
        switches: keys whose switch is off, else those that another choice contradicts.
        among: beginnings of the keys to look at.
    """
    of, explicit = partial(value_of, config), explicit_keys(config)
    found: dict[str, tuple[Condition, dict[str, str]]] = {}
    for key, leaf in leaves().items():
        when = leaf.when
        if key not in explicit or not key.startswith(among) or when is None or when.holds(of):
            continue
        on_purpose = when.is_switch and not explicit.isdisjoint(when.keys)
        if when.is_switch == switches and not on_purpose and (unused := dict(_unused_values(leaf, of(key)))):
            found.setdefault(str(when), (when, {}))[1].update(unused)
    yield from (no_effect(unused, when, of) for when, unused in found.values())


def _unused_values(leaf: Leaf, value: Any) -> Iterator[tuple[str, str]]:
    """(key, value) of what is refused if a key has no effect: not its default, nor what may be set all the same."""
    known = {leaf.key: (value, leaf.default, leaf.allow_unused)}
    if (options := leaf.metadata.get("options")) is not None:
        fields = [item for item in dataclasses.fields(options) if item.name in value]
        known = {f"{leaf.key}.{f.name}": (value[f.name], f.default, f.metadata["allow_unused"]) for f in fields}
    for key, (got, default, allow_unused) in known.items():
        if got != default and allow_unused is not True and got not in (allow_unused or ()):
            yield key, shown(redact(got, key.rpartition(".")[2]))
