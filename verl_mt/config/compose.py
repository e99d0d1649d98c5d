"""From a command line, YAML files or a Python call to a checked `Config`.

`compose` is what Python users call; `hydra_main` is the body of a command. Both start from the same files::

    schema (base_config) <- config groups (task, scale, ...) <- your YAML file <- groups and keys of the command line
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import os
import re
import sys
import threading
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from verl_mt.config.checks import check
from verl_mt.config.declare import check_option
from verl_mt.config.extended import keys_of_packages
from verl_mt.config.groups import group_of, in_place, is_choice, no_such_file, parsed
from verl_mt.config.hydra_command import command_parser, hydra_of, parse_flags
from verl_mt.config.hydra_source import (
    Composition,
    composing,
    has_packages,
    register,
    stored_schema,
    with_search_path,
)  # fmt: skip
from verl_mt.config.normalize import (
    COMMAND_LINE,
    Outcome,
    Problem,
    Sweep,
    is_key,
    normalize_overrides,
    normalize_tree,
    raise_problems,
)  # fmt: skip
from verl_mt.config.redact import RANDOM, REDACTED, redact, redacted_keys
from verl_mt.config.schema import Config, correction_of, leaves, set_explicit, value_of, whole_keys
from verl_mt.config.short_names import suggest_key
from verl_mt.config_paths import config_dir as shipped_config_dir
from verl_mt.config_paths import configs_root
from verl_mt.errors import ConfigError, VerlMTError
from verl_mt.plugins import extension_function, import_plugins, optional_function

__all__ = [
    "compose", "config_from_mapping", "config_of_command", "config_to_yaml", "hydra_main", "register", "to_config",
]  # fmt: skip

TINY, GENERAL = "tiny", "ppo_trainer"
_COMPOSING = threading.RLock()
"""Hydra composes once at a time in a process."""


def compose(
    overrides: Sequence[str] = (), config_name: str | None = None, config_dir: str | Path | None = None
) -> Config:
    """The configuration that the command line `overrides` would give.

    Args:
        overrides: Hydra overrides, in verl's aliases too: `["data.train_batch_size=8"]`.
        config_name: a YAML file's name (without .yaml), or a path to one. None = `tiny` (the default task), or
            `ppo_trainer` where the overrides bring both their own model and their own training data, so that nothing
            of the default task is inherited.
        config_dir: the folder of that file. None = the shipped one, which is always searched as well.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    _refuse_sweep("compose()", overrides)
    with _COMPOSING:
        return composed(_plan(overrides, config_name, config_dir, ()))


def to_config(tree: DictConfig | dict[str, Any], given: Collection[str] | None = None) -> Config:
    """Any mapping of keys -> a checked `Config`: what it leaves out has the schema's default.

    Args:
        tree: the mapping.
        given: the keys that somebody has set; None = all of the mapping's.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    content = OmegaConf.to_container(tree, resolve=False) if isinstance(tree, DictConfig) else dict(tree)
    assert isinstance(content, dict)
    content.pop("hydra", None)
    nested, outcome = normalize_tree({str(k): v for k, v in content.items()}, "configuration")
    raise_problems(outcome.problems)
    return _checked(nested, _explicit_in_file({item.key for item in outcome.items}) if given is None else given)


def config_from_mapping(tree: DictConfig | dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A configuration that was written earlier (`config.yaml` of a run), with overrides on top.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    lines, outcome = normalize_overrides(list(overrides))
    more = [line for line in lines if line.startswith("~") or group_of(line).startswith(("hydra.", "hydra/"))]
    outcome.problems += [Problem(f"{line} ({COMMAND_LINE}): only key=value here", unknown_key=True) for line in more]
    raise_problems(outcome.problems)
    _say_once(outcome.notes)
    content = OmegaConf.create(OmegaConf.to_container(tree) if isinstance(tree, DictConfig) else dict(tree))
    for item in outcome.items:
        OmegaConf.update(content, item.key, item.value, merge=not isinstance(item.value, dict))
    assert isinstance(content, DictConfig)
    return to_config(content, {item.key for item in outcome.items})


def _explicit_in_file(keys: Collection[str]) -> Collection[str]:
    """What a mapping says on purpose. One with every key is a run's own `config.yaml`: the keys set on purpose were
    checked when the run began, and are not known any more."""
    return () if whole_keys(keys) >= leaves().keys() - keys_of_packages() else keys


def _checked(canonical: DictConfig | dict[str, Any], given: Collection[str]) -> Config:
    """A mapping of schema keys over the schema's defaults, every value and every rule between keys checked.

    Args:
        given: the keys that somebody has set.
    """
    try:
        content = OmegaConf.to_container(canonical) if isinstance(canonical, DictConfig) else canonical
        merged = OmegaConf.merge(stored_schema(), content)  # a class of a ConfigStore would bring further keys
        raise_problems(_value_problems(merged))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_with_hint(" ".join(str(error).split()))) from None
    assert isinstance(config, Config)
    lost = redacted_keys(dataclasses.asdict(config))
    if lost:
        raise ConfigError(
            f"{', '.join(lost)}: {REDACTED} or {RANDOM} stands for a value that is not written to config.yaml, because "
            f"it is a secret or looks like one. Give {'it' if len(lost) == 1 else 'each'} again, as key=value or from "
            "the environment: ${oc.env:NAME}"
        )
    _remember_interpolations(config, merged)
    set_explicit(config, given)
    check(config)
    config.actor_rollout_ref.actor.loss_agg_mode = config.actor_rollout_ref.actor.aggregation
    config.algorithm.rollout_correction = correction_of(config)
    set_explicit(config, given)  # these were filled in, and are no change of the user's
    return config


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, secrets redacted; `compose(config_name=that_file)` reads it back.

    In mappings for other people's code (`reward.kwargs`) a text from the environment stays `${oc.env:NAME}`.
    """
    plain = dataclasses.asdict(config)
    for key in keys_of_packages() & leaves().keys():  # so that the file is read where the package is missing
        if value_of(config, key) == leaves()[key].default:
            _drop(plain, key.split("."))
    for path, (written, resolved) in vars(config).get("_interpolations", {}).items():
        holder = functools.reduce(_below, path[:-1], plain)
        if _below(holder, path[-1]) == resolved:  # nobody has changed it since
            holder[path[-1]] = written
    return OmegaConf.to_yaml(OmegaConf.create(redact(plain)))


def _drop(holder: dict[str, Any], path: list[str]) -> None:
    """A key, and the sections that hold nothing else."""
    name, *rest = path
    if rest:
        _drop(holder[name], rest)
    if not rest or not holder[name]:
        del holder[name]


def _below(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except (KeyError, IndexError, TypeError):
        return None


def _remember_interpolations(config: Config, merged: Any) -> None:
    """Where an open mapping names variables of the environment: the text as it was written, and what it became."""
    names: dict[tuple[Any, ...], tuple[str, str]] = {}

    def look(written: Any, resolved: Any, path: tuple[Any, ...]) -> None:
        if isinstance(written, dict | list):
            for key, value in written.items() if isinstance(written, dict) else enumerate(written):
                look(value, _below(resolved, key), (*path, key))
        elif isinstance(written, str) and "${oc.env:" in written:
            names[path] = (written, resolved)

    for key, leaf in leaves().items():
        value = OmegaConf.select(merged, key) if typing.get_origin(leaf.type) is dict else None
        if OmegaConf.is_dict(value):
            look(OmegaConf.to_container(value, resolve=False), value_of(config, key), tuple(key.split(".")))
    vars(config)["_interpolations"] = names


def hydra_main(
    task: Callable[[Config], None], *, config_name: str | None = None, argv: Sequence[str] | None = None
) -> None:
    """The body of a command: argv -> `Config` -> `task(config)`, under Hydra's own `main`.

    Takes Hydra's command line (docs/hydra.md). An expected error (`VerlMTError`) is printed without a traceback and
    exits with code 2 (3 where the collapse guard stopped a run); the environment variable VERL_MT_TRACEBACK=1 shows the
    traceback.

    Args:
        task: what runs with the configuration.
        config_name: the YAML file where the command line names none; None as in `compose`.
        argv: words of the command line; None = `sys.argv[1:]`.
    """
    try:
        command = Command(sys.argv[1:] if argv is None else argv, config_name, _module_of(task))
        if command.shown():
            return
        run = (extension_function if command.flags.multirun else optional_function)("under_hydra")
        if run:
            run(command, task)
        else:
            task(composed(command.one_plan()))
    except VerlMTError as error:
        if os.environ.get("VERL_MT_TRACEBACK") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None


def config_of_command(
    argv: Sequence[str], config_name: str | None, module: str, usage: str = "[flags] [key=value ...]"
) -> Config | None:
    """What a command works with; None where printing it was all that was asked for (`--cfg job`).

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    command = Command(argv, config_name, module, usage)
    if command.shown():
        return None
    return composed(command.one_plan())


def _module_of(task: Callable[[Config], None]) -> str:
    """The module that a command is started by."""
    module = getattr(task, "__module__", None) or "verl_mt"
    if module != "__main__":
        return module
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem


def _refuse_sweep(who: str, overrides: Sequence[str]) -> None:
    if any(word.lstrip("+") == "hydra.mode=MULTIRUN" for word in overrides):
        raise ConfigError(
            f"{who} takes one configuration. Remove --multirun or hydra.mode=MULTIRUN. To sweep, use "
            "python -m verl_mt.trainer --multirun"
        )


class Command:
    """A command line: Hydra's flags, and overrides."""

    def __init__(
        self, argv: Sequence[str], config_name: str | None, module: str, usage: str = "[flags] [key=value ...]"
    ) -> None:
        self.module = module
        self.parser = command_parser(module, usage)
        self.flags = parse_flags(self.parser, argv)
        self.overrides: list[str] = self.flags.overrides
        folder, more = self.flags.config_path, self.flags.config_dir
        self.file = self.flags.config_name or config_name
        self.folder = _folder(folder, "--config-path") if folder else None
        self.extra = (_folder(more, "--config-dir"),) if more else ()

    def located(self) -> tuple[Path, str]:
        """(folder, name) of the primary file; of the default task's where the command names none."""
        return _locate(self.file or TINY, self.folder, self.extra)

    def plan(self, sweep: Sweep | None = None) -> Plan:
        """What Hydra composes.

        Args:
            sweep: normalises several values of a key; None = they are refused.
        """
        return _plan(self.overrides, self.file, self.folder, self.extra, sweep)

    def one_plan(self) -> Plan:
        """The plan of a command that cannot sweep.

        Raises:
            ConfigError: it is asked to.
        """
        _refuse_sweep(self.module, ["hydra.mode=MULTIRUN"] if self.flags.multirun else self.overrides)
        return self.plan()

    def shown(self) -> bool:
        """Whether something was to be printed, and is."""
        flags = self.flags
        if flags.help:
            self.parser.print_help()
            raise SystemExit(0)
        if flags.cfg == "job" and not (flags.multirun or flags.run or flags.info or flags.package):
            print(config_to_yaml(composed(self.plan())), end="")
        elif flags.cfg or flags.info or flags.hydra_help or flags.shell_completion:
            extension_function("hydra_flags")(self)
        else:
            return False
        return True


@dataclass
class Plan:
    """What Hydra is asked to compose, and what is known of it."""

    base: Path
    """The folder of the primary file `name`."""
    name: str
    lines: list[str]
    """Overrides in our names."""
    composition: Composition
    given: Outcome = field(default_factory=Outcome)
    """What the overrides set."""
    of_command: list[str] = field(default_factory=list)
    """The same without those that stand for a file with packages: another process reads the file itself."""

    def tree(self) -> tuple[DictConfig, str | None]:
        """What Hydra composes, or why it cannot."""
        composition, lines = self.composition, self.lines
        searches = composition.extra_dirs or composition.choices or any("hydra" in line for line in lines)
        with composing(composition):
            try:
                if self.base != shipped_config_dir() or searches:
                    return _read(self.base, self.name, lines), None
                tree = copy.deepcopy(_shipped(self.base, self.name))
                ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(lines), tree)
                return tree, None
            except (HydraException, OmegaConfBaseException) as error:
                return OmegaConf.create(), self.failure(error)

    def failure(self, error: Exception) -> str:
        """What Hydra could not compose."""
        missing, file = getattr(error, "missing_cfg_file", None) or "", self.base / f"{self.name}.yaml"
        if found := _why_missing(missing):
            return f"{file} starts from {found[0]}'s {missing}: {found[1]}"
        if options := getattr(error, "options", None):
            on_command_line = missing.rpartition("/")[0] in map(group_of, self.lines)
            return no_such_file(missing, options, COMMAND_LINE if on_command_line else str(file))
        cause = f": {error.__cause__}" if error.__cause__ else ""
        return _with_hint(" ".join(f"{error}{cause} (config {self.name!r} of {self.base})".split()))


def _plan(
    overrides: Sequence[str],
    config_name: str | None,
    folder: str | Path | None,
    extra: tuple[Path, ...],
    sweep: Sweep | None = None,
) -> Plan:
    base, name = _locate(config_name or TINY, folder, extra)
    overrides, searched = with_search_path(overrides, base / f"{name}.yaml")
    folders = (base, *extra, *searched)
    if any(is_choice(word, folders) or (word.startswith("+") and not is_key(group_of(word))) for word in overrides):
        import_plugins(_named_plugins(overrides))  # they may add files to groups, in Hydra's ConfigStore
    chosen = [word for word in overrides if is_choice(word, folders)]
    lines, given = normalize_overrides([word for word in overrides if word not in chosen], sweep)
    choices, notes = in_place(chosen), list(given.notes)
    own = {item.key for item in given.items}.union(given.swept)
    if config_name is None and {"data.train_files", "actor_rollout_ref.model.path"} <= own:
        base, name = _locate(GENERAL, folder, extra)
        notes.append("own model and own data: starting from config/ppo_trainer.yaml, not from the default task (tiny)")
    composition = Composition(name, extra, list(given.problems), notes)
    with_packages = config_name and (has_packages(base / f"{name}.yaml") or "@" in "".join(choices))
    if with_packages and base != shipped_config_dir():
        of_file = extension_function("file_with_packages")(base, name, choices, composition)
        composition.primary = GENERAL
        return Plan(shipped_config_dir(), GENERAL, of_file + lines, composition, given, [*choices, *lines])
    composition.choices = choices
    return Plan(base, name, [*choices, *lines], composition, given, [*choices, *lines])


def _named_plugins(overrides: Sequence[str]) -> list[str]:
    """What `external_plugins` of the command line names."""
    words = [word for word in overrides if word.lstrip("+").startswith("external_plugins=")]
    override = parsed(words[-1]) if words else None
    value: Any = override.value() if override else None
    return [str(name) for name in value] if isinstance(value, list) else []


def composed(plan: Plan) -> Config:
    """The configuration without a run: Hydra only composes."""
    tree, failure = plan.tree()
    if failure is not None:
        plan.composition.problems.append(Problem(failure))
    with hydra_of(tree) as run_dir:
        return finished(tree, plan, run_dir)


def finished(tree: DictConfig, plan: Plan, run_dir: str | None) -> Config:
    """A composed tree as a checked configuration.

    Args:
        run_dir: `hydra.run.dir` where it is set: the run directory.
    """
    key = "trainer.default_local_dir"
    explicit = {item.key for item in plan.given.items}.union(_explicit_in_file(plan.composition.explicit))
    if run_dir is not None:
        own = OmegaConf.select(tree, key)
        if key in explicit and own is not None and to_absolute_path(own) != run_dir:
            text = f"{key}={own} and hydra.run.dir={run_dir} both name the run directory. Remove one of them"
            plan.composition.problems.append(Problem(text))
        OmegaConf.update(tree, key, run_dir, force_add=True)
        explicit.add(key)
    raise_problems(plan.composition.problems)
    _say_once(plan.composition.notes)
    return _checked(tree, explicit)


def _read(base: Path, name: str, lines: list[str]) -> DictConfig:
    with hydra.initialize_config_dir(config_dir=str(base), version_base="1.3"):
        return hydra.compose(config_name=name, overrides=lines, return_hydra_config=True)


@functools.cache
def _shipped(base: Path, name: str) -> DictConfig:
    """What a shipped file gives without overrides: composed once in a process, and copied for each configuration."""
    tree = _read(base, name, [])
    with open_dict(tree):
        del tree["hydra"]
    return tree


def _locate(config_name: str, folder: str | Path | None, extra: tuple[Path, ...]) -> tuple[Path, str]:
    """(absolute folder, name without .yaml) of the primary file.

    Raises:
        ConfigError: no such file; lists what is there.
    """
    if folder is None and config_name.endswith((".yaml", ".yml")) and Path(config_name).is_file():
        file = Path(config_name).resolve()
        return file.parent, file.stem
    base = shipped_config_dir() if folder is None else _folder(folder, "config_dir")
    name = config_name.removesuffix(".yaml")
    if not any((place / f"{name}.yaml").is_file() for place in (base, *extra, shipped_config_dir())):
        names = ", ".join(sorted(f.stem for f in base.glob("*.yaml"))) or "no YAML file"
        found = _why_missing(name)
        hint = f". {found[1]}" if found else ""
        raise ConfigError(f"--config-name: no {name}.yaml in {base}, which holds {names}{hint}")
    return base, name


def _why_missing(file: str) -> tuple[str, str] | None:
    """(library, reason) where a configuration file is another library's and not offered."""
    why_missing = optional_function("why_missing")
    return why_missing and why_missing(file)


def _folder(path: str | Path, flag: str) -> Path:
    """A folder relative to the working directory, else to the shipped files."""
    given = Path(path).expanduser()
    for candidate in (Path.cwd() / given, configs_root() / given):
        if candidate.is_dir():
            return candidate.resolve()
    raise ConfigError(f"{flag}: no folder {str(path)!r} (looked in {Path.cwd()} and {configs_root()})")


def _value_problems(merged: Any) -> list[Problem]:
    """Bounds and choices of every value, interpolations resolved, with full keys."""
    try:
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:  # one by one, to name the key
        plain = None
        if isinstance(error, UnsupportedInterpolationType):
            import_plugins(merged.external_plugins)  # they may register resolvers
    problems = []
    for key, leaf in leaves().items():
        try:
            if plain is not None:
                value = functools.reduce(operator.getitem, key.split("."), plain)
            else:
                value = OmegaConf.select(merged, key, throw_on_missing=True)
                value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            check_option(key, value, leaf.metadata)
        except ConfigError as error:
            problems.append(Problem(str(error)))
        except OmegaConfBaseException as error:
            problems.append(Problem(_with_hint(f"{key}: {str(error).partition(chr(10))[0]}")))
    return problems


def _with_hint(text: str) -> str:
    """A Jinja text may hold `${...}`, which OmegaConf takes for its own; a resolver has to be registered; a class of
    Hydra's ConfigStore may have an unknown key."""
    if unknown := re.search(r"Key '\w+' not in .* full_key: (?!hydra)(\S+)", text):
        return text + suggest_key(unknown[1])
    if ".custom_chat_template" not in text:
        resolver = "; register the resolver in a file that external_plugins names"
        return text + (resolver if "Unsupported interpolation type" in text else "")
    return f"{text}; if ${{...}} belongs to the Jinja text: save the text as a file and give the file's path"


_SAID: set[str] = set()


def _say_once(notes: Sequence[str]) -> None:
    for note in notes:
        if note not in _SAID:
            _SAID.add(note)
            print(f"config: {note}", file=sys.stderr)
