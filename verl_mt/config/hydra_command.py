"""Hydra's command line under ours: its flags, what it prints, and the run directory as its output directory."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_mt.config.hydra_source import RUN_DIR
from verl_mt.config.schema import sections
from verl_mt.errors import ConfigError

_HELP = {
    "config_name": "YAML file to start from (a name without .yaml, or a path)",
    "config_path": "Folder of that file (default: the shipped config/)",
    "experimental_rerun": "Refused: it reads a pickle",
    "shell_completion": "Install or uninstall completion: install=bash, uninstall=bash (also zsh, fish)",
}
"""What we say of a flag instead of Hydra's text."""


def command_parser(module: str, usage: str) -> argparse.ArgumentParser:
    """Hydra's own parser, with our help text."""
    parser = get_args_parser()
    parser.prog = f"python -m {module}" if "." in module else module
    parser.usage = f"%(prog)s {usage}"
    parser.description = "Keys are dotted: actor_rollout_ref.rollout.n=4."
    keys = "\n".join(f"  {s.key:36} {s.doc}" for s in sections().values())
    parser.epilog = (
        f"sections:\n{keys}\n\nAll keys with their defaults: python -m verl_mt.config.write_reference, or "
        "docs/configuration.md. Sweeps, groups and Hydra's keys: docs/hydra.md."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.exit_on_error = False
    for action in parser._actions:
        action.help = _HELP.get(action.dest, action.help)
    return parser


def parse_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Raises:
    ConfigError: a flag is unknown, or its value is missing or wrong.
    """
    try:
        flags, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; --help lists the flags") from None
    if unknown:
        raise ConfigError(f"unknown flag {' '.join(unknown)}; --help lists the flags, overrides are key=value")
    if flags.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun reads a pickle, which may run any code. Start from the run's config.yaml instead: "
            "--config-path RUN --config-name config"
        )
    return flags


def hydra_words(flags: argparse.Namespace) -> list[str]:
    """The flags that Hydra's main still has to read: which file it starts from is decided before."""
    words = [f"--{name.replace('_', '-')}" for name in ("run", "multirun", "resolve", "hydra_help", "shell_completion")
             if getattr(flags, name)]  # fmt: skip
    return words + [f"--{name}={getattr(flags, name)}" for name in ("cfg", "package", "info") if getattr(flags, name)]


@contextlib.contextmanager
def hydra_argv(words: list[str]) -> Iterator[None]:
    """Inside, Hydra's main finds these words and lets errors through."""
    before, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        with env_override({"HYDRA_FULL_ERROR": "1"}):
            yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def hydra_of(tree: DictConfig) -> Iterator[str | None]:
    """Takes Hydra's keys out of a composition without a job; inside, interpolations find them. Gives the run directory
    where they say which."""
    instance = HydraConfig.instance()
    before, run_dir = instance.cfg, None
    if "hydra" in tree:
        instance.set_config(copy.copy(tree))
        if OmegaConf.to_container(tree.hydra.run, resolve=False) != {"dir": RUN_DIR}:
            run_dir = to_absolute_path(os.path.expanduser(tree.hydra.run.dir))
        with open_dict(tree):
            del tree["hydra"]
    try:
        yield run_dir
    finally:
        instance.cfg = before


@contextlib.contextmanager
def hydra_job(output_subdir: str | None) -> Iterator[str | None]:
    """Inside, the job of Hydra's main runs. Gives the run directory where Hydra's keys say which.

    Args:
        output_subdir: folder of Hydra's files in the run directory; None = they are not written.
    """
    GlobalHydra.instance().clear()  # the job may compose another configuration
    hydra = HydraConfig.get()
    written = OmegaConf.to_container(hydra.run, resolve=False)
    token = OUTPUT_SUBDIR.set(output_subdir or "")
    try:
        yield hydra.runtime.output_dir if hydra.job.chdir or written != {"dir": RUN_DIR} else None
    finally:
        OUTPUT_SUBDIR.reset(token)


OUTPUT_SUBDIR: ContextVar[str | None] = ContextVar("verl_mt_output_subdir", default=None)
"""Of a job of ours: the folder of Hydra's files, empty = they are not written. None outside of one, also in a program
with its own `@hydra.main`."""
