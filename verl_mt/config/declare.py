"""One option = type, default, doc, check, and when it means something: in one place.

A condition is data: the same object decides whether a key that was set explicitly has no effect, and is printed in that
refusal and on the page of all keys.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

from verl_mt.errors import ConfigError
from verl_mt.plugins import names_code, suggest

ValueOf = Callable[[str], Any]
"""Dotted key -> its value."""


class Condition:
    """Values of other keys. `str` prints it as a reader would set them: `algorithm.adv_estimator=gae`."""

    def holds(self, value_of: ValueOf) -> bool:
        raise NotImplementedError

    def missing(self, value_of: ValueOf) -> str:
        """What does not hold, and the values that are there instead."""
        raise NotImplementedError

    def contradicts(self, value_of: ValueOf) -> bool:
        """Where it does not hold: something else was chosen, and not only nothing."""
        return True

    def disables(self, explicit: Set[str]) -> bool:
        """Where it does not hold: whether setting the keys `explicit` also permits unused dependent keys."""
        return False


@dataclass(frozen=True)
class _Choice(Condition):
    """A key has one of some values. Another choice contradicts its dependent keys, so none of them may be unused."""

    key: str
    values: tuple[Any, ...]
    own: bool
    why: str

    def __str__(self) -> str:
        return f"{self.key}={' or '.join(map(str, self.values))}"

    def holds(self, value_of: ValueOf) -> bool:
        value = value_of(self.key)
        return value in self.values or (self.own and names_code(value))

    def missing(self, value_of: ValueOf) -> str:
        return f"{self} (it is {shown(value_of(self.key))}{self.why and ', ' + self.why})"


@dataclass(frozen=True)
class _OtherThan(Condition):
    """A key has none of some values."""

    key: str
    values: tuple[Any, ...]
    known: Collection[str]

    def __str__(self) -> str:
        others = [name for name in self.known if name not in self.values]
        return f"{self.key}={' or '.join(others)}" if others else f"{self.key} other than {' or '.join(self.values)}"

    def holds(self, value_of: ValueOf) -> bool:
        return value_of(self.key) not in self.values

    def missing(self, value_of: ValueOf) -> str:
        return f"{self} (it is {shown(value_of(self.key))})"


@dataclass(frozen=True)
class _Switch(Condition):
    """A key has a value, or is True. Setting it to off also permits unused dependent keys: verl's launch
    scripts set `use_kl_loss=False kl_loss_type=low_var_kl`, and `data.val_files=null` switches validation off."""

    key: str
    disabled_by: tuple[str, ...]
    why: str
    is_bool: bool

    def __str__(self) -> str:
        return f"{self.key}=True" if self.is_bool else self.key

    def holds(self, value_of: ValueOf) -> bool:
        value = value_of(self.key)
        return bool(value) and value != "off"

    def missing(self, value_of: ValueOf) -> str:
        return f"{self} (it is {shown(value_of(self.key))}{self.why and ': ' + self.why})"

    def contradicts(self, value_of: ValueOf) -> bool:
        return False

    def disables(self, explicit: Set[str]) -> bool:
        return not explicit.isdisjoint((self.key, *self.disabled_by))


@dataclass(frozen=True)
class _Without(Condition):
    """A key has no value."""

    key: str
    why: str

    def __str__(self) -> str:
        return f"no {self.key}"

    def holds(self, value_of: ValueOf) -> bool:
        return not value_of(self.key)

    def missing(self, value_of: ValueOf) -> str:
        return f"{self}{self.why and f' ({self.why})'}"


@dataclass(frozen=True)
class _Several(Condition):
    """All of them, or any one."""

    parts: tuple[Condition, ...]
    every: bool
    text: str = ""
    """In the place of a long list of keys, to read."""

    def __str__(self) -> str:
        return self.text or (" and " if self.every else " or ").join(map(str, self.parts))

    def holds(self, value_of: ValueOf) -> bool:
        return (all if self.every else any)(part.holds(value_of) for part in self.parts)

    def missing(self, value_of: ValueOf) -> str:
        if self.every:
            return " and ".join(part.missing(value_of) for part in self.parts if not part.holds(value_of))
        return f"{' or '.join(str(part) for part in self.parts)} (none of them is given)"

    def contradicts(self, value_of: ValueOf) -> bool:
        return any(part.contradicts(value_of) for part in self.parts if not part.holds(value_of))

    def disables(self, explicit: Set[str]) -> bool:
        return any(part.disables(explicit) for part in self.parts)


def only(key: str, *values: Any, own: bool = True, why: str = "") -> Condition:
    """`key` has one of these values, or (`own`) is the dotted path or file.py:name of something of the user's.

    Args:
        why: a reason for a refusal, after the value that `key` has.
    """
    return _Choice(key, values, own, why)


def other_than(key: str, *values: str, known: Collection[str]) -> Condition:
    """`key` has none of these values.

    Args:
        known: the values to name to a reader, those that are ruled out among them.
    """
    return _OtherThan(key, values, known)


def is_set(key: str, *, disabled_by: tuple[str, ...] = (), why: str = "") -> Condition:
    """`key` is neither null, False, 0, off nor empty.

    Args:
        disabled_by: other keys that, set explicitly, also permit unused dependent keys.
        why: as for `only`.
    """
    return _Switch(key, disabled_by, why, is_bool=False)


def switched_on(key: str, *, why: str = "") -> Condition:
    """The boolean `key` is True."""
    return _Switch(key, (), why, is_bool=True)


def without(key: str, *, why: str = "") -> Condition:
    """`key` is null, False, 0 or empty."""
    return _Without(key, why)


def any_of(*parts: Condition, text: str = "") -> Condition:
    return _Several(parts, every=False, text=text)


def all_of(*parts: Condition) -> Condition:
    return _Several(parts, every=True)


class Limits(TypedDict, total=False):
    """What a value may be."""

    min: float
    max: float
    """Inclusive bounds of a number; null is always allowed where the type allows it."""
    below: float
    """Exclusive upper bound."""
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
        when: under which condition the key means something (None = always); a section's holds for its keys too. A key
            that is given elsewhere, with another value than its default, is refused.
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
    """A node of the config. Checks every option of its own when made, with those that extensions add to it."""

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
        if value not in (None, False) and when is not None and not when.holds(lambda k: getattr(options, k)):
            raise ConfigError(
                f"{key}.{name} is {shown(value)}, which means something only with "
                f"{when.missing(lambda k: getattr(options, k))}: set that too, or leave it out"
            )
    return options


def _check_type(key: str, value: Any, hint: Any) -> None:
    """Of what a mapping holds, which OmegaConf does not look at; texts are held against their choices."""
    kinds = set(typing.get_args(hint) or (hint,))
    if value is None and types.NoneType in kinds:
        return
    expected = next((words for kind, words in _KINDS.items() if kind in kinds), None)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        bool: isinstance(value, bool), int: is_number and isinstance(value, int), float: is_number,
        str: isinstance(value, str),
    }  # fmt: skip
    if expected is not None and not any(fits.get(kind, False) for kind in kinds):
        null = ", or null" if types.NoneType in kinds else ""
        raise ConfigError(f"{key}: got {value!r}, expected {expected}{null}")


_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def shown(value: Any) -> str:
    """A value in an error's text."""
    return "null" if value is None else str(value)


def check_option(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: the value is out of bounds, not finite or not among the choices.
    """
    choices, low, high, below = (metadata.get(k) for k in ("choices", "min", "max", "below"))
    removed = metadata.get("removed", {})
    if value in list(removed):
        raise ConfigError(f"{name}: {value!r} was removed. {removed[value]}")
    plugin = metadata.get("plugin", False)
    known = choices is None or value in choices or value in list(metadata.get("also", ()))
    if not known and not (plugin and names_code(value)):
        path = ", or a dotted path or file.py:name" if plugin else ""
        raise ConfigError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices or ()))}{path}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Every comparison with nan is False: the bounds would let it pass.
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: got {value}, must be a finite number")
        if low is not None and value < low:
            raise ConfigError(f"{name}: got {value}, must be at least {low}")
        if high is not None and value > high:
            raise ConfigError(f"{name}: got {value}, must be at most {high}")
        if below is not None and value >= below:
            raise ConfigError(f"{name}: got {value}, must be below {below}")
