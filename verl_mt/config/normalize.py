"""Before Hydra sees them: other names of our keys, the `multi_turn: True` shorthand, all refusals.

Hydra cannot merge `multi_turn=True` with `multi_turn.x=y` and stops at the first key it does not know. So command lines
and YAML files are first turned into canonical `(key, value)` items by the one function `normalize_items`; what is wrong
is collected, and everything that is wrong with a command ends up in one error.

What verl, slime, ms-swift and TRL call our keys stands in the tables of `FAMILIES`. They are read when a key or a value
turns up that is not ours: a command in our own names loads none of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mt.config.alias_tables import Alias, aliases, at_default, default_kinds, families, fits_default, same
from verl_mt.config.declare import check_option
from verl_mt.config.schema import leaves, open_parent, schema, sections
from verl_mt.config.short_names import suggest_key
from verl_mt.errors import ConfigError, UnknownKeyError

COMMAND_LINE = "command line"
WHOLE = 50
"""A file with so many keys at defaults of another library is a whole configuration (verl's has about 500 keys, half of
them without a counterpart), not one that says what differs."""
DROP = object()
"""A converter returns it where the value adds nothing."""
_OPENED = ("actor_rollout_ref.rollout.engine_kwargs", "algorithm.rollout_correction")
"""Free mappings in which other names of our keys may stand."""
_FOLLOWS = {"actor_rollout_ref.actor.loss_agg_mode", "trainer.device"}
"""Keys whose default here depends on something else: on the loss, on the machine."""


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
    unset: list[str] = field(default_factory=list)
    """Keys of another library that are at its own default and have no counterpart: nobody asked for anything."""
    said_of_defaults: dict[str, str] = field(default_factory=dict)
    """Note -> the key at its default that it is about: of a whole configuration too many to print."""
    stand_ins: dict[str, Item] = field(default_factory=dict)
    """Text of a problem -> what stands instead of that value in a whole configuration, which nobody wrote by hand."""
    swept: list[str] = field(default_factory=list)
    """Keys of ours with several values (Hydra's sweeps)."""


Sweep = Callable[[Override, str, Outcome], list[str]]


def is_whole(outcome: Outcome) -> bool:
    """Whether it is another library's whole configuration, not a few settings in its names."""
    return len(outcome.unset) + len(outcome.said_of_defaults) >= WHOLE


def on_purpose(outcome: Outcome) -> set[str]:
    """Our keys that a file sets on purpose: of another library's whole configuration, those that were changed."""
    if not is_whole(outcome):
        return {item.key for item in outcome.items}
    return {item.key for item in outcome.items if not _untouched(item)}


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
    outcome = Outcome()
    for key, value in _flatten(given):
        _normalize_one(key, value, where, outcome)
    if where != COMMAND_LINE and is_whole(outcome):
        _leave_defaults(outcome)
    _tell_unset(outcome, where)
    # Rules between settings are rules of the other libraries: they look only at what stands in their names. They come
    # before the search for conflicts, which they settle (a switch and its bound may be one key of ours).
    if any(item.alias != item.key for item in outcome.items):
        for family in families().values():
            family.settle(outcome, where)
    _find_conflicts(outcome, where)
    outcome.items = _check_values(outcome, where)
    return outcome


@functools.cache
def _hydra_flags() -> dict[str, argparse.Action]:
    """Flag of Hydra's command line -> what its parser does with it."""
    return {name: action for action in get_args_parser()._actions for name in action.option_strings}


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(Hydra's flags with their values, overrides), each in their order; flags of other libraries are overrides."""
    words, known = list(argv), _hydra_flags()
    if any(word.startswith("--") and word.partition("=")[0] not in known for word in words):
        for family in families().values():
            words = family.as_overrides(words, family.rows) if family.as_overrides else words
    flags: list[str] = []
    overrides: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        action = known.get(word)
        takes = isinstance(action, argparse._StoreAction) and words  # --info may have a value, or none
        if takes and action and (action.nargs is None or words[0] in (action.choices or ())):
            flags.append(words.pop(0))
    return flags, overrides


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
            outcome.problems.append(Problem(f"{text!r} ({COMMAND_LINE}) is not key=value: {_first_line(error)}"))
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
    for item in found.items:
        # Hydra adds no keys to a mapping of the schema without being told to, those of kwargs={a:1} neither.
        prefix = "++" if open_parent(item.key) or isinstance(item.value, dict) else ""
        original = verbatim.get((item.key, literal(item.value)), "")
        lines.append(
            original if not prefix and original[:1] not in ("", "+") else f"{prefix}{item.key}={literal(item.value)}"
        )
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
        # A free mapping of ours stays whole: its keys are the user's, and may hold dots. Those of _OPENED are gone
        # into, since verl writes keys there that mean something else to us (rollout_correction: {bypass_mode: True}).
        leaf = leaves().get(key)
        whole = (leaf is not None or open_parent(key)) and key not in _OPENED
        if value is None and key in sections():
            continue
        if not isinstance(value, dict) or whole or (not value and key not in sections()):
            yield key, value
        else:
            yield from _flatten((f"{key}.{name}", inner) for name, inner in value.items())


def _normalize_one(key: str, value: Any, where: str, outcome: Outcome) -> None:
    """Adds the item that (key, value) means to the outcome, or what is wrong with it.

    A name of ours is ours: the tables are asked only for keys that the schema does not know, and for values that it
    does not take.
    """
    row = _row_of(key)
    target = row.to + key[len(row.name) :] if row is not None and row.meaning == "renamed" else key
    if isinstance(value, str) and "${" in value and at_default(key, value):
        outcome.unset.append(key)  # it follows another key there; ours follows what it follows here
        return
    if key.endswith("._target_") and not open_parent(key):
        if at_default(key, value):
            outcome.unset.append(key)
        else:
            outcome.problems.append(Problem(_class_of_ones_own(key, value, where), unknown_key=True))
        return
    given = value
    value = _rename_interpolations(value)
    try:
        value = row.value_of(value) if row is not None else value
        value = _own_value(target, value)
    except ValueError as error:
        _refuse(key, given, f"{key}={_short(value)} ({where}): {error}", where, outcome)
        return
    if value is DROP and row is not None and row.why:
        outcome.notes.append(f"{key}={_short(given)} ({where}) has nothing to set: {row.why}")
    if value is DROP or value == f"${{{target}}}":  # verl's response_length: ${data.max_response_length}
        return
    if row is not None and row.meaning == "fixed":
        _accept_fixed(key, value, row, where, outcome)
    elif row is not None and row.meaning == "refused":
        _refuse(key, given, f"{key} ({where}) is refused: {row.why}", where, outcome)
    elif target in leaves() or open_parent(target):
        outcome.items.append(Item(target, value, key))
        if row is not None and row.why:
            outcome.notes.append(f"{key} ({where}) -> {target}={_short(value)}: {row.why}")
    elif target in sections():
        _refuse(
            key, given, f"{key}={_short(value)} ({where}): a section, not a value; set a key below it", where, outcome
        )
    elif at_default(key, given):
        outcome.unset.append(key)
    else:
        _refuse(key, given, f"{key} ({where}): unknown key{suggest_key(key)}", where, outcome)


_NAMES_A_CLASS = {
    "reward": "Set reward.path and reward.name to your own reward",
    "data": "Set data.sampler to your own sampler, or data.train_files to your own generator of rows",
    "algorithm": "Set algorithm.adv_estimator to your own estimator",
    "actor_rollout_ref.actor": "Set actor_rollout_ref.actor.policy_loss.loss_mode to your own loss",
    "actor_rollout_ref.rollout": "Set actor_rollout_ref.rollout.name to your own engine",
}
"""Section -> the key that takes a user's own class or function of it."""


def _class_of_ones_own(key: str, value: Any, where: str) -> str:
    section = next((name for name in _NAMES_A_CLASS if key.startswith(f"{name}.")), "")
    instead = _NAMES_A_CLASS.get(section, "Name your own code in external_plugins")
    return f"{key}={_short(value)} ({where}): no section is a class that you can replace by _target_. {instead}"


def _refuse(key: str, value: Any, text: str, where: str, outcome: Outcome) -> None:
    """A problem, unless the value is the other library's own default: then nobody asked for anything."""
    stand_in = next((f.stand_ins[key] for f in families().values() if key in f.stand_ins), None)
    if at_default(key, value) and stand_in is None:
        outcome.unset.append(key)
        return
    outcome.problems.append(Problem(text, unknown_key=True))
    if at_default(key, value):
        outcome.stand_ins[text] = Item(key, stand_in, key)


def _leave_defaults(outcome: Outcome) -> None:
    """Of a whole configuration, what is left out because our default says it better.

    Those are options (of a loss, a correction, a controller), which are refused where nothing reads them, the
    aggregation, which follows the loss, and the device.
    """
    for text, item in outcome.stand_ins.items():
        outcome.problems = [problem for problem in outcome.problems if problem.text != text]
        outcome.items.append(item)
        outcome.notes.append(f"{item.key} -> {_short(item.value)}, instead of a default that is not offered: {text}")
    kept = []
    outcome.unset += outcome.said_of_defaults.values()
    outcome.notes = [note for note in outcome.notes if note not in outcome.said_of_defaults]
    for item in outcome.items:
        value = item.value
        if isinstance(value, dict) and item.key in leaves() and leaves()[item.key].is_open:
            value = {k: v for k, v in value.items() if not at_default(f"{item.alias}.{k}", v)}
            outcome.unset += [f"{item.alias}.{k}" for k in item.value if k not in value]
        elif (open_parent(item.key) or item.key in _FOLLOWS) and _untouched(item):
            outcome.unset.append(item.alias)
            continue
        if value != {}:
            kept.append(replace(item, value=value))
    outcome.items = kept


def _tell_unset(outcome: Outcome, where: str) -> None:
    if keys := list(dict.fromkeys(outcome.unset)):
        named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        verb = "is at its default and has" if len(keys) == 1 else "are at their defaults and have"
        outcome.notes.append(f"{named} ({where}) {verb} nothing to set here")


def _row_of(key: str) -> Alias | None:
    """The row of a key that is not ours: its own, else that of the longest name above it which covers what is below."""
    parent = open_parent(key)
    if key in leaves() or (parent is not None and parent.key not in _OPENED):
        return None
    # From the whole name upwards, so that `reward_model.overlong_buffer.len`, which has a counterpart, is found before
    # `reward_model`, which is refused.
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        row = aliases().get(".".join(parts[:end]))
        if row is not None and (row.covers_below or end == len(parts)):
            return row
    return None


def _own_value(key: str, value: Any) -> Any:
    """A value of one of our keys that the schema does not take, as we write it: `fp32` is `float32`.

    Raises:
        ValueError: with the reason: it has no counterpart.
    """
    if key not in leaves() or _takes(key, value):
        return value
    row = aliases().get(key)
    return value if row is None else row.value_of(value)


def _takes(key: str, value: Any) -> bool:
    leaf = leaves()[key]
    if isinstance(value, str) and "${" in value:
        return False  # known only when it is resolved: a converter may still make a list of it
    if isinstance(value, bool) and leaf.type in (str, str | None):
        return False  # OmegaConf would take it for the text "True"
    try:
        _typed(key, value)
    except (ConfigError, OmegaConfBaseException):
        return False
    return True


def _accept_fixed(key: str, value: Any, row: Alias, where: str, outcome: Outcome) -> None:
    kinds = default_kinds(key) if row.values is None else ""
    fits = fits_default(key, value) if row.values is None else any(same(value, agreed) for agreed in row.values)
    if fits:
        note = f"{key}={_short(value)} ({where}) has nothing to set: {row.why}"
        outcome.notes.append(note)
        if at_default(key, value):
            outcome.said_of_defaults[note] = key
        return
    if row.values is None:
        text = f"{key}={_short(value)} ({where}): expected {kinds}; it would have nothing to set here: {row.why}"
        outcome.problems.append(Problem(text))
        return
    agreed = " or ".join(literal(v) for v in row.values)
    text = f"{key}={_short(value)} ({where}) is refused, only {agreed} is possible: {row.why}"
    _refuse(key, value, text, where, outcome)


_POINTER = re.compile(r"\$\{([\w.]+)\}")


def _rename_interpolations(value: Any) -> Any:
    """`${data.max_response_length}` in a YAML file points to the canonical key."""
    if not isinstance(value, str) or "${" not in value:
        return value

    def pointer(found: re.Match[str]) -> str:
        row = None if found[1] in leaves() else aliases().get(found[1])
        return found[0] if row is None or row.meaning != "renamed" or row.convert else f"${{{row.to}}}"

    return _POINTER.sub(pointer, value)


def _find_conflicts(outcome: Outcome, where: str) -> None:
    """Two aliases of one key with two values: nobody can say which one counts."""
    # Within one file or command line only: between them the order of merging says which one counts, and of one
    # alias given twice the last one does, as in Hydra.
    whole = where != COMMAND_LINE and is_whole(outcome)
    first: dict[str, Item] = {}
    for item in list(outcome.items):
        other = first.setdefault(item.key, item)
        if other.alias != item.alias and not same(other.value, item.value):
            # A whole configuration holds both aliases; the one that is still at its default says nothing.
            if whole and (untouched := [i for i in (other, item) if _untouched(i)]):
                outcome.items.remove(untouched[0])
                first[item.key] = item if untouched[0] is other else other
                continue
            text = f"{other.alias}={_short(other.value)} and {item.alias}={_short(item.value)} ({where})"
            outcome.problems.append(Problem(f"{text} both set {item.key}: give one of them"))


def _untouched(item: Item) -> bool:
    return at_default(item.alias, item.value)


def _check_values(outcome: Outcome, where: str) -> list[Item]:
    """Type, bounds and choices of every item; the good ones, with values converted to their type."""
    good = []
    for item in outcome.items:
        value = item.value
        if item.key in leaves() and not (isinstance(value, str) and "${" in value):
            try:
                value = _typed(item.key, value)
            except (ConfigError, OmegaConfBaseException) as error:
                if where != COMMAND_LINE and _untouched(item):
                    continue
                text = _first_line(error).removeprefix(f"{item.key}: ")
                outcome.problems.append(Problem(f"{item.alias}={_short(value)} ({where}): {text}"))
                continue
        good.append(replace(item, value=value))
    return good


def _typed(key: str, value: Any) -> Any:
    leaf = leaves()[key]
    if type(value) is type(leaf.default) and value == leaf.default:
        return value  # most of a composed configuration
    # Tried on OmegaConf itself ('3' becomes 3, 1 becomes 1.0), so that what is said of a value here and what merging
    # makes of it later cannot differ. Free mappings are tried apart: on the copy their keys would pile up.
    scratch = OmegaConf.create({"value": None}) if leaf.is_open else _scratch(key.rpartition(".")[0])
    where = "value" if leaf.is_open else key.rpartition(".")[2]
    OmegaConf.update(scratch, where, value)
    typed = OmegaConf.select(scratch, where)
    if OmegaConf.is_config(typed):
        typed = OmegaConf.to_container(typed, resolve=False)
    check_option(key, typed, leaf.metadata)
    return typed


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
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(literal(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_literal_key(k)}:{literal(v)}" for k, v in value.items()) + "}"
    if "'" not in str(value) and not str(value).endswith("\\"):
        return f"'{value}'"
    # Within quotes a backslash means itself, except in a run before a quote: there each one is doubled.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', str(value))
    return '"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"'


def _literal_key(key: Any) -> str:
    text = str(key)
    return text if text.replace("_", "").replace("-", "").replace("/", "").replace(".", "").isalnum() else literal(text)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
