"""How Hydra reads our YAML: every file is normalised when it is loaded, and the shipped folder is always searched.

Two plug-ins of Hydra's public plug-in interface, registered in code (an installed `hydra_plugins` package would reach
into every other Hydra program on the machine). They act only inside `composing()`, or after `register()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from verl_mt.config.alias_tables import families
from verl_mt.config.groups import with_places
from verl_mt.config.normalize import Outcome, Problem, normalize_tree, on_purpose, raise_problems
from verl_mt.config.schema import schema
from verl_mt.config_paths import config_dir, group_folders
from verl_mt.errors import ConfigError
from verl_mt.reading import parse_yaml

BASE = "base_config"
"""The schema's name in Hydra's ConfigStore."""
_SCHEME = "verlmt"


@dataclass
class Composition:
    """One composition: which file is the primary one, and what was wrong or worth saying in the files."""

    primary: str
    extra_dirs: tuple[Path, ...] = ()
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plain: bool = False
    """Files are read as Hydra reads them: no names are changed, and only their own folder is searched."""
    explicit: set[str] = field(default_factory=set)
    """Keys of the primary file, where it is not a shipped one."""
    chosen: Sequence[str] = ()
    """Config groups that the command line chooses a file of."""
    named: set[str] = field(default_factory=set)
    """Config groups in the defaults lists of the files that were read so far."""


_CURRENT: ContextVar[Composition | None] = ContextVar("verl_mt_composition", default=None)
_REGISTERED: list[bool] = []


def register() -> None:
    """Make the schema and the shipped YAML files known to Hydra, for a program with its own `@hydra.main`.

    Afterwards `defaults: [ppo_trainer, _self_]` resolves in a YAML file of any folder, and YAML files may use verl's
    aliases. `python -m verl_mt.trainer` and `compose` need no call.
    """
    _register_plugins()
    if not _REGISTERED:
        _REGISTERED.append(True)


@contextlib.contextmanager
def composing(composition: Composition) -> Iterator[Composition]:
    """Inside, the plug-ins are active and collect what is wrong instead of raising."""
    _register_plugins()
    token = _CURRENT.set(composition)
    try:
        yield composition
    finally:
        _CURRENT.reset(token)


def read_yaml(file: Path) -> Any:
    """The content of a YAML file as plain containers, numbers as OmegaConf reads them (1e-6 is a number).

    A `multi_turn:` that appears twice (the shorthand beside sub-keys) is one block; any other duplicate is an error.

    Raises:
        ConfigError: not YAML; names the file and the line.
    """
    try:
        return parse_yaml(file.read_text(encoding="utf-8"), _Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{file}, line {line}: {error.problem or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a YAML file: {error}") from None


class _Loader(get_yaml_loader()):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        blocks = [(k, v) for k, v in node.value if k.value == "multi_turn"]
        if len(blocks) > 1:
            node.value = [pair for pair in node.value if pair[0].value != "multi_turn"] + [_merged(blocks)]
        return super().construct_mapping(node, deep=deep)


def _merged(blocks: list[tuple[yaml.Node, yaml.Node]]) -> tuple[yaml.Node, yaml.Node]:
    """`multi_turn: True` and `multi_turn: {...}` as one mapping; the shorthand becomes its `enable`."""
    key = blocks[0][0]
    pairs: list[Any] = []
    for _, value in blocks:
        if isinstance(value, yaml.MappingNode):
            pairs += value.value
        else:
            pairs.append((yaml.ScalarNode("tag:yaml.org,2002:str", "enable", key.start_mark, key.end_mark), value))
    return key, yaml.MappingNode("tag:yaml.org,2002:map", pairs, key.start_mark, key.end_mark)


class VerlMTConfigSource(FileConfigSource):
    """A folder of YAML files whose keys are normalised on loading."""

    @staticmethod
    def scheme() -> str:
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path)).resolve()
        content = read_yaml(file)
        if not isinstance(content, dict | None):
            raise ConfigError(f"{file}: expected a mapping of keys, got a {type(content).__name__}")
        header = ConfigSource._get_header_dict(file.read_text(encoding="utf-8")[:512])
        content = dict(content or {})
        group = str(Path(config_path).parent).replace("/", ".").strip(".")
        package = {None: group, "_global_": "", "_group_": group}.get(header["package"], header["package"] or "")
        special = {key: content.pop(key) for key in ("defaults", "hydra") if key in content}
        nested, outcome = normalize_tree(content, str(file), package)
        special |= _hydra_block(special, str(file), outcome)
        composition = _CURRENT.get()
        if composition is None:
            raise_problems(outcome.problems)
        else:
            composition.problems += outcome.problems
            composition.notes += outcome.notes
            is_primary = config_path.removesuffix(".yaml") == composition.primary
            if is_primary and file.parent != config_dir().resolve():
                composition.explicit |= on_purpose(outcome)
            if "defaults" not in special and is_primary:
                special["defaults"] = [BASE, "_self_"]
            if entries := special.get("defaults"):
                special["defaults"] = with_places(entries, composition.chosen, composition.named, primary=is_primary)
        config = OmegaConf.create({**special, **nested})
        return ConfigResult(config=config, path=f"{_SCHEME}://{self.path}", provider=self.provider, header=header)


def has_packages(file: Path) -> bool:
    """Whether a YAML file puts others at places of its choice: `- actor@actor_rollout_ref.actor: dp_actor`."""
    content = read_yaml(file)
    entries = content.get("defaults") or [] if isinstance(content, dict) else []
    return any("@" in str(key) for entry in entries if isinstance(entry, dict) for key in entry)


def plain_tree(folder: Path, name: str, choices: list[str]) -> dict[str, Any]:
    """A file and the config groups that it names, merged by Hydra alone; interpolations are kept.

    Args:
        choices: overrides of its groups.

    Raises:
        HydraException: a group, or a file in it, is missing.
    """
    files = hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3")
    with composing(Composition(primary=name, plain=True)), files:
        tree = OmegaConf.to_container(hydra.compose(config_name=name, overrides=choices), resolve=False)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _hydra_block(special: dict[str, Any], where: str, outcome: Outcome) -> dict[str, Any]:
    """Only the search path of `hydra:` has a meaning here; its folders are normalised too."""
    if "hydra" not in special:
        return {}
    block = dict(special["hydra"] or {})
    found = block.pop("searchpath", None) or []
    for name in block:
        outcome.problems.append(
            Problem(f"hydra.{name} ({where}): verl_mt lets Hydra compose only; remove it", unknown_key=True)
        )
    kept, shipped = [], tuple(family.config_folder for family in families().values() if family.config_folder)
    for entry in found:
        if str(entry).rstrip("/").endswith(shipped):
            outcome.notes.append(
                f"hydra.searchpath entry {entry} ({where}) is left out: the shipped folder is always searched"
            )
        elif str(entry).startswith("file://"):
            kept.append(f"{_SCHEME}://{Path(str(entry).removeprefix('file://')).expanduser().resolve()}")
        else:
            kept.append(entry)
    return {"hydra": {"searchpath": kept}} if kept else {"hydra": {}}


class VerlMTSearchPath(SearchPathPlugin):
    """Reads the program's own folders through `VerlMTConfigSource` and adds the shipped one at the end."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        composition = _CURRENT.get()
        if (composition is None and not _REGISTERED) or (composition is not None and composition.plain):
            return
        for element in search_path.get_path():
            if element.provider != "hydra" and "://" not in element.path.removeprefix("file://"):
                element.path = f"{_SCHEME}://{element.path.removeprefix('file://')}"
        for folder in composition.extra_dirs if composition else ():
            search_path.append("command-line", f"{_SCHEME}://{folder}")
        for folder in group_folders():
            search_path.append("verl_mt", f"{_SCHEME}://{folder}")


def stored_schema() -> DictConfig:
    """The schema as Hydra starts from it. Not to be changed."""
    _register_plugins()
    node: DictConfig = ConfigStore.instance().repo[f"{BASE}.yaml"].node
    return node


def _register_plugins() -> None:
    """Idempotent: Hydra keeps plug-ins by class."""
    plugins = Plugins.instance()
    for plugin in (VerlMTConfigSource, VerlMTSearchPath):
        plugins.register(plugin)
    store = ConfigStore.instance()
    if f"{BASE}.yaml" not in store.repo:
        store.store(BASE, node=schema())
