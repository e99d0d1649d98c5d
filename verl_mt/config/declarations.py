"""YAML files that declare plug-in objects: a list of `{class_name, config, ...}` under one key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mt.config.redact import redact
from verl_mt.config_paths import find_config_file
from verl_mt.errors import ConfigError, DataError, PluginError, UnknownKeyError, error_text
from verl_mt.plugins import OBJECT, given_object, load_object, suggest
from verl_mt.reading import read_yaml


@dataclass(frozen=True)
class Declaration:
    """One entry of such a file."""

    where: str
    """File, list index and name, for errors: `tools.yaml: tools[0] (search)`."""
    class_name: str
    config: dict[str, Any]
    values: dict[str, Any]
    """The whole entry as written, interpolations resolved."""
    file: Path
    """The file that it stands in."""

    def load(self) -> Any:
        """The object that `class_name` names.

        Raises:
            PluginError: it does not resolve; names file, entry and what exists instead.
        """
        return load_object(self.class_name, what=f"{self.where}: class_name")

    def load_class(self, base: type) -> type:
        """The class that `class_name` names.

        Raises:
            PluginError: not a subclass of `base`.
        """
        found = self.load()
        if not (isinstance(found, type) and issubclass(found, base)):
            raise PluginError(
                f"{self.where}: class_name {self.class_name!r} is {_describe(found)}. "
                f"Expected a subclass of {base.__module__}.{base.__qualname__}"
            )
        return found

    def build(self, make: Callable[..., Any], **kwargs: Any) -> Any:
        """Call the constructor.

        Raises:
            PluginError: it raised; the original exception is the `__cause__`.
        """
        try:
            return make(**kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise PluginError(
                f"{self.where}: making {self.class_name} with config {redact(self.config, 'config')!r} raised "
                f"{error_text(error, named=True)}. Correct the entry's config or the constructor."
            ) from error


def load_declarations(path: str | Path, *, key: str, config_key: str, fields: tuple[str, ...]) -> list[Declaration]:
    """Read the entries of a declaration file.

    Args:
        path: the YAML file, as a user wrote it (see `find_config_file`), or `object:name`: a list of such entries.
        key: the top-level key of the list (`tools`, `interaction`).
        config_key: where the path came from, for the error.
        fields: keys that an entry may have beside `class_name` and `config`.

    Raises:
        ConfigError: no such file, not YAML, not the expected shape; names file, entry and what to write.
        UnknownKeyError: an entry has a key that nothing reads.
    """
    if isinstance(path, str) and path.startswith(OBJECT):
        file, entries = Path(path), given_object(path, config_key)
    else:
        file = find_config_file(path, key=config_key)
        entries = _read(file, key)
    declarations = []
    for index, entry in enumerate(entries):
        where = f"{file}: {key}[{index}]"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: expected a mapping with class_name, got {entry!r}")
        known = ("class_name", "config", *fields)
        for name in entry:
            if name not in known:
                raise UnknownKeyError(
                    f"{where}: unknown key {name!r}{suggest(str(name), known)}. Known: {', '.join(known)}"
                )
        class_name, config = entry.get("class_name"), entry.get("config")
        if not isinstance(class_name, str) or not class_name.strip():
            raise ConfigError(
                f"{where}: class_name is {class_name!r}. Write the dotted path of the class, "
                "e.g. my_package.my_module.MyClass"
            )
        if config is not None and not isinstance(config, dict):
            raise ConfigError(f"{where} ({class_name}): config must be a mapping, got {config!r}")
        declarations.append(Declaration(f"{where} ({class_name})", class_name.strip(), dict(config or {}), entry, file))
    return declarations


def _read(file: Path, key: str) -> list[Any]:
    try:
        read_yaml(file)  # its bounds: OmegaConf has none
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True, throw_on_missing=True)
    except DataError as error:
        raise ConfigError(str(error)) from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as YAML: {error}") from error
    example = f"{key}:\n  - class_name: my_package.my_module.MyClass\n    config: {{}}"
    if not isinstance(content, dict) or key not in content:
        got = f"keys {list(content)}" if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{file}: expected the key {key!r} at the top, got {got}. Write:\n{example}")
    extra = [name for name in content if name != key]
    if extra:
        raise UnknownKeyError(f"{file}: unknown top-level key {extra[0]!r}. Only {key!r} is read")
    if not isinstance(content[key], list) or not content[key]:
        raise ConfigError(
            f"{file}: {key} must be a list with at least one entry, got {content[key]!r}. Write:\n{example}"
        )
    return content[key]


def _describe(value: Any) -> str:
    if isinstance(value, type):
        bases = ", ".join(f"{b.__module__}.{b.__qualname__}" for b in value.__mro__[1:-1]) or "nothing"
        return f"a class that inherits from {bases}"
    return f"a {type(value).__name__}"
