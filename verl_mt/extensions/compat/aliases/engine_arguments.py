"""Arguments of one inference engine in the names of other libraries: with another engine they set nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from verl_mt.config.normalize import COMMAND_LINE, Item, short
from verl_mt.extensions.compat.aliases.families import ARGUMENTS, ENGINE_GROUPS, aliases, same
from verl_mt.extensions.compat.translate import Translation

ENGINE = "actor_rollout_ref.rollout.name"
_USUAL = {
    "enforce_eager": False,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "cudagraph_capture_sizes": None,
}
"""Argument of vLLM -> the value with which it does what it does without the argument."""


def engine_named(value: Any) -> str | None:
    """The engine of `rollout.name`; of a variable of the shell its default. None = only the shell knows."""
    found = re.fullmatch(r"\$\{oc\.env:\w+,(\w+)\}", str(value))
    name = found[1] if found else str(value)
    return None if value is None or "${" in name else name.removesuffix("_async")


def is_of_one_engine(key: str) -> bool:
    """Whether another library's key sets an argument of vLLM, or one of its groups `engine_kwargs.ENGINE`."""
    return _group_of(key) is not None or _is_vllms(key)


def settle(outcome: Translation, where: str) -> None:
    """Keep the arguments of the engine that the command or file names, and say which others set nothing.

    Without a name of an engine, groups of arguments (`engine_kwargs.vllm`) are kept: the engine checks their names.
    """
    engine = engine_named(next((item.value for item in reversed(outcome.items) if item.key == ENGINE), None))
    outcome.items = [kept for item in outcome.items for kept in _settled(item, engine, where, outcome)]


def _settled(item: Item, engine: str | None, where: str, outcome: Translation) -> Iterator[Item]:
    owner = _group_of(item.alias) or ("vllm" if _is_vllms(item.alias) else None)
    if owner is None or item.key == item.alias:
        yield item
        return
    name = item.key.removeprefix(f"{ARGUMENTS}.")
    why = ""
    if item.value == {}:
        return
    if _group_of(item.alias):
        if engine not in (None, owner):
            why = f"{ENGINE} is {engine}, and only {owner} has these arguments"
    elif engine is None:
        # Another file may name it. Without a name the default engine samples, which takes no arguments of vLLM.
        why = (
            f"{'the ' * (where == COMMAND_LINE)}{where} does not say that {owner} samples. Add {ENGINE}={owner} there, "
            f"or write {item.key}={short(item.value)}"
        )
    elif engine != owner:
        why = aliases()[item.alias].why
    elif name in _USUAL and same(_USUAL[name], item.value):
        why = "vLLM does so without the argument"
    said = f"{item.alias} ({where}) -> "
    outcome.notes = [note for note in outcome.notes if not note.startswith(said)]
    if why:
        outcome.notes.append(f"{item.alias}={short(item.value)} ({where}) has nothing to set: {why}")
    elif item.key == ARGUMENTS and isinstance(item.value, dict):
        yield from (replace(item, key=f"{ARGUMENTS}.{key}", value=value) for key, value in item.value.items())
    else:
        yield item


def _group_of(key: str) -> str | None:
    return next(
        (engine for group, engine in ENGINE_GROUPS.items() if key == group or key.startswith(f"{group}.")), None
    )


def _is_vllms(key: str) -> bool:
    row = aliases().get(key)
    return row is not None and row.meaning == "renamed" and (row.to + ".").startswith(f"{ARGUMENTS}.")
