"""`python -m verl_mt.doctor`: check a configuration, a run, rows or a chat template (docs/doctor.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_mt.config.compose import compose, config_of_command
from verl_mt.config.schema import Config
from verl_mt.data.dataset import SUFFIXES
from verl_mt.data.run_origin import require_trust
from verl_mt.errors import ConfigError, VerlMTError

if TYPE_CHECKING:
    from rich.console import Console

_USAGE = (
    "[RUN | FILE ...] [--only GROUP,...] [--demos FILE] [--ahead] [--model PATH] [flags] [key=value ...]\n\n"
    "RUN: a run directory. FILE: rows (.parquet, .jsonl, .json) to read without a run, with --model as that model's\n"
    "template writes them. --only: configuration, template, data, tools, reward, resources. --only template --model\n"
    "PATH --help lists the options of the report on a template. Nothing named: the configuration of the command line."
)
_WITH_VALUE = ("-cp", "-cn", "-cd", "-c", "-p", "--config-path", "--config-name", "--config-dir", "--cfg", "--package")
"""Hydra's flags whose value is the next word."""


@dataclass
class _Words:
    """What the command line names."""

    runs: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    """Overrides and flags of the configuration."""


def main(argv: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Look at a configuration, a run, files of rows, or a chat template, and print the list.

    `--demos FILE`: finished conversations go through the run's tools, limits and reward, too. `--ahead`: what
    `trainer.max_staleness` would have saved in a finished run.

    Returns:
        The exit status: 0, or 2 where something is wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--demos")
    parser.add_argument("--only", default="")
    parser.add_argument("--model")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--trust", action="store_true")
    own, more = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    only = [name for name in own.only.split(",") if name]
    if only == ["template"] and own.model is not None and not (own.demos or own.ahead or own.trust):
        from verl_mt.extensions.inspection import check_template

        return check_template.run(["--model", own.model, *more])
    words = _sorted(more)
    try:
        if own.trust and not words.runs:
            raise ConfigError("--trust allows the config.yaml of a run: name the run, or leave --trust out")
        if own.ahead:
            return _say_ahead(words, own)
        if words.files:
            return _check_files(words, only, own)
        if own.demos and only and "reward" not in only:
            raise ConfigError(f"--demos is of the group reward, and --only {own.only} leaves it out: add reward")
        if own.model is not None:
            words.rest.append(f"actor_rollout_ref.model.path='{own.model}'")
        config = _config(words, trust=own.trust)
        if config is None:
            return 0
        from verl_mt.extensions.inspection.doctor.checks import checks_of, report  # torch and transformers take seconds

        checks_of(only)
    except VerlMTError as error:
        from verl_mt.extensions.inspection.doctor.checks import report_uncomposed

        return report_uncomposed(error, console)
    return report(config, console, own.demos, only)


def _sorted(words: Sequence[str]) -> _Words:
    found, before = _Words(), ""
    for word in words:
        is_value, before = before in _WITH_VALUE, word
        if is_value or word.startswith(("-", "+", "~")) or "=" in word:
            found.rest.append(word)
        elif word.endswith(SUFFIXES) or ":" in word:
            found.files.append(word)
        else:
            found.runs.append(word)
    return found


def _config(words: _Words, *, trust: bool) -> Config | None:
    """Raises: VerlMTError: everything that is wrong, in one error."""
    if not words.runs:
        return config_of_command(words.rest, None, "verl_mt.doctor", usage=_USAGE)
    folder = _run(words)
    if flags := [word for word in words.rest if word.startswith("-")]:
        raise ConfigError(f"{folder} brings its own config.yaml: leave {' '.join(flags)} out")
    require_trust(folder, trust=trust)
    return compose(words.rest, config_name=str(folder / "config.yaml"))


def _run(words: _Words) -> Path:
    folder = Path(words.runs[0])
    if len(words.runs) > 1:
        raise ConfigError(f"name one run, not {len(words.runs)}: {' '.join(words.runs)}")
    if folder.suffix in (".yaml", ".yml"):
        where = f"--config-path {folder.parent} --config-name {folder.stem}"
        raise ConfigError(f"{folder} is a YAML file. To check the configuration in it, write {where}")
    if not (folder / "config.yaml").is_file():
        flags = [word for word in words.rest if word.startswith("-")]
        hint = f"Or is {flags[0]} misspelt? --help lists the flags" if flags else "Name a run such as runs/tiny"
        raise ConfigError(
            f"{folder} is no run directory (it has no config.yaml), no data file ({', '.join(SUFFIXES)}) and no "
            f"key=value. {hint}"
        )
    return folder


def _check_files(words: _Words, only: Sequence[str], own: argparse.Namespace) -> int:
    from verl_mt.environments.kinds import KEY
    from verl_mt.extensions.inspection import data_check

    other = [*words.runs, *(["--demos"] if own.demos else []), *(f"--only {name}" for name in only if name != "data")]
    other += [word for word in words.rest if not word.startswith(("data.", f"{KEY}.", "-"))]
    if other:
        raise ConfigError(
            f"{words.files[0]} is a data file, which is read without a run: leave {' '.join(other)} out, or name the "
            "file in data.train_files"
        )
    model = [] if own.model is None else ["--model", own.model]
    return data_check.run([*words.files, *words.rest, *model])


def _say_ahead(words: _Words, own: argparse.Namespace) -> int:
    from verl_mt.extensions.inspection.doctor.ahead import table

    try:
        if not words.runs:
            raise ConfigError("--ahead reads a finished run: verl-mt doctor RUN --ahead")
        given = [f"--{name}" for name in ("only", "demos", "model", "trust") if getattr(own, name)]
        if more := [*words.runs[1:], *words.files, *words.rest, *given]:
            raise ConfigError(f"--ahead reads {words.runs[0]} and nothing else: leave {' '.join(more)} out")
        print(table(words.runs[0]))
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
