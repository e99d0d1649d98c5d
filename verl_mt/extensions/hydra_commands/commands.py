"""A command is one run, or a sweep."""

from __future__ import annotations

from collections.abc import Callable

from verl_mt.config.compose import Command
from verl_mt.config.hydra_source import hydra_keys_in
from verl_mt.config.schema import Config
from verl_mt.extensions.hydra_commands import under_hydra


def run(command: Command, task: Callable[[Config], None]) -> None:
    """Run the task, or the jobs of a sweep.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong with the command, in one error.
        SystemExit: 1, a job of the sweep failed.
    """
    if command.flags.multirun or _mode(command) == "MULTIRUN":
        from verl_mt.extensions.hydra_commands import sweeps  # no run needs it

        command.flags.multirun = True
        sweeps.run(command)
    else:
        under_hydra.run(command, task)


def _mode(command: Command) -> str | None:
    """`hydra.mode`: of the command line, else of the primary file."""
    words = [word for word in command.overrides if word.lstrip("+").startswith("hydra.mode=")]
    if words:
        return words[-1].partition("=")[2]
    base, name = command.located()
    return hydra_keys_in(base / f"{name}.yaml").get("mode") if command.file else None
