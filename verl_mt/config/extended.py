"""The schema with the keys that extensions add to it.

An extension declares its keys beside the code that reads them, as a `Section`, and names them by an entry point of the
group `verl_mt.config_sections`::

    @dataclass
    class CurriculumConfig(Section):
        start: float = option(0.1, "Difficulty at the start.", min=0, max=1)

    SECTIONS = ConfigSections({"curriculum": CurriculumConfig})  # curriculum.start=0.3

A section that the core has gets further keys (`{"actor_rollout_ref.rollout": RolloutKeys}`). Override
`Section.problems` to check values that do not go together. Code reads them typed:
`section_of(config, CurriculumConfig).start`.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import typing
from collections.abc import Callable, Iterator, Mapping
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
    """(the whole configuration) -> texts of errors: about keys that the extension reads and others declare. Each names
    its keys, what was found and what to do."""


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
                f"entry point {name!r} of {GROUP} is a {type(sections).__name__}. Expected a ConfigSections "
                "(verl_mt/config/extended.py)"
            )
        for key, cls in sections.sections.items():
            _require_section(f"entry point {name!r} of {GROUP}: {key!r}", key, cls)
    return found


def _require_section(what: str, key: str, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Section) and "__dataclass_fields__" in vars(cls)):
        raise PluginError(f"{what} is {cls!r}. Expected a subclass of Section that is a @dataclass")
    if key in ("", "hydra") or key.startswith("hydra."):
        raise PluginError(f"{what} is no name for a section: choose another name")
    for item in dataclasses.fields(cls):
        if "doc" not in item.metadata:
            raise PluginError(f"{what}: {item.name} is no option. Write {item.name}: TYPE = option(DEFAULT, DOC)")


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
    yield from (f"{at}.{item.name}" for item in dataclasses.fields(cls))
    for name, inside in _sections_in(cls):
        yield from _keys_of(inside, f"{at}.{name}")


def _sections_in(cls: type) -> list[tuple[str, type[Section]]]:
    """(name, class) of the sections right below one."""
    hints = typing.get_type_hints(cls)
    inside = [(item.name, hints[item.name]) for item in dataclasses.fields(cls)]
    return [(name, hint) for name, hint in inside if isinstance(hint, type) and issubclass(hint, Section)]


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
    """The class of the section `key` with the values for it and below it, which are taken out of `given`."""
    fields, more = {item.name: item for item in dataclasses.fields(cls)}, given.pop(key, [])
    owners = dict.fromkeys(fields, "verl_mt")
    for owner, base in more:
        for item in dataclasses.fields(base):
            if (first := owners.setdefault(item.name, owner)) != owner:
                twice = f"{key}.{item.name}".lstrip(".")
                raise PluginError(
                    f"entry point {owner!r} of {GROUP}: {first} has the key {twice} already. Rename yours"
                )
    new: list[tuple[str, type, Any]] = []
    for name, inside in _sections_in(cls):
        if (extended := _extend(inside, f"{key}.{name}".lstrip("."), given, made)) is not inside:
            metadata = fields[name].metadata
            new.append((name, extended, dataclasses.field(default_factory=extended, metadata=metadata)))
    for below in list(given):
        parent, _, name = below.rpartition(".")
        if parent == key and name not in fields:
            (_, inside), *given[below] = given[below]
            extended = _extend(inside, below, given, made)
            new.append((name, extended, option(extended, (inside.__doc__ or below).strip().splitlines()[0])))
    if not new and not more:
        return cls
    bases, namespace = (*(base for _, base in more), cls), {"__doc__": cls.__doc__, "__module__": cls.__module__}
    made[cls] = dataclasses.make_dataclass(cls.__name__, new, bases=bases, namespace=namespace | {"core": cls})
    return made[cls]


def section_of(config: Section, cls: type[S]) -> S:
    """The keys that an extension has declared as `cls`, in a configuration.

    Args:
        config: the whole configuration, or any section of it that holds them.

    Raises:
        PluginError: it holds none: `cls` is not named by an entry point of `verl_mt.config_sections`.
    """
    inside = [config]
    for section in inside:
        if isinstance(section, cls):
            return section
        inside += [value for value in vars(section).values() if isinstance(value, Section)]
    raise PluginError(f"no section of the configuration is a {cls.__name__}: name it by an entry point of {GROUP}")
