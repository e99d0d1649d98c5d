"""What verl, slime and ms-swift call our keys: the rows of their tables, and how a table is read.

The tables stand with their families and are found through `FAMILIES`; nothing is read before a key or a value turns up
that is not ours.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from verl_mt.errors import ConfigError
from verl_mt.plugins import Registry, load_object

FAMILIES: Registry[str] = Registry("library whose names are understood", group="verl_mt.aliases")
"""Name -> dotted path of its `Family`."""


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
    settle: Callable[[Any, str], None]
    """Settings that mean something together; gets all items of a command or file, and its name for the texts."""
    as_overrides: Callable[[Sequence[str], Mapping[str, Alias]], list[str]] | None = None
    """Its flags on a command line as `key=value`; all other words stay."""
    defaults: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Its key -> what stands there in its own configuration: such a value asks for nothing, and is never refused."""
    stand_ins: Mapping[str, Any] = field(default_factory=dict)
    """Our key -> the value in a file that is at its default there, where that default does not exist here."""


@functools.cache
def families() -> dict[str, Family]:
    return {name: load_object(path, what=f"names of {name}") for name, path in FAMILIES.items()}


@functools.cache
def aliases() -> dict[str, Alias]:
    """The rows of all tables. A name in two of them means the same in both."""
    return {name: row for family in families().values() for name, row in family.rows.items()}


@functools.cache
def _defaults_elsewhere() -> dict[str, tuple[Any, ...]]:
    return {key: values for family in families().values() for key, values in family.defaults.items()}


def at_default(key: str, value: Any) -> bool:
    """Whether another library has this value there where nobody sets the key."""
    if key.rpartition(".")[2] == "_target_":  # a class of verl reads the block there
        return isinstance(value, str) and value.startswith("verl.")
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


def read_table(file: Path, converters: Mapping[str, Any]) -> dict[str, Alias]:
    """The rows of a table of names, by name; the docstring of `verl_mt.aliases` says how they are written.

    Args:
        converters: the functions that rows name.

    Raises:
        ConfigError: a row that cannot be read; names file and line.
    """
    texts: dict[str, str] = {}
    rows: dict[str, Alias] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("@"):
            name, _, text = line.partition("=")
            texts[name.strip()] = text.strip()
        elif line.strip() and not line.startswith("#"):
            try:
                for row in _read_row(line, converters, texts):
                    if row.name in rows:
                        raise ValueError(f"{row.name} has a row already")
                    rows[row.name] = row
            except (ValueError, KeyError) as error:
                raise ConfigError(f"{file}, line {number}: {error!r}") from error
    return rows


def _read_row(line: str, converters: Mapping[str, Any], texts: Mapping[str, str]) -> Iterator[Alias]:
    cells = [cell.strip() for cell in line.split("|", 3)]
    names, meaning, converter, why = (*cells, "", "", "")[:4]
    names, is_switch, _ = names.partition(" (switch)")
    why = texts[why] if why.startswith("@") else why
    convert = converters[converter] if converter else None
    for name, meant in _expand(names, meaning):
        below = name.endswith(".*")
        row = Alias(name.removesuffix(".*"), "refused", why=why, convert=convert, switch=bool(is_switch))
        if meant.startswith("-> "):
            yield replace(row, meaning="renamed", to=meant[3:].strip().removesuffix(".*"), covers_below=below)
        elif meant.startswith("= "):
            values = None if meant == "= any" else tuple(json.loads(f"[{meant[2:]}]"))
            yield replace(row, meaning="fixed", values=values, covers_below=below)
        elif meant == "refused" and why:
            yield replace(row, covers_below=True)
        else:
            raise ValueError(f"expected '-> key', '= value' or 'refused' with its reason, got {meant!r}")


def _expand(name: str, meaning: str) -> Iterator[tuple[str, str]]:
    """`{a,b}.x` and what it means as two rows; the same group in a key that is pointed to takes the same word."""
    group = re.search(r"\{([^{}]*)\}", name)
    if group is None:
        yield name, meaning
        return
    for word in group[1].split(","):
        meant = meaning.replace(group[0], word, 1) if meaning.startswith("->") else meaning
        yield from _expand(name.replace(group[0], word, 1), meant)
