"""What other libraries call our keys: the rows of their tables, and the values that stand there by default."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_mt.plugins import Registry, load_object

FAMILIES: Registry[str] = Registry("library whose names are understood", group="verl_mt.aliases")
"""Name -> dotted path of its `Family`."""
DROP = object()
"""A converter returns it where the value adds nothing."""
ARGUMENTS = "actor_rollout_ref.rollout.engine_kwargs"
ENGINE_GROUPS = {f"{ARGUMENTS}.{engine}": engine for engine in ("sglang", "vllm")}
"""verl's group of arguments -> the engine that they are of."""


def split_groups(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Key and value, with each argument of `ENGINE_GROUPS` by itself, also of a group that is one mapping."""
    for key, value in pairs:
        if key in ENGINE_GROUPS and isinstance(value, dict) and value:
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        else:
            yield key, value


@dataclass(frozen=True)
class Alias:
    """One row of a table: what a name of another library means here."""

    name: str
    meaning: Literal["renamed", "fixed", "refused"]
    to: str = ""
    """Our key, where it is another name of one."""
    values: tuple[Any, ...] | None = None
    """Of a fixed key: values that agree; None = every value, because no result depends on it."""
    why: str = ""
    convert: Callable[[Any], Any] | None = None
    covers_below: bool = False
    """What holds for it holds for every key below it."""
    switch: bool = False
    """A flag that takes no value."""

    def value_of(self, value: Any) -> Any:
        """Raises:
        ValueError: with the reason: the value has no counterpart.
        """
        try:
            return self.convert(value) if self.convert else value
        except ValueError as error:
            raise ValueError(str(error) or self.why) from None


@dataclass(frozen=True)
class Family:
    """What is known of another library: the rows of its table, and the code that a table cannot say."""

    rows: Mapping[str, Alias]
    settle: Callable[[Any, str], None] = lambda outcome, where: None
    """Settings that mean something together; gets all items of a command or file, and its name for the texts."""
    as_overrides: Callable[[Sequence[str], Mapping[str, Alias]], list[str]] | None = None
    """Its flags on a command line as `key=value`; all other words stay."""
    defaults: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Its key -> what stands there in its own configuration: such a value asks for nothing, and is never refused."""
    class_prefix: str | None = None
    """Begins the dotted paths of its classes: in its configuration files, a `_target_` names one."""
    config_folder: str | None = None
    """Ends the path of its configuration files, which no search path needs."""
    missing_files: Mapping[str, str] = field(default_factory=dict)
    """Part of the name of a configuration file that is not offered -> why."""


@functools.cache
def families() -> dict[str, Family]:
    """Name of a library -> what is known of it."""
    return {name: load_object(path, what=f"names of {name}") for name, path in FAMILIES.items()}


@functools.cache
def aliases() -> dict[str, Alias]:
    """The rows of all tables. A name in two of them means the same in both."""
    return {name: row for family in families().values() for name, row in family.rows.items()}


@functools.cache
def other_names() -> dict[str, str]:
    """Name -> the verl_mt key that it sets; empty where there is none."""
    return {name: row.to for name, row in aliases().items()}


@functools.cache
def _defaults_elsewhere() -> dict[str, tuple[Any, ...]]:
    return {key: values for family in families().values() for key, values in family.defaults.items()}


def at_default(key: str, value: Any) -> bool:
    """Whether another library has this value there where nobody sets the key."""
    if key.rpartition(".")[2] == "_target_":  # a class of the other library reads the block there
        prefixes = tuple(family.class_prefix for family in families().values() if family.class_prefix)
        return isinstance(value, str) and value.startswith(prefixes)
    if isinstance(value, dict) and value:
        return all(at_default(f"{key}.{name}", inner) for name, inner in value.items())
    return any(same(value, default) for default in _defaults_elsewhere().get(key, ()))


_KINDS: dict[type, str] = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list"}


def default_kinds(key: str) -> str:
    """What a value of another library's key looks like, by its defaults; "" where they do not say."""
    defaults = [d for d in _defaults_elsewhere().get(key, ()) if not (isinstance(d, str) and "${" in d)]
    return " or ".join(dict.fromkeys(_KINDS[type(d)] for d in defaults if type(d) in _KINDS))


def fits_default(key: str, value: Any) -> bool:
    """Whether a value that sets nothing is at least one that the other library could read."""
    known = default_kinds(key)
    interpolated = isinstance(value, str) and "${" in value
    return value is None or interpolated or not known or _KINDS.get(type(value), "") in known.split(" or ")


def same(a: Any, b: Any) -> bool:
    """Equal, where 0 is 0.0 but not False."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b
