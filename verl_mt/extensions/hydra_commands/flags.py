"""`--cfg`, `--info`, `--hydra-help` and `--shell-completion`: Hydra prints, and sees no secret."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
from collections.abc import Iterator

import yaml
from omegaconf import OmegaConf

from verl_mt.config.compose import Command, Plan, composed, config_to_yaml
from verl_mt.config.hydra_source import Composition
from verl_mt.config.normalize import raise_problems
from verl_mt.config.redact import redact
from verl_mt.errors import ConfigError
from verl_mt.extensions.hydra_commands.under_hydra import under_hydra, with_hidden


def show(command: Command) -> None:
    """Print what the command's flags ask for.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    flags = command.flags
    if flags.cfg == "job" and not (flags.multirun or flags.run or flags.info):
        print(_package_of(config_to_yaml(composed(command.plan())), flags.package), end="")
        return
    if flags.shell_completion:  # its words are Hydra's: install=bash
        base, name = command.located()
        plan = Plan(base, name, command.overrides, Composition(primary=name, extra_dirs=command.extra))
    else:
        plan = command.plan()
        plan.composition.redacted = True
        raise_problems(plan.composition.problems)
        plan.lines = with_hidden(plan.lines)
    with _redacted_output(flags):
        under_hydra(command, plan, lambda tree: None)
    raise_problems(plan.composition.problems)


def _package_of(text: str, package: str | None) -> str:
    """A configuration's YAML, or the part of it that `--package` names.

    Raises:
        ConfigError: there is no such part.
    """
    if package in (None, "_global_"):
        return text
    missing = object()
    part = OmegaConf.select(OmegaConf.create(text), package, default=missing)
    if part is missing:
        raise ConfigError(f"--package {package}: there is no such section or key")
    return f"# @package {package}\n{OmegaConf.to_yaml(part)}" if OmegaConf.is_config(part) else f"{part}\n"


@contextlib.contextmanager
def _redacted_output(flags: argparse.Namespace) -> Iterator[None]:
    """Inside, Hydra prints: secrets that it resolves are replaced, and its logging ends with it."""
    root, out = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    try:
        if not flags.cfg:
            yield
            return
        with contextlib.redirect_stdout(out):
            yield
        lines = out.getvalue().splitlines(keepends=True)
        head = lines[:1] if lines[:1] and lines[0].startswith("# @package") else []
        content = redact(yaml.safe_load("".join(lines)), (flags.package or "").rpartition(".")[2])
        print(
            "".join(head) + (OmegaConf.to_yaml(content) if isinstance(content, dict | list) else f"{content}\n"), end=""
        )
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
