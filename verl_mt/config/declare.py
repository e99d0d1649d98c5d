"""One option = type, default, doc, check, and when it has an effect: in one place.

The same `Condition` decides whether a key that was set explicitly has no effect, and is printed in that refusal and on
the page of all keys.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

from verl_mt.errors import ConfigError
from verl_mt.plugins import names_code, suggest

ValueOf = Callable[[str], Any]
"""Dotted key -> its value."""


@dataclass(frozen=True)
class Condition:
    """Values of other keys. `str` prints it as you would set them: `algorithm.adv_estimator=gae`."""

    keys: tuple[str, ...]
    holds: Callable[[ValueOf], bool]
    text: Callable[[], str]
    is_switch: bool = False
    """Its keys are on or off. Set one explicitly, and a key that needs it may be set without effect: verl's launch
    scripts set `use_kl_loss=False kl_loss_type=low_var_kl`. Elsewhere another choice contradicts the key."""

    def __str__(self) -> str:
        return self.text()

    def __and__(self, other: Condition) -> Condition:
        return _joined(all, " and ", self, other)

    def __or__(self, other: Condition) -> Condition:
        return _joined(any, " or ", self, other)


def _joined(which: Callable[[Iterable[bool]], bool], word: str, *parts: Condition) -> Condition:
    return Condition(
        tuple(key for part in parts for key in part.keys),
        lambda of: which(part.holds(of) for part in parts),
        lambda: word.join(map(str, parts)),
        all(part.is_switch for part in parts),
    )


def only(key: str, *values: Any, own: bool = True) -> Condition:
    """`key` has one of these values, or (`own`) is the dotted path or file.py:name of custom code."""
    return Condition(
        (key,),
        lambda of: of(key) in values or (own and names_code(of(key))),
        lambda: f"{key}={' or '.join(map(str, values))}",
    )


def is_set(key: str) -> Condition:
    """`key` is neither null, False, 0, off nor empty."""
    return Condition((key,), lambda of: of(key) != "off" and bool(of(key)), lambda: f"{key} is set", is_switch=True)


def switched_on(key: str) -> Condition:
    """The boolean `key` is True."""
    return replace(is_set(key), text=lambda: f"{key}=True")


def no_effect(items: Mapping[str, str], when: Condition, value_of: ValueOf) -> str:
    """The text of an error.

    Args:
        items: key -> its value as text; none of them has an effect.
        when: the condition that does not hold.
    """
    said, has, it = ", ".join(f"{key}={value}" for key, value in items.items()), "has", "it"
    if len(items) > 1:
        has, it = "have", "them"
    found = [f"{key.rpartition('.')[2] if when.keys[1:] else 'it'} is {shown(value_of(key))}" for key in when.keys]
    return f"{said} {has} no effect unless {when} ({', '.join(found)}). Set that too, or remove {it}"


def conflicts(given: Mapping[str, Any], other: str, why: str) -> Iterator[str]:
    """Texts of errors: keys that do not go with something else.

    Args:
        given: key -> its value; None and False = it is not set.
        other: what they do not go with, as `key=value`.
        why: a clause.
    """
    for key, value in given.items():
        if value is not None and value is not False:
            yield f"{key}={value} does not go with {other}: {why}. Remove one of them"


class Limits(TypedDict, total=False):
    """What a value may be."""

    min: float
    max: float
    """Inclusive bounds of a number; null is always allowed where the type allows it."""
    below: float
    """Exclusive upper bound."""
    off: float
    """A number outside the bounds: none, or all."""
    choices: Collection[Any]
    """The values it may take."""
    removed: dict[Any, str]
    """Values of earlier versions, with what to set instead."""
    plugin: bool
    """Beside the choices, the dotted path or file.py:name of an object of the user's."""
    also: dict[Any, Any]
    """Other names of values, with what they become: `{False: "off"}`, since YAML reads `off` as False."""
    may_change: bool
    """It may differ when a run goes on: what a person sees, or how often, never what is computed."""
    options: type[Section]
    """Of a mapping: the dataclass whose fields it may hold."""


def option(
    default: Any,
    doc: str,
    *,
    when: Condition | None = None,
    allow_unused: tuple[Any, ...] | bool = (),
    **limits: Unpack[Limits],
) -> Any:
    """A dataclass field with its doc, its check, and its use.

    Args:
        default: the default; mutable ones (list, dict) are copied for each instance. A `Section` class: keys below.
        doc: one or two sentences with the unit; says what null means.
        when: when the key has an effect (None = always); a section's condition holds for its keys too. If it does not
            hold, another value than the default is refused.
        allow_unused: values that are accepted although the key has no effect; True = any value.
    """
    metadata = {"doc": doc, "when": when, "allow_unused": allow_unused, **limits}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Section:
    """A node of the config. Checks each of its options when made, with those that extensions add to it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(Section.extended_of(cls))

    extended_of: ClassVar[Callable[..., type]] = staticmethod(lambda cls, of_others=False: cls)
    """Class of the schema, or (`of_others`) of an extension -> the same with extensions' keys; set by the schema."""
    core: ClassVar[type[Section] | None] = None
    """Of a class with the keys of extensions: the class of the schema that it was made of."""

    def __reduce__(self) -> Any:
        # A class with the keys of extensions has no name of its own that another process could import.
        return _restored, (vars(type(self)).get("core") or type(self), vars(self))

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            check_option(f"{type(self).__name__}.{item.name}", value, item.metadata)
            also = item.metadata.get("also")
            if also and value in also:
                setattr(self, item.name, also[value])

    def problems(self, config: Any, key: str) -> Iterator[str]:
        """Values that do not go together: its own, or its own and other keys'.

        Args:
            config: the whole configuration.
            key: where this section is.

        Raises:
            ConfigError: one more, the last.
        """
        return iter(())

    @classmethod
    def read(cls, given: Mapping[str, Any], key: str) -> Section:
        """A mapping whose `options` this class is: `read_options`, unless other classes hold some of them."""
        return read_options(cls, given, key)


def _restored(cls: type[Section], values: dict[str, Any]) -> Section:
    section: Section = object.__new__(Section.extended_of(cls, of_others=True))
    vars(section).update(values)
    return section


S = TypeVar("S", bound=Section)


def read_options(cls: type[S], given: Mapping[str, Any], key: str) -> S:
    """A mapping of the configuration as the dataclass of what it may hold.

    Args:
        given: what somebody has put into it, each item on purpose: one that means nothing is refused even with its
            default, unless that is null or False.
        key: the mapping's.

    Raises:
        ConfigError: an unknown name, a value that cannot be, or one that means nothing beside the others.
    """
    known, hints = {item.name: item for item in dataclasses.fields(cls)}, typing.get_type_hints(cls)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{key}.{name}: unknown key{suggest(str(name), known)}. Known: {', '.join(known)}")
        check_option(f"{key}.{name}", value, known[name].metadata)
        _check_type(f"{key}.{name}", value, hints[name])
    options = cls(**given)
    for name, value in given.items():
        when = known[name].metadata["when"]
        if value not in (None, False) and when is not None and not when.holds(partial(getattr, options)):
            raise ConfigError(no_effect({f"{key}.{name}": shown(value)}, when, partial(getattr, options)))
    return options


def _check_type(key: str, value: Any, hint: Any) -> None:
    """Of what a mapping holds, which OmegaConf does not look at; texts are held against their choices."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    words = next((words for kind, words in _KINDS.items() if kind in kinds), None)
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    if words is not None and not fits:
        null = ", or null" if types.NoneType in kinds else ""
        raise ConfigError(f"{key}: got {value!r}, expected {words}{null}")


_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def shown(value: Any) -> str:
    """A value in an error's text."""
    return "null" if value is None else str(value)


_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "min": (operator.ge, "at least"), "max": (operator.le, "at most"), "below": (operator.lt, "below"),
}  # fmt: skip


def bounds(metadata: Mapping[str, Any], value: float | None = None) -> list[str]:
    """What a number must be, in words: those bounds that `value` is outside of; None = all."""
    off = f" or {metadata['off']}" if "off" in metadata else ""
    return [
        f"{words} {metadata[name]}{off}"
        for name, (holds, words) in _BOUNDS.items()
        if name in metadata and (value is None or not holds(value, metadata[name]))
    ]


def check_option(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: the value is out of bounds, not finite or not among the choices.
    """
    choices, removed, plugin = metadata.get("choices"), metadata.get("removed", {}), metadata.get("plugin", False)
    if value in list(removed):
        raise ConfigError(f"{name}: {value!r} was removed. {removed[value]}")
    if value in list(metadata.get("also", ())):
        return
    if choices is not None and value not in choices and not (plugin and names_code(value)):
        path = ", or a dotted path or file.py:name" if plugin else ""
        raise ConfigError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}{path}")
    if isinstance(value, int | float) and not isinstance(value, bool) and value != metadata.get("off"):
        # Every comparison with nan is False: the bounds would let it pass.
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: got {value}, must be a finite number")
        if wrong := bounds(metadata, value):
            raise ConfigError(f"{name}: got {value}, must be {wrong[0]}")
