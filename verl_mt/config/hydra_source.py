"""How Hydra reads our YAML: every file is normalised when it is loaded, and the shipped folder is always searched.

Two plug-ins of Hydra's public plug-in interface, registered in code (an installed `hydra_plugins` package would reach
into every other Hydra program on the machine). They act only inside `composing()`, or after `register()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from verl_mt.config.groups import GROUPS, group_of, parsed, with_places
from verl_mt.config.normalize import Outcome, Problem, literal, normalize_tree, raise_problems
from verl_mt.config.redact import redact
from verl_mt.config.schema import schema
from verl_mt.config_paths import config_dir, group_folders
from verl_mt.errors import ConfigError
from verl_mt.plugins import optional_function
from verl_mt.reading import parse_yaml

BASE = "base_config"
"""The schema's name in Hydra's ConfigStore."""
_SCHEME = "verlmt"
RUN_DIR = (
    "${verl_mt.run_dir:${hydra.job.chdir},${oc.select:trainer.default_local_dir},${oc.select:trainer.experiment_name}}"
)
"""`hydra.run.dir` where nobody sets it."""
_QUIET = ("hydra/job_logging", "hydra/hydra_logging")
"""Groups of Hydra that would write more log files and lines."""


@dataclass
class Composition:
    """One composition: which file is the primary one, and what was wrong or worth saying in the files."""

    primary: str
    extra_dirs: tuple[Path, ...] = ()
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plain: bool = False
    """No names are changed."""
    explicit: set[str] = field(default_factory=set)
    """Keys of the primary file, where it is not a shipped one."""
    choices: Sequence[str] = ()
    """What the command line chooses of config groups, in Hydra's words."""
    named: set[str] = field(default_factory=set)
    """Config groups in the defaults lists of the files that were read so far."""
    hydra: dict[str, Any] = field(default_factory=dict)
    """Hydra's keys, where the primary file does not set them."""
    output_subdir: str | None = ".hydra"
    """Folder of Hydra's files in the run directory; the run writes them, redacted (`HydraOutput`)."""
    redacted: bool = False
    """Secrets of the files are replaced: Hydra prints or saves what it composes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Composition:
        return self  # Hydra copies its sources; what they find belongs to one composition


_CURRENT: ContextVar[Composition | None] = ContextVar("verl_mt_composition", default=None)
_REGISTERED: list[bool] = []


def register() -> None:
    """Make the schema and the shipped YAML files known to Hydra, for a program with its own `@hydra.main`.

    Afterwards `defaults: [ppo_trainer, _self_]` resolves in a YAML file of any folder, and YAML files may use verl's
    aliases. `python -m verl_mt.trainer` and `compose` need no call.
    """
    _register_plugins()
    _REGISTERED[:] = [True]


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

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        self.composition = _CURRENT.get()  # kept: a launcher may load files in another process

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
        composition = self.composition
        plain = composition is not None and composition.plain
        nested, outcome = (content, Outcome()) if plain else normalize_tree(content, str(file), package)
        if "hydra" in special:
            special["hydra"] = _own_search_path(dict(special["hydra"] or {}), str(file), outcome)
        if composition is None:
            raise_problems(outcome.problems)
        else:
            composition.problems += outcome.problems
            composition.notes += outcome.notes
            is_primary = config_path.removesuffix(".yaml") == composition.primary
            if is_primary and file.parent != config_dir().resolve():
                composition.explicit |= outcome.explicit
            if is_primary:
                _complete_primary(special, composition)
            if entries := special.get("defaults"):
                chosen = [group for group in GROUPS if group in map(group_of, composition.choices)]
                special["defaults"] = with_places(entries, chosen, composition.named, primary=is_primary)
            if composition.redacted:
                nested = redact(nested)
        config = OmegaConf.create({**special, **nested})
        return ConfigResult(config=config, path=f"{_SCHEME}://{self.path}", provider=self.provider, header=header)


def _own_search_path(block: dict[str, Any], where: str, outcome: Outcome) -> dict[str, Any]:
    """Hydra's keys of a file. Names in the files of its search path are normalised too."""
    if "searchpath" not in block:
        return block
    is_shipped, kept = optional_function("is_shipped"), []
    for entry in block["searchpath"] or []:
        if is_shipped and is_shipped(str(entry)):
            text = f"hydra.searchpath entry {entry} ({where}) is left out: the shipped folder is always searched"
            outcome.notes.append(text)
        else:
            kept.append(normalised_folder(entry))
    return {**block, "searchpath": kept}


def _complete_primary(special: dict[str, Any], composition: Composition) -> None:
    """The schema below a primary file without a defaults list, and our values of Hydra's keys that it does not set."""
    defaults = special.setdefault("defaults", [BASE, "_self_"])
    quiet = [{f"override {group}": "none"} for group in _QUIET if group not in str(defaults)]
    special["defaults"] = [*defaults, *quiet]
    block = special.get("hydra", {})
    composition.output_subdir = block.pop("output_subdir", composition.output_subdir)
    ours = {"run": {"dir": RUN_DIR}, "output_subdir": None, **composition.hydra}
    special["hydra"] = OmegaConf.to_container(OmegaConf.merge(ours, block))


def mapping_in(file: Path) -> dict[str, Any]:
    """The content of a YAML file; empty if there is none."""
    content = read_yaml(file) if file.is_file() else None
    return content if isinstance(content, dict) else {}


def hydra_keys_in(file: Path) -> dict[str, Any]:
    """Hydra's keys of a YAML file, which need not exist."""
    block = mapping_in(file).get("hydra")
    return block if isinstance(block, dict) else {}


def has_packages(file: Path) -> bool:
    """Whether a YAML file puts others at places of its choice: `- actor@actor_rollout_ref.actor: dp_actor`."""
    entries = mapping_in(file).get("defaults") or []
    return any("@" in str(key) for entry in entries if isinstance(entry, dict) for key in entry)


def with_search_path(words: Sequence[str], file: Path) -> tuple[list[str], list[Path]]:
    """(overrides with folders of `hydra.searchpath` as `normalised_folder` gives them, the folders that are searched).

    Args:
        words: overrides. If none names folders, those of the file count.
        file: the primary file, which need not exist.
    """
    entries, kept = hydra_keys_in(file).get("searchpath"), list(words)
    for index, word in enumerate(words):
        override = parsed(word) if word.lstrip("+").startswith("hydra.searchpath=") else None
        if override and isinstance(value := override.value(), list):
            entries = value
            kept[index] = f"{word.partition('=')[0]}={literal([normalised_folder(entry) for entry in value])}"
    found = [str(normalised_folder(entry)).partition(f"{_SCHEME}://")[2] for entry in entries or []]
    return kept, [Path(folder) for folder in found if folder]


def normalised_folder(entry: Any) -> Any:
    """An entry of `hydra.searchpath`, so that the names in its files are normalised."""
    scheme, _, path = str(entry).rpartition("://")
    if scheme not in ("", "file", "pkg") or "${" in path:
        return entry
    if scheme == "pkg":
        places = None
        with contextlib.suppress(ImportError):
            places = getattr(find_spec(path.replace("/", ".")), "submodule_search_locations", None)
        if not places:
            return entry
        path = places[0]
    return f"{_SCHEME}://{Path(path).expanduser().resolve()}"


def _run_dir(chdir: bool | None, folder: str | None, experiment: str | None) -> str:
    """The working directory, which needs no making: the run makes its directory when nothing is wrong any more."""
    return str(folder or f"runs/{experiment}") if chdir else "."


class VerlMTSearchPath(SearchPathPlugin):
    """Reads the program's own folders through `VerlMTConfigSource` and adds the shipped one at the end."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        composition = _CURRENT.get()
        if composition is None and not _REGISTERED:
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
    OmegaConf.register_new_resolver("verl_mt.run_dir", _run_dir, replace=True)
