"""Command lines and files in the names of other libraries, as our keys.

The core calls `translate` with everything that one command line or file sets, if a key in it is not ours or a value is
none that the schema takes. A key of the schema keeps its meaning: the tables of `aliases/` are asked only for
the others.

A whole configuration of another library has a value for each of its keys. Those at their defaults ask for nothing and
are never refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from verl_mt.config.normalize import (
    COMMAND_LINE,
    Item,
    Outcome,
    Problem,
    is_key,
    is_ours,
    literal,
    short,
    takes,
    typed,
    unknown_key,
)  # fmt: skip
from verl_mt.config.schema import leaves, open_parent
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.aliases.families import (
    DROP,
    Alias,
    aliases,
    at_default,
    default_kinds,
    families,
    fits_default,
    same,
    split_groups,
)  # fmt: skip

WHOLE = 50
"""A file with at least this many keys at defaults of another library is a whole configuration (verl's has about 500
keys, half of them without a counterpart), not one that says what differs."""
_FOLLOWS = {"actor_rollout_ref.actor.loss_agg_mode", "trainer.device"}
"""Keys whose default here depends on something else: on the loss, on the machine."""
_NAMES_A_CLASS = {
    "reward": "Set reward.path and reward.name to your own reward",
    "data": "Set data.sampler to your own sampler, or data.train_files to your own generator of rows",
    "algorithm": "Set algorithm.adv_estimator to your own estimator",
    "actor_rollout_ref.actor": "Set actor_rollout_ref.actor.policy_loss.loss_mode to your own loss",
    "actor_rollout_ref.rollout": "Set actor_rollout_ref.rollout.name to your own engine",
}
"""Section -> the key that takes a user's own class or function of it."""


@dataclass
class Translation(Outcome):
    """What a command line or a file means in our keys."""

    unset: list[str] = field(default_factory=list)
    """Keys of another library that are at its own default and have no counterpart: nobody asked for anything."""
    said_of_defaults: dict[str, str] = field(default_factory=dict)
    """Note -> the key at its default that it is about: of a whole configuration too many to print."""

    @property
    def is_whole(self) -> bool:
        """Whether it is another library's whole configuration, not a few settings in its names."""
        return len(self.unset) + len(self.said_of_defaults) >= WHOLE

    @property
    def explicit(self) -> set[str]:
        """Of a whole configuration, the keys that were changed."""
        return {item.key for item in self.items if not (self.is_whole and _untouched(item))}


def translate(pairs: Sequence[tuple[str, Any]], where: str) -> Translation:
    """What one command line or one file sets, as our keys.

    Args:
        pairs: (dotted key, value); no value is a mapping of further keys.
        where: "command line" or a file's name, for the texts.
    """
    outcome = Translation()
    for key, value in split_groups(pairs):
        _translate_one(key, value, where, outcome)
    if where != COMMAND_LINE and outcome.is_whole:
        _leave_defaults(outcome)
    _tell_unset(outcome, where)
    # Rules between settings are rules of the other libraries: they look only at what stands in their names. They come
    # before the search for conflicts, which they settle (a switch and its bound may be one key of ours).
    if any(item.alias != item.key for item in outcome.items):
        for family in families().values():
            family.settle(outcome, where)
    _find_conflicts(outcome, where)
    if where != COMMAND_LINE:
        outcome.items = [item for item in outcome.items if not _untouched(item) or _fits(item)]
    return outcome


def translate_flags(words: Sequence[str]) -> list[str]:
    """Words of a command line; flags of other libraries as overrides: `--max_turns 3` as `max_turns=3`."""
    for family in families().values():
        words = family.as_overrides(words, family.rows) if family.as_overrides else words
    return list(words)


def why_missing(file: str) -> tuple[str, str] | None:
    """(library, reason) where a configuration file is another library's and not offered; None = it is no such file."""
    reasons = ((name, word, why) for name, family in families().items() for word, why in family.missing_files.items())
    return next(((name, why) for name, word, why in reasons if word in file), None)


def is_shipped(entry: str) -> bool:
    """Whether an entry of `hydra.searchpath` is another library's own folder: ours, always searched, stands for it."""
    folders = tuple(family.config_folder for family in families().values() if family.config_folder)
    return entry.rstrip("/").endswith(folders)


def _translate_one(key: str, value: Any, where: str, outcome: Translation) -> None:
    """Add the item that (key, value) means to the outcome, or what is wrong with it."""
    row = _row_of(key)
    target = row.to + key[len(row.name) :] if row is not None and row.meaning == "renamed" else key
    if isinstance(value, str) and "${" in value and at_default(key, value):
        outcome.unset.append(key)  # it follows another key there; ours follows what it follows here
        return
    if key.endswith("._target_") and not open_parent(key):
        _refuse(key, value, _class_of_ones_own(key, value, where), outcome)
        return
    given, value = value, _rename_interpolations(value)
    try:
        value = row.value_of(value) if row is not None else value
        value = _own_value(target, value)
    except ValueError as error:
        _refuse(key, given, f"{key}={short(value)} ({where}): {error}", outcome)
        return
    if value is DROP and row is not None and row.why:
        outcome.notes.append(f"{key}={short(given)} ({where}) has nothing to set: {row.why}")
    if value is DROP or value == f"${{{target}}}":  # verl's response_length: ${data.max_response_length}
        return
    if row is not None and row.meaning == "fixed":
        _accept_fixed(key, value, row, where, outcome)
    elif row is not None and row.meaning == "refused":
        _refuse(key, given, f"{key} ({where}) is refused: {row.why}", outcome)
    elif is_key(target):
        outcome.items.append(Item(target, value, key))
        if row is not None and row.why:
            outcome.notes.append(f"{key} ({where}) -> {target}={short(value)}: {row.why}")
    elif at_default(key, given):
        outcome.unset.append(key)
    else:
        outcome.problems.append(unknown_key(key, value, where))


def _class_of_ones_own(key: str, value: Any, where: str) -> str:
    section = next((name for name in _NAMES_A_CLASS if key.startswith(f"{name}.")), "")
    instead = _NAMES_A_CLASS.get(section, "Name your own code in external_plugins")
    return f"{key}={short(value)} ({where}): no section is a class that you can replace by _target_. {instead}"


def _refuse(key: str, value: Any, text: str, outcome: Translation) -> None:
    """A problem, unless the value is the other library's own default: then nobody asked for anything."""
    if at_default(key, value):
        outcome.unset.append(key)
    else:
        outcome.problems.append(Problem(text, unknown_key=True))


def _leave_defaults(outcome: Translation) -> None:
    """Of a whole configuration, what is left out because our default says it better.

    Those are options (of a loss, a correction, a controller), which are refused where nothing reads them, the
    aggregation, which follows the loss, and the device.
    """
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


def _tell_unset(outcome: Translation, where: str) -> None:
    if keys := list(dict.fromkeys(outcome.unset)):
        named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        verb = "is at its default and has" if len(keys) == 1 else "are at their defaults and have"
        outcome.notes.append(f"{named} ({where}) {verb} nothing to set here")


def _row_of(key: str) -> Alias | None:
    """The row of a key that is not ours: its own, else that of the longest name above it which covers what is below."""
    if is_ours(key):
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
    if key not in leaves() or takes(key, value):
        return value
    row = aliases().get(key)
    return value if row is None else row.value_of(value)


def _accept_fixed(key: str, value: Any, row: Alias, where: str, outcome: Translation) -> None:
    kinds = default_kinds(key) if row.values is None else ""
    fits = fits_default(key, value) if row.values is None else any(same(value, agreed) for agreed in row.values)
    if fits:
        note = f"{key}={short(value)} ({where}) has nothing to set: {row.why}"
        outcome.notes.append(note)
        if at_default(key, value):
            outcome.said_of_defaults[note] = key
        return
    if row.values is None:
        text = f"{key}={short(value)} ({where}): expected {kinds}; it would have nothing to set here: {row.why}"
        outcome.problems.append(Problem(text))
        return
    agreed = " or ".join(literal(v) for v in row.values)
    text = f"{key}={short(value)} ({where}) is refused, only {agreed} is possible: {row.why}"
    _refuse(key, value, text, outcome)


_POINTER = re.compile(r"\$\{([\w.]+)\}")


def _rename_interpolations(value: Any) -> Any:
    """`${data.max_response_length}` in a YAML file points to the canonical key."""
    if not isinstance(value, str) or "${" not in value:
        return value

    def pointer(found: re.Match[str]) -> str:
        row = None if found[1] in leaves() else aliases().get(found[1])
        return found[0] if row is None or row.meaning != "renamed" or row.convert else f"${{{row.to}}}"

    return _POINTER.sub(pointer, value)


def _find_conflicts(outcome: Translation, where: str) -> None:
    """Two aliases of one key with two values: nobody can say which one counts."""
    # Within one file or command line only: between them the order of merging says which one counts, and of one
    # alias given twice the last one does, as in Hydra.
    whole = where != COMMAND_LINE and outcome.is_whole
    first: dict[str, Item] = {}
    for item in list(outcome.items):
        other = first.setdefault(item.key, item)
        if other.alias != item.alias and not same(other.value, item.value):
            # A whole configuration holds both aliases; the one that is still at its default says nothing.
            if whole and (untouched := [i for i in (other, item) if _untouched(i)]):
                outcome.items.remove(untouched[0])
                first[item.key] = item if untouched[0] is other else other
                continue
            text = f"{other.alias}={short(other.value)} and {item.alias}={short(item.value)} ({where})"
            outcome.problems.append(Problem(f"{text} both set {item.key}: give one of them"))


def _untouched(item: Item) -> bool:
    return at_default(item.alias, item.value)


def _fits(item: Item) -> bool:
    """Whether our key takes the value, converted to its type."""
    if item.key not in leaves() or (isinstance(item.value, str) and "${" in item.value):
        return True
    try:
        typed(item.key, item.value)
    except (ConfigError, OmegaConfBaseException):
        return False
    return True
