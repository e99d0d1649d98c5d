"""Read a table of names: `verl.txt`, `slime.txt`, `ms_swift.txt`, `trl.txt`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.aliases.families import Alias


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
