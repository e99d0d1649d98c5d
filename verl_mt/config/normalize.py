"""Before Hydra sees them: aliases, the `multi_turn: True` shorthand, "did you mean", all refusals at once.

Hydra cannot merge `multi_turn=True` with `multi_turn.x=y` and stops at the first key it does not know. So command lines
and YAML files are first turned into canonical `(key, value)` items by the one function `normalise_items`; what is wrong
is collected, and everything that is wrong with a command ends up in one error.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mt.config import aliases, correction_spellings, launch_spellings, slime_spellings, swift_spellings
from verl_mt.config.knob import check_knob
from verl_mt.config.redact import redact as redact
from verl_mt.config.schema import Config, leaves, open_parent, sections
from verl_mt.errors import ConfigError, UnknownKeyError

COMMAND_LINE = "command line"
_OPENED = (aliases.ROLLOUT + "engine_kwargs", "algorithm.rollout_correction")
"""Mappings in which other spellings of a key may stand."""


@dataclass(frozen=True)
class Item:
    """One value that somebody set."""

    key: str
    value: Any
    spelling: str
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


def normalise_items(given: Iterable[tuple[str, Any]], where: str) -> Outcome:
    """Turn what one command line or one file sets into canonical items.

    Args:
        given: (dotted key, value); a value may be a mapping of keys below.
        where: "command line" or a file's name, for the texts.
    """
    outcome = Outcome()
    for key, value in _flatten(given):
        _normalise_one(key, value, where, outcome)
    _place_workers(outcome, where)
    outcome.items = launch_spellings.settle(correction_spellings.settle(outcome.items))
    _find_conflicts(outcome, where)
    outcome.items = _check_values(outcome, where)
    return outcome


def normalize_argv(argv: list[str]) -> list[str]:
    """The command line with canonical keys; flags (`--config-name x`, `-cn x`, ...) stay as and where they are.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    flags, overrides = split_argv(argv)
    lines, outcome = normalise_overrides(overrides)
    raise_problems(outcome.problems)
    return [*flags, *lines]


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags with their values, overrides), each in their order."""
    takes_value = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--cfg", "-c"}
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(swift_spellings.with_flags_as_overrides(slime_spellings.with_flags_as_overrides(argv)))
    for word in rest:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in takes_value:
            flags.extend([value for value in [next(rest, None)] if value is not None])
    return flags, overrides


def normalise_overrides(overrides: Sequence[str]) -> tuple[list[str], Outcome]:
    """Hydra overrides -> canonical Hydra overrides, with everything that was wrong or worth saying."""
    outcome = Outcome()
    given: list[tuple[str, Any]] = []
    verbatim: dict[tuple[str, str], str] = {}
    lines: list[str] = []
    for text in map(_quote_placeholder, overrides):
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            outcome.problems.append(Problem(f"{text!r} ({COMMAND_LINE}) is not key=value: {_first_line(error)}"))
            continue
        problem = _refuse_form(override, text)
        if problem:
            outcome.problems.append(problem)
        elif override.key_or_group == "hydra.searchpath" or override.is_delete():
            lines.append(text)
        else:
            value = override.value()
            given.append((override.key_or_group, value))
            verbatim[override.key_or_group, _literal(value)] = text
    found = normalise_items(given, COMMAND_LINE)
    for item in found.items:
        # Hydra adds no keys to a mapping of the schema without being told to, those of kwargs={a:1} neither.
        prefix = "++" if open_parent(item.key) or isinstance(item.value, dict) else ""
        original = verbatim.get((item.key, _literal(item.value)), "")
        lines.append(
            original if not prefix and original[:1] not in ("", "+") else f"{prefix}{item.key}={_literal(item.value)}"
        )
    outcome.items, outcome.notes = found.items, found.notes
    outcome.problems += found.problems
    return lines, outcome


def normalise_tree(content: dict[str, Any], where: str, package: str = "") -> tuple[dict[str, Any], Outcome]:
    """The content of one YAML file -> nested mapping with canonical keys.

    Args:
        content: plain containers; keys may be dotted.
        where: the file's name.
        package: the dotted place where Hydra will merge it (a config group's file), "" = the root.
    """
    prefix = f"{package}." if package else ""
    outcome = normalise_items([(prefix + str(key), value) for key, value in content.items()], where)
    nested: dict[str, Any] = {}
    for item in outcome.items:
        if not item.key.startswith(prefix):
            text = f"{item.spelling} ({where}) means {item.key}, outside of the file's package {package!r}: "
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


def suggest_key(key: str) -> str:
    """`"; did you mean x?"`: a neighbour, else the same name elsewhere, else the closest spelling of all."""
    parent, _, last = key.rpartition(".")
    names = [*leaves(), *aliases.RENAMES]
    neighbours = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == parent}
    same_name = [n for n in leaves() if n.rpartition(".")[2] == last]
    by_name = {n.rpartition(".")[2]: n for n in leaves()}
    close = [neighbours[m] for m in difflib.get_close_matches(last, neighbours, n=1, cutoff=0.7)]
    close = close or difflib.get_close_matches(key, same_name, n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(key, names, n=1, cutoff=0.9)
    close = close or [by_name[m] for m in difflib.get_close_matches(last, by_name, n=1, cutoff=0.75)]
    return f"; did you mean {close[0]}?" if close else "; python -m verl_mt.config.write_reference lists all keys"


def _flatten(given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Go into mappings until a key that holds a value; None for a section (an empty block in YAML) sets nothing."""
    for key, value in given:
        leaf = leaves().get(key)
        whole = (leaf is not None or open_parent(key)) and key not in _OPENED
        if value is None and key in sections():
            continue
        if not isinstance(value, dict) or whole or (not value and key not in sections()):
            yield key, value
        else:
            yield from _flatten((f"{key}.{name}", inner) for name, inner in value.items())


def _normalise_one(key: str, value: Any, where: str, outcome: Outcome) -> None:
    target, note = key, ""
    rename = aliases.RENAMES.get(key)
    value = _rename_interpolations(value)
    try:
        if rename is not None:
            target, note = rename.to, rename.note
            value = rename.convert(value) if rename.convert else value
        else:
            target = _rename_prefix(key)
        if target in aliases.CONVERT:
            value = aliases.CONVERT[target](value)
    except ValueError as error:
        outcome.problems.append(Problem(f"{key}={_short(value)} ({where}): {error}", unknown_key=True))
        return
    if value is aliases.DROP or value == f"${{{target}}}":  # verl's response_length: ${data.max_response_length}
        return
    always = aliases.ALWAYS.get(key)
    reason = None if always or target != key else _refused(key)
    if always is not None and rename is None:
        _accept_always(key, value, always, where, outcome)
    elif reason is not None:
        outcome.problems.append(Problem(f"{key} ({where}) is refused: {reason}", unknown_key=True))
    elif target in leaves() or open_parent(target):
        outcome.items.append(Item(target, value, key))
        if note:
            outcome.notes.append(f"{key} ({where}) -> {target}={_short(value)}: {note}")
    elif target in sections():
        text = f"{key}={_short(value)} ({where}): a section, not a value; set a key below it"
        outcome.problems.append(Problem(text, unknown_key=True))
    else:
        outcome.problems.append(Problem(f"{key} ({where}): unknown key{suggest_key(key)}", unknown_key=True))


def _accept_always(key: str, value: Any, always: aliases.Always, where: str, outcome: Outcome) -> None:
    if always.values is None or any(_same(value, agreed) for agreed in always.values):
        outcome.notes.append(f"{key}={_short(value)} ({where}) has nothing to set: {always.why}")
        return
    agreed = " or ".join(_literal(v) for v in always.values)
    text = f"{key}={_short(value)} ({where}) is refused, only {agreed} is possible: {always.why}"
    outcome.problems.append(Problem(text, unknown_key=True))


def _refused(key: str) -> str | None:
    """The reason of the longest refused prefix of a key that the schema does not know."""
    if key in leaves():
        return None
    parts = key.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((aliases.REFUSED[p] for p in prefixes if p in aliases.REFUSED), None)


def _rename_prefix(key: str) -> str:
    for prefix, target in aliases.PREFIX_RENAMES.items():
        if key == prefix or key.startswith(prefix + "."):
            return target + key[len(prefix) :]
    return key


def _rename_interpolations(value: Any) -> Any:
    """`${data.max_response_length}` in a YAML file points to the canonical key."""
    if isinstance(value, str) and "${" in value:
        for old, rename in aliases.RENAMES.items():
            if rename.convert is None:
                value = value.replace("${" + old + "}", "${" + rename.to + "}")
    return value


def _place_workers(outcome: Outcome, where: str) -> None:
    """verl's and slime's GPUs per node > 1 always mean Ray workers; ours only if it says so."""
    keys = {item.key for item in outcome.items}
    for item in list(outcome.items):
        ranks = isinstance(item.value, int) and item.value > 1
        theirs = item.spelling in ("trainer.n_gpus_per_node", "actor_num_gpus_per_node")
        if theirs and ranks and "trainer.placement" not in keys:
            outcome.items.append(Item("trainer.placement", "ray", item.spelling))
            outcome.notes.append(
                f"{item.spelling}={item.value} ({where}) -> also trainer.placement=ray: several ranks need it"
            )


def _find_conflicts(outcome: Outcome, where: str) -> None:
    """Two spellings of one key with two values: nobody can say which one counts."""
    first: dict[str, Item] = {}
    for item in outcome.items:
        other = first.setdefault(item.key, item)
        if other.spelling != item.spelling and not _same(other.value, item.value):
            text = f"{other.spelling}={_short(other.value)} and {item.spelling}={_short(item.value)} ({where})"
            outcome.problems.append(Problem(f"{text} both set {item.key}: give one of them"))


def _check_values(outcome: Outcome, where: str) -> list[Item]:
    """Type, bounds and choices of every item; the good ones, with values converted to their type."""
    good = []
    for item in outcome.items:
        value = item.value
        if item.key in leaves() and not (isinstance(value, str) and "${" in value):
            try:
                value = _typed(item.key, value)
            except (ConfigError, OmegaConfBaseException) as error:
                text = _first_line(error).removeprefix(f"{item.key}: ")
                outcome.problems.append(Problem(f"{item.spelling}={_short(value)} ({where}): {text}"))
                continue
        good.append(replace(item, value=value))
    return good


def _typed(key: str, value: Any) -> Any:
    leaf = leaves()[key]
    if type(value) is type(leaf.default) and value == leaf.default:
        return value  # most of a composed configuration
    scratch = OmegaConf.create({"value": None}) if leaf.is_open else _scratch_schema()
    where = "value" if leaf.is_open else key
    OmegaConf.update(scratch, where, value)
    typed = OmegaConf.select(scratch, where)
    if OmegaConf.is_config(typed):
        typed = OmegaConf.to_container(typed, resolve=False)
    check_knob(key, typed, leaf.metadata)
    return typed


_SCRATCH: list[DictConfig] = []


def _scratch_schema() -> DictConfig:
    """A typed copy of the schema to try values on; never read as a configuration."""
    if not _SCRATCH:
        _SCRATCH.append(OmegaConf.structured(Config))
    return _SCRATCH[0]


def _quote_placeholder(text: str) -> str:
    """`key=path/{rollout_id}.pt` as slime's documents write it: to Hydra's grammar a brace begins a mapping."""
    key, equals, value = text.partition("=")
    return f"{key}={_literal(value)}" if equals and "{rollout_id}" in value and value[:1] not in "'\"" else text


def _refuse_form(override: Override, text: str) -> Problem | None:
    key = override.key_or_group
    if override.is_sweep_override():
        return Problem(f"{text} ({COMMAND_LINE}): sweeps are not offered; start one run per value")
    if override.is_delete() and not open_parent(key):
        return Problem(
            f"{text} ({COMMAND_LINE}): a key of the schema cannot be deleted; set it to null",
            unknown_key=True,
        )
    if override.package is not None:
        return Problem(f"{text} ({COMMAND_LINE}): packages are not offered on the command line", unknown_key=True)
    return None


def _literal(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(_literal(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_literal_key(k)}:{_literal(v)}" for k, v in value.items()) + "}"
    if "'" not in str(value) and not str(value).endswith("\\"):
        return f"'{value}'"
    # Within quotes a backslash means itself, except in a run before a quote: there each one is doubled.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', str(value))
    return '"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"'


def _literal_key(key: Any) -> str:
    text = str(key)
    return (
        text if text.replace("_", "").replace("-", "").replace("/", "").replace(".", "").isalnum() else _literal(text)
    )


def _same(a: Any, b: Any) -> bool:
    """Equal, where 0 is 0.0 but not False."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
