"""A command under Hydra's own main: one run, or a sweep."""

from __future__ import annotations

import argparse
import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mt.config.compose import Command, Plan, composed, finished
from verl_mt.config.groups import parsed
from verl_mt.config.hydra_source import RUN_DIR, composing
from verl_mt.config.normalize import Problem, literal, raise_problems
from verl_mt.config.redact import redact
from verl_mt.config.schema import Config
from verl_mt.plugins import extension_function

OUTPUT_SUBDIR: ContextVar[str | None] = ContextVar("verl_mt_output_subdir", default=None)
"""Of a job of verl_mt: the folder of Hydra's files, empty = they are not written. None outside of one, also in a
program with its own `@hydra.main`."""


def run(command: Command, task: Callable[[Config], None]) -> None:
    """Run the task, or the jobs of a sweep.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong with the command, in one error.
        SystemExit: 1, a job of the sweep failed.
    """
    if command.flags.multirun or _is_sweep(command, plan := command.plan()):
        command.flags.multirun = True
        extension_function("sweep")(command)
        return
    if plan.composition.problems:
        composed(plan)  # raises them with those of the files
    plan.lines.append("hydra.output_subdir=null")  # Hydra would write secrets; the run writes its files
    failure: list[Exception] = []

    def job(tree: DictConfig) -> None:
        try:
            with _hydra_job(plan.composition.output_subdir) as run_dir:
                task(finished(tree, plan, run_dir))
        except Exception as error:
            failure.append(error)
            if HydraConfig.get().callbacks:
                raise  # so that they know; without them Hydra only prints the overrides, secrets included

    try:
        under_hydra(command, plan, job)
    finally:
        if failure:
            raise failure[0]


def _is_sweep(command: Command, plan: Plan) -> bool:
    """Whether the command line or a file, also one of a config group, sets `hydra.mode=MULTIRUN`."""
    if command.file is None and not plan.composition.choices and "hydra.mode=" not in " ".join(plan.lines):
        return False  # the default task sets none, and reading it takes time
    lines = [word for word in plan.lines if (override := parsed(word)) and not override.is_sweep_override()]
    tree, _ = replace(plan, lines=lines).tree()
    return "hydra" in tree and tree.hydra.mode == RunMode.MULTIRUN


def under_hydra(command: Command, plan: Plan, job: Callable[[DictConfig], Any]) -> None:
    """Run a job under Hydra's main.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong, in one error.
    """
    job.__module__ = command.module
    main = hydra.main(version_base="1.3", config_path=str(plan.base), config_name=plan.name)(job)
    with composing(plan.composition), _argv([*_words(command.flags), *plan.lines]):
        try:
            main()
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            plan.composition.problems.append(Problem(plan.failure(error)))
            raise_problems(plan.composition.problems)


def _words(flags: argparse.Namespace) -> list[str]:
    """The flags that Hydra's main still has to read: which file it starts from is decided before."""
    words = [f"--{name.replace('_', '-')}" for name in ("run", "multirun", "resolve", "hydra_help", "shell_completion")
             if getattr(flags, name)]  # fmt: skip
    return words + [f"--{name}={getattr(flags, name)}" for name in ("cfg", "package", "info") if getattr(flags, name)]


@contextlib.contextmanager
def _argv(words: list[str]) -> Iterator[None]:
    """Inside, Hydra's main finds these words and lets errors through."""
    before, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        with env_override({"HYDRA_FULL_ERROR": "1"}):
            yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _hydra_job(output_subdir: str | None) -> Iterator[str | None]:
    """Inside, the job of Hydra's main runs. Gives the run directory where Hydra's keys say which.

    Args:
        output_subdir: folder of Hydra's files in the run directory; None = they are not written.
    """
    GlobalHydra.instance().clear()  # the job may compose another configuration
    keys = HydraConfig.get()
    written = OmegaConf.to_container(keys.run, resolve=False)
    token = OUTPUT_SUBDIR.set(output_subdir or "")
    try:
        yield keys.runtime.output_dir if keys.job.chdir or written != {"dir": RUN_DIR} else None
    finally:
        OUTPUT_SUBDIR.reset(token)


def with_hidden(words: Sequence[str]) -> list[str]:
    """The overrides with secrets replaced."""
    hidden = hidden_words(words)
    return [hidden.get(word, word) for word in words]


def hidden_words(words: Sequence[str]) -> dict[str, str]:
    """Override that holds a secret -> the same with the secret replaced."""
    found: dict[str, str] = {}
    for word in words:
        if (override := parsed(word)) is None:  # said by whoever composes with it
            continue
        path, value = override.key_or_group.split("."), override.value()
        nested = functools.reduce(lambda inner, part: {part: inner}, reversed(path), value)
        shown = functools.reduce(operator.getitem, path, redact(nested))
        if shown != value:
            found[word] = f"{override.get_key_element()}={literal(shown)}"
    return found
