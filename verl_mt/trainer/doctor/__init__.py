"""The doctor: everything that can be looked at before a run, as a short list of what is fine and what is not.

`python -m verl_mt.trainer trainer.dry_run=True ...` and `python -m verl_mt.doctor ...` are the same thing: they
compose the configuration, load tokenizer, template, tools, interactions and reward, render a few rows, read a written
tool call back, run a rollout with a scripted model, and compare settings, disk, memory and time with what is here. No
weights are loaded and no run directory is made. Exit status 0: nothing wrong (perhaps warnings); 2: errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from verl_mt.config.schema import Config
from verl_mt.errors import VerlMTError
from verl_mt.trainer import build
from verl_mt.trainer.doctor import chat_checks, data_checks, resource_checks, rollout_check, setting_checks
from verl_mt.trainer.doctor.findings import Check, Finding, run_checks
from verl_mt.trainer.doctor.subject import Subject
from verl_mt.trainer.doctor.table import show

CHECKS: tuple[Check[Subject], ...] = (
    Check("plug-ins and trackers", setting_checks.plugins),
    Check("model", resource_checks.model),
    Check("chat template", chat_checks.template, ("model",)),
    Check("vocabulary", resource_checks.vocabulary, ("chat template",)),
    Check("stop tokens", chat_checks.stop_tokens, ("chat template",)),
    Check("engine", setting_checks.engine, ("plug-ins and trackers", "chat template")),
    Check("tools", chat_checks.tools, ("plug-ins and trackers",)),
    Check("tool calls", chat_checks.tool_calls, ("plug-ins and trackers", "chat template", "tools")),
    Check("interactions", chat_checks.interactions, ("plug-ins and trackers",)),
    Check("reward", data_checks.reward, ("plug-ins and trackers",)),
    Check("rows", data_checks.rows, ("plug-ins and trackers",)),
    Check("prompts", data_checks.prompts, ("chat template", "tools", "reward", "rows")),
    Check("rollout", rollout_check.rollout, ("stop tokens", "tool calls", "interactions", "prompts")),
    Check("sampling and ratios", setting_checks.ratios),
    Check("records", setting_checks.splits, ("chat template",)),
    Check("steps", data_checks.schedule, ("rows",)),
    Check("run directory", setting_checks.run_directory),
    Check("disk", resource_checks.disk, ("model", "rows")),
    Check("memory", resource_checks.memory, ("model",)),
    Check("time", resource_checks.step_time, ("model", "prompts")),
)
"""In the order of the list; a check needs only earlier ones."""


def examine(config: Config, checks: Sequence[Check[Subject]] = CHECKS) -> list[Finding]:
    """All findings for one configuration. Makes no files."""
    build.prepare_process(config)
    return list(run_checks(checks, Subject(config)))


def report(config: Config, console: Console | None = None) -> int:
    """Examine and print. Returns the exit status: 0, or 2 where something is wrong."""
    return show([Finding("configuration", "ok", "composes"), *examine(config)], console)


def report_uncomposed(error: VerlMTError, console: Console | None = None) -> int:
    """Print the list of a configuration that does not compose. Returns the exit status, 2."""
    skipped = [Finding(check.name, "skipped", "needs configuration") for check in CHECKS]
    return show([Finding("configuration", "error", str(error)), *skipped], console)
