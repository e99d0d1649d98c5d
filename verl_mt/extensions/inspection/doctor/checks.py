"""The list of checks, and the two reports: of a configuration, and of one that does not compose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from rich.console import Console

from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError, VerlMTError
from verl_mt.extensions.inspection.doctor import (
    conversation,
    demonstrations,
    hyperparameters,
    meaning,
    oversights,
    resources,
    settings,
)
from verl_mt.extensions.inspection.doctor.findings import Check, Finding, Subject, run_checks, show
from verl_mt.plugins import suggest
from verl_mt.trainer import build

CHECKS: tuple[Check, ...] = (
    Check("keys", settings.keys),
    Check("plug-ins and trackers", settings.plugins),
    Check("advantages and loss", settings.algorithm, ("plug-ins and trackers",)),
    Check("forgotten keys", oversights.forgotten),
    Check("model", resources.model),
    Check("chat template", conversation.template, ("model",)),
    Check("vocabulary", resources.vocabulary, ("chat template",)),
    Check("stop tokens", conversation.stop_tokens, ("chat template",)),
    Check("engine", settings.engine, ("plug-ins and trackers", "chat template")),
    Check("tools", conversation.tools, ("plug-ins and trackers",)),
    Check("tool calls", conversation.tool_calls, ("plug-ins and trackers", "chat template", "tools")),
    Check("interactions", conversation.interactions, ("plug-ins and trackers",)),
    Check("reward", conversation.reward, ("plug-ins and trackers",)),
    Check("rows", conversation.rows, ("plug-ins and trackers", "forgotten keys")),
    Check("validation rows", oversights.validation_rows, ("rows",)),
    Check("rows' contents", oversights.contents, ("rows",)),
    Check("environment", conversation.environment, ("tools", "rows")),
    Check("prompts", conversation.prompts, ("chat template", "tools", "reward", "rows")),
    Check("prompts' words", oversights.prompt_words, ("prompts",)),
    Check("stop strings", hyperparameters.stop_strings, ("tool calls", "prompts")),
    Check("rollout", conversation.rollout, ("stop tokens", "tool calls", "interactions", "prompts")),
    Check("demonstrations", demonstrations.demonstrations, ("rollout",)),
    Check("reward's meaning", meaning.truths, ("rollout",)),
    Check("learning rate", oversights.learning_rate, ("model",)),
    Check("hyperparameters", hyperparameters.hyperparameters),
    Check("sampling and ratios", settings.ratios),
    Check("records", settings.splits, ("chat template",)),
    Check("steps", conversation.schedule, ("rows",)),
    Check("run directory", settings.run_directory),
    Check("disk", resources.disk, ("model", "rows")),
    Check("memory", resources.memory, ("model",)),
    Check("time", resources.step_time, ("model", "prompts")),
)
"""In the order of the list; a check needs only earlier ones."""

GROUPS: dict[str, tuple[str, ...]] = {
    "configuration": (
        "keys", "plug-ins and trackers", "advantages and loss", "forgotten keys", "learning rate", "hyperparameters",
        "sampling and ratios", "records", "steps",
    ),
    "template": ("model", "chat template", "vocabulary", "stop tokens", "tool calls", "stop strings"),
    "data": ("rows", "validation rows", "rows' contents", "prompts", "prompts' words"),
    "tools": ("tools", "interactions", "environment", "rollout"),
    "reward": ("reward", "demonstrations", "reward's meaning"),
    "resources": ("engine", "run directory", "disk", "memory", "time"),
}  # fmt: skip
"""What `--only` takes. Each check is in one group."""


def checks_of(groups: Sequence[str]) -> list[Check]:
    """The checks of some groups, and those that they need.

    Raises:
        ConfigError: no such group.
    """
    unknown = [name for name in groups if name not in GROUPS]
    if unknown:
        raise ConfigError(
            f"--only {','.join(groups)}: there is no group {unknown[0]!r}{suggest(unknown[0], GROUPS)}. Groups: "
            f"{', '.join(GROUPS)}"
        )
    wanted = {name for group in groups for name in GROUPS[group]}
    for check in reversed(CHECKS):
        wanted |= set(check.needs) if check.name in wanted else set()
    return [check for check in CHECKS if check.name in wanted]


def examine(config: Config, checks: Sequence[Check] = CHECKS, demos: str | None = None) -> list[Finding]:
    """All findings for one configuration. Makes no files.

    Args:
        demos: a file of finished conversations, which are looked at as well.
    """
    build.prepare_process(config)
    with closing(Subject(config, demos=demos)) as subject:
        return list(run_checks(checks, subject))


def report(config: Config, console: Console | None = None, demos: str | None = None, only: Sequence[str] = ()) -> int:
    """Examine and print. Returns the exit status: 0, or 2 where something is wrong.

    Args:
        demos: a file of finished conversations, which are looked at as well.
        only: groups of checks; empty = all. Of the checks that they need, only what is wrong is printed.
    """
    found = examine(config, checks_of(only) if only else CHECKS, demos)
    named = {name for group in only or GROUPS for name in GROUPS[group]}
    shown = [f for f in found if f.check in named or f.status != "ok"]
    return show([Finding("ok", "composes", check="configuration"), *shown], console)


def report_uncomposed(error: VerlMTError, console: Console | None = None) -> int:
    """Print the list of a configuration that does not compose. Returns the exit status, 2."""
    return show([Finding("error", f"{error}\nNothing else was looked at.", check="configuration")], console)
