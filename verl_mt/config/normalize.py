"""Command lines and YAML files as our keys with checked values, and everything that is wrong with them in one error.

Hydra stops at the first key it does not know. So command lines and YAML files are first turned into canonical
`(key, value)` items by the one function `normalize_items`. If a key is not ours, or a value is none that the schema
takes, an extension translates all of them first: it knows the names of other libraries (`translate`, a name of the
entry points `verl_mt.functions`). A command in our own names loads none of it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mt.config.declare import check_option
from verl_mt.config.schema import leaves, open_parent, schema, sections
from verl_mt.config.short_names import suggest_key
from verl_mt.errors import ConfigError, UnknownKeyError
from verl_mt.plugins import optional_function

COMMAND_LINE = "command line"
_TRANSLATED = ("actor_rollout_ref.rollout.engine_kwargs", "algorithm.rollout_correction")
"""Free mappings in which other names of our keys may stand."""


@dataclass(frozen=True)
class Item:
    """One value that somebody set."""

    key: str
    value: Any
    alias: str
    """The key as it was written; an alias differs from `key`."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the configuration."""

    text: str
    unknown_key: bool = False


@dataclass
class Outcome:
    """Canonical items, what was wrong, and what the user should know once."""

    items: list[Item] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    """Keys of the schema with several values (Hydra's sweeps)."""

    @property
    def explicit(self) -> set[str]:
        """Keys of the schema that are set on purpose."""
        return {item.key for item in self.items}


Sweep = Callable[[Override, str, Outcome], list[str]]


def raise_problems(problems: Sequence[Problem]) -> None:
    """One error for all of them; nothing if there are none.

    Raises:
        UnknownKeyError: a key does not exist or is refused.
        ConfigError: only values are wrong.
    """
    if not problems:
        return
    texts = list(dict.fromkeys(p.text for p in problems))
    kind = UnknownKeyError if any(p.unknown_key for p in problems) else ConfigError
    if len(texts) == 1:
        raise kind(texts[0])
    raise kind(f"{len(texts)} problems in the configuration:\n" + "\n".join(f"  - {text}" for text in texts))


def normalize_items(given: Iterable[tuple[str, Any]], where: str) -> Outcome:
    """Turn what one command line or one file sets into canonical items.

    Args:
        given: (dotted key, value); a value may be a mapping of keys below.
        where: "command line" or a file's name, for the texts.
    """
    pairs = list(_flatten(given))
    translate = None if all(_is_plain(key, value) for key, value in pairs) else optional_function("translate")
    if translate is not None:
        outcome: Outcome = translate(pairs, where)
    else:
        known = [(key, value) for key, value in pairs if is_key(key)]
        outcome = Outcome([Item(key, value, key) for key, value in known])
        outcome.problems = [unknown_key(key, value, where) for key, value in pairs if not is_key(key)]
    outcome.items = _check_values(outcome, where)
    return outcome


def is_key(key: str) -> bool:
    """Whether it is a key of the schema that takes a value."""
    return key in leaves() or open_parent(key) is not None


def is_ours(key: str) -> bool:
    """Whether a key means the same in no other library: it is a key of the schema, or a user's name in a mapping."""
    parent = open_parent(key)
    return key in leaves() or (parent is not None and parent.key not in _TRANSLATED)


def _is_plain(key: str, value: Any) -> bool:
    if not is_ours(key) or (isinstance(value, str) and "${" in value):  # it may point to a key of another library
        return False
    return key not in leaves() or takes(key, value)


def unknown_key(key: str, value: Any, where: str) -> Problem:
    """What to say of a key that takes no value here."""
    if key in sections():
        text = f"{key}={short(value)} ({where}): a section, not a value; set a key below it"
    else:
        text = f"{key} ({where}): unknown key{suggest_key(key)}"
    return Problem(text, unknown_key=True)


def normalize_overrides(overrides: Sequence[str], sweep: Sweep | None = None) -> tuple[list[str], Outcome]:
    """Hydra overrides -> canonical Hydra overrides, with everything that was wrong or worth saying.

    Args:
        overrides: keys in any of their names; those of Hydra itself (`hydra.run.dir`) stay as they are.
        sweep: makes the canonical override of several values (`a,b`, `range()`); None = they are refused.
    """
    outcome = Outcome()
    given: list[tuple[str, Any]] = []
    verbatim: dict[tuple[str, str], str] = {}
    lines: list[str] = []
    parser = OverridesParser.create()
    for text in map(_quote_placeholder, overrides):
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            outcome.problems.append(Problem(f"{text!r} ({COMMAND_LINE}) is not key=value: {first_line(error)}"))
            continue
        problem = None if override.is_hydra_override() else _refuse_form(override, text, sweep)
        if problem:
            outcome.problems.append(problem)
        elif override.is_hydra_override() or override.is_delete():
            lines.append(text)
        elif sweep is not None and override.is_sweep_override():
            lines += sweep(override, text, outcome)
        else:
            value = override.value()
            given.append((override.key_or_group, value))
            verbatim[override.key_or_group, literal(value)] = text
    # What nobody had to change is handed to Hydra as it was written: an interpolation or a resolver of the user's means
    # to Hydra's grammar what it says, and quoting it anew could make plain text of it.
    found = normalize_items(given, COMMAND_LINE)
    for item, line in zip(found.items, as_overrides(found.items)):
        original = verbatim.get((item.key, literal(item.value)), "")
        lines.append(line if line.startswith("++") or original[:1] in ("", "+") else original)
    outcome.items, outcome.notes = found.items, outcome.notes + found.notes
    outcome.problems += found.problems
    return lines, outcome


def as_overrides(items: Iterable[Item]) -> list[str]:
    """Items in Hydra's override grammar."""
    # Hydra adds no keys to a mapping of the schema without being told to, those of kwargs={a:1} neither.
    pairs = [("++" if open_parent(item.key) or isinstance(item.value, dict) else "", item) for item in items]
    return [f"{prefix}{item.key}={literal(item.value)}" for prefix, item in pairs]


def normalize_tree(content: dict[str, Any], where: str, package: str = "") -> tuple[dict[str, Any], Outcome]:
    """The content of one YAML file -> nested mapping with canonical keys.

    Args:
        content: plain containers; keys may be dotted.
        where: the file's name.
        package: the dotted place where Hydra will merge it (a config group's file), "" = the root.
    """
    prefix = f"{package}." if package else ""
    outcome = normalize_items([(prefix + str(key), value) for key, value in content.items()], where)
    nested: dict[str, Any] = {}
    for item in outcome.items:
        if not item.key.startswith(prefix):
            text = f"{item.alias} ({where}) means {item.key}, outside of the file's package {package!r}: "
            outcome.problems.append(Problem(text + "start the file with '# @package _global_' and write whole keys"))
            continue
        *parents, last = item.key[len(prefix) :].split(".")
        node = nested
        for part in parents:
            inner = node.get(part)
            node[part] = node = inner if isinstance(inner, dict) else {}
        old = node.get(last)
        node[last] = {**old, **item.value} if isinstance(old, dict) and isinstance(item.value, dict) else item.value
    return nested, outcome


def _flatten(given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Go into mappings until a key that holds a value; None for a section (an empty block in YAML) sets nothing."""
    for key, value in given:
        # A free mapping of ours stays whole: its keys are the user's, and may hold dots. Those of _TRANSLATED are gone
        # into, since verl writes keys there that mean something else to us (rollout_correction: {bypass_mode: True}).
        leaf = leaves().get(key)
        whole = (leaf is not None or open_parent(key)) and key not in _TRANSLATED
        if value is None and key in sections():
            continue
        if not isinstance(value, dict) or whole or (not value and key not in sections()):
            yield key, value
        else:
            yield from _flatten((f"{key}.{name}", inner) for name, inner in value.items())


def takes(key: str, value: Any) -> bool:
    """Whether one of our keys takes a value as it is."""
    leaf = leaves()[key]
    if isinstance(value, str) and "${" in value:
        return False  # known only when it is resolved: a converter may still make a list of it
    if isinstance(value, bool) and leaf.type in (str, str | None):
        return False  # OmegaConf would take it for the text "True"
    try:
        typed(key, value)
    except (ConfigError, OmegaConfBaseException):
        return False
    return True


def _check_values(outcome: Outcome, where: str) -> list[Item]:
    """Type, bounds and choices of every item; the good ones, with values converted to their type."""
    good = []
    for item in outcome.items:
        value = item.value
        if item.key in leaves() and not (isinstance(value, str) and "${" in value):
            try:
                value = typed(item.key, value)
            except (ConfigError, OmegaConfBaseException) as error:
                text = first_line(error).removeprefix(f"{item.key}: ")
                outcome.problems.append(Problem(f"{item.alias}={short(value)} ({where}): {text}"))
                continue
        good.append(replace(item, value=value))
    return good


def typed(key: str, value: Any) -> Any:
    """A value in the type of one of our keys.

    Raises:
        ConfigError, OmegaConfBaseException: the key does not take it.
    """
    leaf = leaves()[key]
    if type(value) is type(leaf.default) and value == leaf.default:
        return value  # most of a composed configuration
    # Tried on OmegaConf itself ('3' becomes 3, 1 becomes 1.0), so that what is said of a value here and what merging
    # makes of it later cannot differ. Free mappings are tried apart: on the copy their keys would pile up.
    scratch = OmegaConf.create({"value": None}) if leaf.is_open else _scratch(key.rpartition(".")[0])
    where = "value" if leaf.is_open else key.rpartition(".")[2]
    OmegaConf.update(scratch, where, value)
    made = OmegaConf.select(scratch, where)
    if OmegaConf.is_config(made):
        made = OmegaConf.to_container(made, resolve=False)
    check_option(key, made, leaf.metadata)
    return made


@functools.cache
def _scratch(section: str) -> DictConfig:
    """A typed copy of a section to try values on; never read as a configuration."""
    return OmegaConf.structured(sections()[section].cls if section else schema())


def _quote_placeholder(text: str) -> str:
    """`key=path/{rollout_id}.pt` as slime's documents write it: to Hydra's grammar a brace begins a mapping."""
    key, equals, value = text.partition("=")
    return f"{key}={literal(value)}" if equals and "{rollout_id}" in value and value[:1] not in "'\"" else text


def _refuse_form(override: Override, text: str, sweep: Sweep | None) -> Problem | None:
    key = override.key_or_group
    if override.is_sweep_override() and sweep is None:
        return Problem(f"{text} ({COMMAND_LINE}): several values are a sweep. Give one value, or train with --multirun")
    if override.is_delete() and not open_parent(key):
        return Problem(
            f"{text} ({COMMAND_LINE}): a key of the schema cannot be deleted; set it to null",
            unknown_key=True,
        )
    if override.package is not None:
        return Problem(f"{text} ({COMMAND_LINE}): there is no config group {key}", unknown_key=True)
    return None


def literal(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(literal(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_literal_key(k)}:{literal(v)}" for k, v in value.items()) + "}"
    return QuotedString(str(value), Quote.single).with_quotes()


def _literal_key(key: Any) -> str:
    text = str(key)
    return text if re.fullmatch(r"[\w/.-]+", text) else literal(text)


def short(value: Any) -> str:
    """A value in an error's text, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
