"""Hydra's command line: its flags, and what its own keys say of a composition."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
from collections.abc import Iterator, Sequence

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_mt.config.hydra_source import RUN_DIR
from verl_mt.config.schema import sections
from verl_mt.errors import ConfigError
from verl_mt.plugins import optional_function

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


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """A command line; flags of other libraries are overrides.

    Raises:
        ConfigError: a flag is unknown, or its value is missing or wrong.
    """
    known = parser._option_string_actions
    if any(word.startswith("--") and word.partition("=")[0] not in known for word in argv):
        translate = optional_function("translate_flags")
        argv = translate(argv) if translate else argv
    # Of `--info key=value` the parser would take the override for what to print.
    pairs = zip(argv, [*argv[1:], ""])
    argv = ["--info=all" if word in ("--info", "-i") and "=" in after else word for word, after in pairs]
    try:
        flags, more = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. --help lists the flags") from None
    unknown = [word for word in more if word.startswith("-")]
    if unknown:
        raise ConfigError(f"unknown flag {' '.join(unknown)}. --help lists the flags, overrides are key=value")
    if flags.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun reads a pickle, which may run any code. Start from the run's config.yaml instead: "
            "--config-path RUN --config-name config"
        )
    return flags


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
