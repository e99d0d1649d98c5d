"""From a command line, YAML files or a Python call to a checked `Config`.

`compose` is what Python users call; `hydra_main` is the body of a command. Both start from the same files::

    schema (base_config) <- config groups (task, scale, ...) <- your YAML file <- groups and keys of the command line
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import operator
import os
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mt.config.alias_tables import why_missing
from verl_mt.config.checks import check
from verl_mt.config.declare import check_option
from verl_mt.config.extended import keys_of_packages
from verl_mt.config.groups import GROUPS, group_of, in_place, is_choice, no_such_file, searched_folders
from verl_mt.config.hydra_source import (
    Composition,
    composing,
    has_packages,
    plain_tree,
    register,
    stored_schema,
)
from verl_mt.config.normalize import (
    COMMAND_LINE,
    Problem,
    as_overrides,
    normalize_items,
    normalize_overrides,
    normalize_tree,
    on_purpose,
    raise_problems,
    split_argv,
)  # fmt: skip
from verl_mt.config.redact import RANDOM, REDACTED, redact, redacted_keys
from verl_mt.config.schema import Config, correction_of, leaves, sections, set_explicit, value_of, whole_keys
from verl_mt.config_paths import config_dir as shipped_config_dir
from verl_mt.config_paths import configs_root
from verl_mt.errors import ConfigError, VerlMTError

__all__ = [
    "compose", "config_from_mapping", "config_of_command", "config_to_yaml", "hydra_main", "register", "to_config",
]  # fmt: skip

TINY, GENERAL = "tiny", "ppo_trainer"


def compose(
    overrides: Sequence[str] = (), config_name: str | None = None, config_dir: str | Path | None = None
) -> Config:
    """The configuration that the command line `overrides` would give.

    Args:
        overrides: Hydra overrides, in verl's aliases too: `["data.train_batch_size=8"]`.
        config_name: a YAML file's name (without .yaml), or a path to one. None = `tiny` (the default task), or
            `ppo_trainer` where the overrides bring both their own model and their own training data, so that nothing
            of the default task is inherited.
        config_dir: the folder of that file; None = the shipped one, which is always searched as well.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    return _compose(overrides, config_name, config_dir, ())


def to_config(tree: DictConfig | dict[str, Any]) -> Config:
    """Any mapping of keys -> a checked `Config`: what it leaves out has the schema's default.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    return _to_config(tree, None)


def _to_config(tree: DictConfig | dict[str, Any], given: Collection[str] | None) -> Config:
    """`given`: the keys that somebody has set; None = all of the mapping's."""
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
    _, outcome = normalize_overrides(list(overrides))
    raise_problems(outcome.problems)
    _say_once(outcome.notes)
    content = OmegaConf.create(OmegaConf.to_container(tree) if isinstance(tree, DictConfig) else dict(tree))
    for item in outcome.items:
        OmegaConf.update(content, item.key, item.value, merge=not isinstance(item.value, dict))
    assert isinstance(content, DictConfig)
    return _to_config(content, {item.key for item in outcome.items})


def _explicit_in_file(keys: Collection[str]) -> Collection[str]:
    """What a mapping says on purpose. One with every key is a run's own `config.yaml`: what was given on purpose was
    checked when the run began, and is not known any more."""
    return () if whole_keys(keys) >= leaves().keys() - keys_of_packages() else keys


def _checked(canonical: DictConfig | dict[str, Any], given: Collection[str]) -> Config:
    """A mapping of our own keys over the schema's defaults, every value and every rule between keys checked.

    Args:
        given: the keys that somebody has set.
    """
    try:
        merged = OmegaConf.merge(stored_schema(), canonical)
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
    """The body of a command: argv -> `Config` -> `task(config)`.

    Takes Hydra's `--config-path`, `--config-name`, `--config-dir`, `--cfg job` and `--help`; makes no output folder,
    changes no directory, sets up no logging. An expected error (`VerlMTError`) is printed without a traceback and
    exits with code 2 (3 where the collapse guard stopped a run); the environment variable VERL_MT_TRACEBACK=1 shows the
    traceback.

    Args:
        task: what runs with the configuration.
        config_name: the YAML file where the command line names none; None as in `compose`.
        argv: words of the command line; None = `sys.argv[1:]`.
    """
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        config = config_of_command(words, config_name, getattr(task, "__module__", None) or "verl_mt")
        if config is not None:
            task(config)
    except VerlMTError as error:
        if os.environ.get("VERL_MT_TRACEBACK") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None


def config_of_command(
    argv: list[str], config_name: str | None, module: str, usage: str = "[flags] [key=value ...]"
) -> Config | None:
    """What `hydra_main` hands to its task; None where printing it was all that was asked for (`--cfg job`).

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    flags, overrides = split_argv(argv)
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}" if "." in module else module,
        usage=f"%(prog)s {usage}",
        description="Keys are dotted: actor_rollout_ref.rollout.n=4.",
        epilog="sections:\n"
        + "\n".join(f"  {s.key:36} {s.doc}" for s in sections().values())
        + "\n\nAll keys with their defaults: python -m verl_mt.config.write_reference, or docs/configuration.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config-name", "-cn", help="YAML file to start from (a name without .yaml, or a path)")
    parser.add_argument("--config-path", "-cp", help="folder of that file (default: the shipped config/)")
    parser.add_argument("--config-dir", "-cd", help="one more folder to search")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the configuration and stop")
    parser.add_argument(
        "--resolve", action="store_true", help="accepted beside --cfg: interpolations are always resolved"
    )
    try:
        args, unknown = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; --help lists the flags") from None
    if unknown:
        raise ConfigError(f"unknown flag {' '.join(unknown)}; --help lists the flags, overrides are key=value")
    extra = (_folder(args.config_dir, "--config-dir"),) if args.config_dir else ()
    path = _folder(args.config_path, "--config-path") if args.config_path else None
    config = _compose(overrides, args.config_name or config_name, path, extra)
    if args.cfg:
        print(config_to_yaml(config), end="")
        return None
    return config


def _compose(
    overrides: Sequence[str], config_name: str | None, folder: str | Path | None, extra: tuple[Path, ...]
) -> Config:
    extra += tuple(searched_folders(overrides))  # here too, so that their files may use aliases
    own_file = config_name is not None and _locate(config_name, folder, extra)
    places = (own_file[0], *extra) if own_file else extra
    choices = in_place([word for word in overrides if is_choice(word, places)])
    lines, outcome = normalize_overrides([word for word in overrides if not is_choice(word, places)])
    notes = list(outcome.notes)
    if config_name is None:
        own = {item.key for item in outcome.items}
        general = {"data.train_files", "actor_rollout_ref.model.path"} <= own
        config_name = GENERAL if general else TINY
        if general:
            notes.append(
                "own model and own data: starting from config/ppo_trainer.yaml, not from the default task (tiny)"
            )
    base, name = own_file or _locate(config_name, folder, extra)
    composition = Composition(primary=name, extra_dirs=extra, problems=list(outcome.problems))
    if own_file and base != shipped_config_dir() and (has_packages(base / f"{name}.yaml") or "@" in "".join(choices)):
        theirs = [word for word in choices if (base / group_of(word)).is_dir()]
        lines = _with_packages(base, name, theirs, composition) + lines
        choices = [word for word in choices if word not in theirs]
        base, name = shipped_config_dir(), GENERAL
    composition.chosen = [group for group in GROUPS if group in map(group_of, choices)]
    with composing(composition):
        tree, failure = _hydra_compose(base, name, lines, extra, choices)
    if failure is not None:
        composition.problems.append(Problem(failure))
    raise_problems(composition.problems)
    _say_once(notes + composition.notes)
    return _checked(tree, {item.key for item in outcome.items}.union(_explicit_in_file(composition.explicit)))


def _with_packages(base: Path, name: str, choices: list[str], composition: Composition) -> list[str]:
    """A file with config groups, as overrides of the shipped base.

    Its files are written for places that only Hydra knows, so that names are changed behind Hydra and not while it
    reads; the same file may stand in two places.
    """
    try:
        tree = plain_tree(base, name, choices)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(str(error).split())} (config {name!r} of {base})") from None
    outcome = normalize_items(tree.items(), str(base / f"{name}.yaml"))
    composition.problems += outcome.problems
    composition.notes += outcome.notes
    composition.explicit |= on_purpose(outcome)
    return as_overrides(outcome.items)


def _hydra_compose(
    base: Path, name: str, lines: list[str], extra: tuple[Path, ...] = (), choices: Sequence[str] = ()
) -> tuple[DictConfig, str | None]:
    """Hydra's own composition; its errors as one text."""
    searches = bool(extra or choices) or any("hydra." in line for line in lines)
    try:
        if base == shipped_config_dir() and not searches:
            tree = copy.deepcopy(_shipped(base, name))
            ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(lines), tree)
            return tree, None
        return _read(base, name, [*choices, *lines]), None
    except (HydraException, OmegaConfBaseException) as error:
        missing = getattr(error, "missing_cfg_file", None) or ""
        if (found := why_missing(missing)) is not None:
            return OmegaConf.create(), f"{base / name}.yaml starts from {found[0]}'s {missing}: {found[1]}"
        if options := getattr(error, "options", None):
            of_command = missing.rpartition("/")[0] in map(group_of, choices)
            where = COMMAND_LINE if of_command else f"{base / name}.yaml"
            return OmegaConf.create(), no_such_file(missing, options, where)
        cause = f": {error.__cause__}" if error.__cause__ else ""
        text = " ".join(f"{error}{cause}".split())
        return OmegaConf.create(), _with_hint(f"{text} (config {name!r} of {base})")


def _read(base: Path, name: str, lines: list[str]) -> DictConfig:
    with hydra.initialize_config_dir(config_dir=str(base), version_base="1.3"):
        return hydra.compose(config_name=name, overrides=lines)


@functools.cache
def _shipped(base: Path, name: str) -> DictConfig:
    """What a shipped file gives without overrides: composed once in a process, and copied for each configuration."""
    return _read(base, name, [])


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
        found = why_missing(name)
        hint = f". {found[1]}" if found else ""
        raise ConfigError(f"--config-name: no {name}.yaml in {base}, which holds {names}{hint}")
    return base, name


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
    except OmegaConfBaseException:  # one by one, to name the key
        plain = None
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
    """A Jinja text may hold `${...}`, which OmegaConf takes for its own."""
    if ".custom_chat_template" not in text:
        return text
    return f"{text}; if ${{...}} belongs to the Jinja text: save the text as a file and give the file's path"


_SAID: set[str] = set()


def _say_once(notes: Sequence[str]) -> None:
    for note in notes:
        if note not in _SAID:
            _SAID.add(note)
            print(f"config: {note}", file=sys.stderr)
