"""`--multirun`: every job of a sweep is a separate process, whatever launcher starts it.

A sweep's directory and its jobs' folders are named by the overrides: the same command skips finished jobs and resumes
broken ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.core.override_parser.types import Sweep as SweepValue
from omegaconf import DictConfig, OmegaConf

from verl_mt.config.compose import Command, Plan
from verl_mt.config.normalize import COMMAND_LINE, Outcome, Problem, literal, normalize_overrides, raise_problems
from verl_mt.config.redact import redact
from verl_mt.errors import ConfigError
from verl_mt.extensions.hydra_commands.jobs import OBJECTIVE, SECRETS, Job, JobFailedError, ended, table
from verl_mt.extensions.hydra_commands.under_hydra import hidden_words, under_hydra

_PLACES = {"trainer.default_local_dir", "hydra.run.dir"}
_OF_JOBS = (
    "hydra.searchpath=", "hydra.verbose=", "hydra.job.name=", "hydra.job.chdir=", "hydra/job_logging=",
    "hydra.job_logging.",
)  # fmt: skip
"""Hydra's keys that a job's own process needs. What else they say, the launcher has done."""
_IDENTITY = ".sweep"
"""In a sweep's directory: what tells it from other sweeps."""
_PLUGINS = {f"launcher={name}" for name in ("joblib", "ray", "rq", "submitit")}
_PLUGINS |= {f"sweeper={name}" for name in ("ax", "nevergrad", "optuna")}
"""Hydra's own plug-ins, by the first word of what they are chosen by."""


def run(command: Command) -> None:
    """Run a sweep by Hydra's sweeper and launcher, and print the result of each job.

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong with the command, before the first job.
        SystemExit: 1, a job failed.
    """
    plan = _with_file(command)
    fixed = [word for word in plan.lines if not _is_sweep(word)]
    _check(plan)
    hidden = hidden_words([word for word in fixed if not _is_hydra(word)])
    shown = [hidden.get(word, word) for word in fixed]
    plan.lines = [hidden.get(word, word) for word in plan.lines]
    plan.composition.redacted = True
    OmegaConf.register_new_resolver("verl_mt.job_dir", job_dir, replace=True)
    plan.composition.hydra |= {
        "sweep": {"dir": _sweep_dir(plan, shown), "subdir": "${verl_mt.job_dir:${hydra.job.override_dirname}}"},
        "job": {"config": {"override_dirname": {"exclude_keys": [_key(word) for word in fixed]}}},
    }
    folder = _prepare(plan)
    _claim(folder, _identity(plan, shown))
    plan.lines.append(f"hydra.sweep.dir={literal(str(folder))}")
    words = [hidden.get(word, word) for word in plan.of_command if not _is_sweep(word)]
    words = [word for word in words if not _is_hydra(word) or word.startswith(_OF_JOBS)]
    job = Job(_start(command), words, [_key(word) for word in fixed])
    os.environ[SECRETS] = json.dumps({after: before for before, after in hidden.items()})
    began = time.time()
    try:
        under_hydra(command, plan, job)
    except JobFailedError:
        pass  # the table names it
    finally:
        os.environ.pop(SECRETS)
        lines = ended(folder, began)
        if lines:
            print(table(folder, lines))
    if any(line["status"] == "failed" for line in lines):
        raise SystemExit(1)


def _with_file(command: Command) -> Plan:
    """The plan, with what files sweep (`hydra.sweeper.params`) as words of the command line, which win over them."""
    plan = command.plan(normalize_sweep)
    tree, failure = _first(plan).tree()
    params = None if failure else tree.hydra.sweeper.get("params")
    if not params or "hydra.sweeper.params" in map(_key, command.overrides):
        return plan
    more = [f"{key}={value}" for key, value in params.items()]
    command.overrides = [*more, *command.overrides, "hydra.sweeper.params=null"]
    return command.plan(normalize_sweep)


def normalize_sweep(override: Override, text: str, outcome: Outcome) -> list[str]:
    """Several values of a key in our names: each is checked and translated as if it stood alone.

    Args:
        override: the sweep.
        text: as it was written.
        outcome: gets its key, or what is wrong; the result is empty then.
    """
    value, problems, values = override.value(), outcome.problems, _values(text)
    if not values:
        problems.append(Problem(f"{text} ({COMMAND_LINE}): glob() chooses files of a config group, and this is a key"))
        return []
    lines: list[str] = []
    before = len(problems)
    for one in values:
        more, found = normalize_overrides([f"{override.get_key_element()}={one}"])
        lines += more
        problems += found.problems
        outcome.notes += [note for note in found.notes if note not in outcome.notes]
        if hidden_words(more):
            problems.append(Problem(f"{_key(text)} ({COMMAND_LINE}) is a secret: it cannot be swept"))
    if len(problems) > before:
        return []
    keys = {line.partition("=")[0] for line in lines}
    if len(keys) != 1 or len(lines) != len(values):
        problems.append(Problem(f"{text} ({COMMAND_LINE}): not all of its values set one key. Sweep a key of verl_mt"))
        return []
    key = keys.pop()
    ours = [line.partition("=")[2] for line in lines]
    outcome.swept.append(key.lstrip("+"))
    if ours == values:
        return [f"{key}={override.get_value_string()}"]
    if isinstance(value, IntervalSweep) or (isinstance(value, SweepValue) and value.tags):
        problems.append(Problem(f"{text} ({COMMAND_LINE}): its values mean others here; sweep {key.lstrip('+')}"))
    return [f"{key}=choice({','.join(ours)})"]


def job_dir(overrides: str) -> str:
    """The folder of a job in a sweep: `lr=1e-5,seed=2` of `actor_rollout_ref.actor.optim.lr=1e-5,trainer.seed=2`.

    Args:
        overrides: Hydra's `override_dirname`, without the overrides that all jobs have.
    """
    short = re.sub(r"(^|,)\+*(?:[\w/@]+\.)*([\w/@]+)=", r"\1\2=", overrides)
    if not overrides:
        return "job"
    text = re.sub(r"[^\w.,=+\-]+", "_", short).strip("_.")
    if text == short and len(text) <= 120:
        return text
    return f"{text[:100]}-{_digest(overrides)}"


def _check(plan: Plan) -> None:
    """Adds what is wrong with keys of several overrides to the plan's problems."""
    problems, own = plan.composition.problems, {item.key for item in plan.given.items}
    for key in sorted({key for key in plan.given.swept if plan.given.swept.count(key) > 1 or key in own}):
        problems.append(Problem(f"{key} ({COMMAND_LINE}) is swept and set again: set it once"))
    if places := sorted(_PLACES & {_key(word) for word in plan.lines}):
        text = f"{', '.join(places)} ({COMMAND_LINE}): each job has its own folder. Set hydra.sweep.dir instead"
        problems.append(Problem(text))


def _prepare(plan: Plan) -> Path:
    """The sweep's directory; its files were composed: each of a swept group, with the first value of everything else.

    Raises:
        UnknownKeyError, ConfigError: what is wrong with the command and the files, a key of Hydra holds a secret, or a
            sweeper lacks its metric.
    """
    tree = _composed(_first(plan), plan)
    for choice in plan.composition.choices:
        for value in _values(choice)[1:]:
            key = choice.partition("=")[0]
            _composed(_first(plan, {choice: f"{key}={value}"}), plan)
    plan.composition.problems += _secrets_of_hydra(tree)
    raise_problems(plan.composition.problems)
    hydra = tree.hydra
    metric = {**os.environ, **hydra.job.env_set}.get(OBJECTIVE)
    if metric is None and not str(hydra.sweeper._target_).endswith(".BasicSweeper"):
        raise ConfigError(
            f"hydra/sweeper={hydra.runtime.choices['hydra/sweeper']} optimizes a metric, and none is named. Add "
            f"+hydra.job.env_set.{OBJECTIVE}=reward/mean, or another name of metrics.jsonl"
        )
    return Path(str(hydra.sweep.dir)).expanduser().absolute()


def _secrets_of_hydra(tree: DictConfig) -> list[Problem]:
    """Hydra writes its keys to `multirun.yaml`, and launchers and sweepers need their values."""
    keys = OmegaConf.to_container(tree.get("hydra", OmegaConf.create()), resolve=False)
    assert isinstance(keys, dict)
    keys.pop("overrides", None)  # words of the command line, secrets replaced
    keys.get("job", {}).pop("override_dirname", None)  # the same words
    return [
        Problem(
            f"{key} holds a secret, which Hydra would write to multirun.yaml. Set a variable in your shell instead. "
            "Where a key needs it, write ${oc.env:NAME}"
        )
        for key in _changed(keys, redact(keys), "hydra")
    ]


def _changed(before: Any, after: Any, key: str) -> Iterator[str]:
    """Dotted keys of the values that differ."""
    if isinstance(before, dict):
        for name, value in before.items():
            yield from _changed(value, after[name], f"{key}.{name}")
    elif before != after:
        yield key


def _first(plan: Plan, instead: Mapping[str, str] = {}) -> Plan:
    """With the first value of everything.

    Args:
        instead: sweep -> the override that stands for it.
    """
    lines = [word for word in plan.lines if not _is_sweep(word)]
    for word in plan.lines:
        if values := _values(word):
            lines.append(instead.get(word, f"{word.partition('=')[0]}={values[0]}"))
    return replace(plan, lines=[*lines, "hydra.mode=MULTIRUN"])


def _composed(one: Plan, plan: Plan) -> DictConfig:
    tree, failure = one.tree()
    if failure is not None:
        missing = re.match(r"hydra/((launcher|sweeper)=([a-z0-9]+))", failure)
        is_known = missing is not None and missing[1] in _PLUGINS
        package = f". Install its package: pip install hydra-{missing[3]}-{missing[2]}" if missing and is_known else ""
        plan.composition.problems.append(Problem(failure + package))
    return tree


def _is_sweep(word: str) -> bool:
    return OverridesParser.create().parse_override(word).is_sweep_override()


def _values(word: str) -> list[str]:
    """The values of a sweep, of an interval its ends; empty for one value, and for `glob()`, which only Hydra lists."""
    override = OverridesParser.create().parse_override(word)
    value = override.value()
    if isinstance(value, IntervalSweep):
        return [str(value.start), str(value.end)]
    if not override.is_sweep_override() or isinstance(value, Glob):
        return []
    return list(override.sweep_string_iterator())


def _sweep_dir(plan: Plan, fixed: list[str]) -> str:
    """Named by the overrides of all jobs and by the keys that are swept: with further values it stays the same."""
    swept = sorted(_key(word) for word in plan.lines if _is_sweep(word))
    names = "-".join(dict.fromkeys(key.rpartition(".")[2].replace("/", "_") for key in swept))
    digest = _digest(_identity(plan, fixed))
    return f"runs/sweeps/${{trainer.experiment_name}}-{f'{names[:60]}-' if names else ''}{digest}"


def _identity(plan: Plan, fixed: list[str]) -> str:
    """What all jobs of a sweep have, and the keys that are swept, line by line."""
    own = sorted(word for word in fixed if not _is_hydra(word))
    swept = sorted(_key(word) for word in plan.lines if _is_sweep(word))
    return "\n".join([str(plan.base / plan.name), *own, *swept])


def _claim(folder: Path, identity: str) -> None:
    """Make a sweep's directory, in which finished jobs are skipped.

    Raises:
        ConfigError: it has the jobs of another sweep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _IDENTITY
    if file.exists() and (before := file.read_text(encoding="utf-8")) != identity:
        differ = sorted(set(before.splitlines()) ^ set(identity.splitlines()))
        raise ConfigError(
            f"hydra.sweep.dir={folder} has the jobs of another sweep, different in {', '.join(differ)}. Set "
            "another directory, or repeat that command"
        )
    file.write_text(identity, encoding="utf-8")


def _start(command: Command) -> list[str]:
    """How this command is started, with its files."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words = [sys.executable, *(["-m", command.module] if spec else [str(Path(sys.argv[0]).absolute())])]
    if command.file is not None:
        base, name = command.located()
        words += [f"--config-path={base}", f"--config-name={name}"]
    return words + [f"--config-dir={folder}" for folder in command.extra]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _is_hydra(word: str) -> bool:
    return _key(word).startswith(("hydra.", "hydra/"))
