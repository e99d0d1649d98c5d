"""The schema with the keys that extensions add to it.

An extension declares its keys beside the code that reads them, as a `Section`, and names them by an entry point of the
group `verl_mt.config_sections`::

    @dataclass
    class CurriculumConfig(Section):
        start: float = option(0.1, "Difficulty at the start.", min=0, max=1)

    SECTIONS = ConfigSections({"curriculum": CurriculumConfig})  # curriculum.start=0.3

A section that the core has gets further keys (`{"actor_rollout_ref.rollout": RolloutKeys}`). Code reads them typed:
`section_of(config, CurriculumConfig).start`.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import typing
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_mt.config.declare import Section, option
from verl_mt.errors import PluginError, error_text
from verl_mt.extension_points import known, own
from verl_mt.plugins import load_object

GROUP = "verl_mt.config_sections"
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class ConfigSections:
    """The keys of one extension."""

    sections: Mapping[str, type[Section]]
    """Dotted key -> its class. Of a section that exists: a class with the further keys."""
    problems: Callable[[Any], Iterator[str]] = lambda config: iter(())
    """(the whole configuration) -> what cannot be: each names its keys, what was found and what to do."""


@functools.cache
def added() -> dict[str, ConfigSections]:
    """Name of an entry point -> what it adds.

    Raises:
        PluginError: an entry point leads nowhere, or to something else.
    """
    found = {name: load_object(path, what=f"entry point {name!r} of {GROUP}") for name, path in known(GROUP).items()}
    for name, sections in found.items():
        if not isinstance(sections, ConfigSections):
            raise PluginError(
                f"entry point {name!r} of {GROUP} is a {type(sections).__name__}; expected a ConfigSections "
                "(verl_mt/config/extended.py)"
            )
        for key, cls in sections.sections.items():
            _require_section(f"entry point {name!r} of {GROUP}: {key!r}", key, cls)
    return found


def _require_section(what: str, key: str, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Section) and "__dataclass_fields__" in vars(cls)):
        raise PluginError(f"{what} is {cls!r}; expected a subclass of Section that is a @dataclass")
    if key in ("", "hydra") or key.startswith("hydra."):
        raise PluginError(f"{what} is no name for a section: give it one of its own")
    for item in dataclasses.fields(cls):
        if "doc" not in item.metadata:
            raise PluginError(f"{what}: {item.name} is no option; write {item.name}: TYPE = option(DEFAULT, DOC)")


def problems_of(config: Any) -> Iterator[str]:
    """What the extensions' checks say of a configuration.

    Raises:
        PluginError: a check raised.
    """
    for name, sections in added().items():
        try:
            yield from sections.problems(config)
        except Exception as error:
            text = error_text(error, named=True)
            raise PluginError(f"entry point {name!r} of {GROUP}: its check raised {text}") from error


@functools.cache
def keys_of_packages() -> frozenset[str]:
    """Dotted keys, and sections, that other packages have added."""
    foreign = [sections for name, sections in added().items() if name not in own(GROUP)]
    return frozenset(key for sections in foreign for at, cls in sections.sections.items() for key in _keys_of(cls, at))


def _keys_of(cls: type, at: str) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        yield f"{at}.{item.name}"
        if isinstance(hints[item.name], type) and issubclass(hints[item.name], Section):
            yield from _keys_of(hints[item.name], f"{at}.{item.name}")


_MAKING = threading.RLock()
"""Held while classes are made: two families of them would not be equal."""


def extended_classes(root: Any) -> dict[type, type]:
    """Class of the schema -> the same with further keys: of those that have some, or hold a section that has.

    Args:
        root: the schema's.

    Raises:
        PluginError: an extension has a key that there is already, or one below no section.
    """
    with _MAKING:
        classes: dict[type, type] = _made(root)
        return classes


@functools.cache
def _made(root: Any) -> dict[type, type]:
    given: _Given = {}
    for name, found in added().items():
        for key, cls in found.sections.items():
            given.setdefault(key, []).append((name, cls))
    made: dict[type, type] = {}
    _extend(root, "", given, made)
    for key, ((name, _), *_) in given.items():
        raise PluginError(f"entry point {name!r} of {GROUP}: {key!r} is no section of the configuration, nor below one")
    return made


_Given = dict[str, list[tuple[str, type[Section]]]]
"""Dotted key -> (entry point, class) of each extension that has keys there."""


def _extend(cls: type, key: str, given: _Given, made: dict[type, type]) -> type:
    """The class of the section `key` with what is given for it and below it, which is taken out of `given`."""
    hints, fields = typing.get_type_hints(cls), {item.name: item for item in dataclasses.fields(cls)}
    bases = [more for _, more in given.get(key, [])]
    _refuse_twice(key, dict.fromkeys(fields, "verl_mt"), given.pop(key, []))
    new: list[tuple[str, type, Any]] = []
    for name in (*fields, *_new_sections(key, fields, given)):
        below = f"{key}.{name}".lstrip(".")
        if name not in fields:
            (_, inside), *others = given[below]
            given[below] = others
            extended = _extend(inside, below, given, made)
            new.append((name, extended, option(extended, (inside.__doc__ or below).strip().splitlines()[0])))
            continue
        inside, metadata = hints[name], fields[name].metadata
        is_section = isinstance(inside, type) and issubclass(inside, Section)
        if is_section and (extended := _extend(inside, below, given, made)) is not inside:
            new.append((name, extended, dataclasses.field(default_factory=extended, metadata=metadata)))
    if not new and not bases:
        return cls
    namespace = {"__doc__": cls.__doc__, "__module__": cls.__module__, "core": cls}
    made[cls] = dataclasses.make_dataclass(cls.__name__, new, bases=(*bases, cls), namespace=namespace)
    return made[cls]


def _new_sections(key: str, fields: Container[str], given: _Given) -> list[str]:
    """Names of sections right below `key` that extensions bring."""
    names = [below.rpartition(".")[2] for below in given if below.rpartition(".")[0] == key]
    return [name for name in names if name not in fields]


def _refuse_twice(key: str, owners: dict[str, str], more: list[tuple[str, type[Section]]]) -> None:
    for name, cls in more:
        for item in dataclasses.fields(cls):
            if (owner := owners.setdefault(item.name, name)) != name:
                twice = f"{key}.{item.name}".lstrip(".")
                raise PluginError(f"entry point {name!r} of {GROUP}: {owner} has the key {twice} already; rename yours")


@functools.cache
def classes_of(root: Any) -> frozenset[type]:
    """The classes of the core's own sections, `root` among them."""
    fields = {item.name for item in dataclasses.fields(root)}
    inside = [hint for name, hint in typing.get_type_hints(root).items() if name in fields and isinstance(hint, type)]
    found: set[type] = {root}
    sections: list[Any] = [cls for cls in inside if issubclass(cls, Section)]
    for cls in sections:
        found |= classes_of(cls)
    return frozenset(found)


def section_of(config: Section, cls: type[S]) -> S:
    """The keys that an extension has declared as `cls`, in a configuration.

    Args:
        config: the whole configuration, or any section of it that holds them.

    Raises:
        PluginError: it holds none: `cls` is not named by an entry point of `verl_mt.config_sections`.
    """
    for section in _sections(config):
        if isinstance(section, cls):
            return section
    raise PluginError(f"no section of the configuration is a {cls.__name__}: name it by an entry point of {GROUP}")


def _sections(section: Section) -> Iterator[Section]:
    yield section
    for item in dataclasses.fields(section):
        if isinstance(value := getattr(section, item.name), Section):
            yield from _sections(value)
