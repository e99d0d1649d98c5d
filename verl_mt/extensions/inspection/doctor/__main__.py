"""`python -m verl_mt.doctor [overrides]`: what is wrong with a run, before it begins (docs/doctor.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_mt.config.compose import config_of_command
from verl_mt.errors import ConfigError, VerlMTError

if TYPE_CHECKING:
    from rich.console import Console


def main(argv: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """The same as `python -m verl_mt.trainer trainer.dry_run=True [overrides]`: prints the list. `--demos FILE`:
    finished conversations go through the run's tools, limits and reward, too. `--ahead RUN`: what
    `trainer.max_staleness` would have saved in a finished run. Returns the exit status: 0, or 2 where something is
    wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--demos")
    parser.add_argument("--ahead")
    own, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if own.ahead is not None:
        return _say_ahead(own.ahead, words)
    usage = "[--demos FILE | --ahead RUN] [flags] [key=value ...]"
    try:
        config = config_of_command(words, None, "verl_mt.doctor", usage=usage)
    except VerlMTError as error:
        from verl_mt.extensions.inspection.doctor.checks import report_uncomposed  # torch and transformers take seconds

        return report_uncomposed(error, console)
    if config is None:
        return 0
    from verl_mt.extensions.inspection.doctor.checks import report

    return report(config, console, own.demos)


def _say_ahead(run: str, more: Sequence[str]) -> int:
    from verl_mt.extensions.inspection.doctor.ahead import table

    try:
        if more:
            raise ConfigError(f"--ahead {run} reads that run and nothing else: leave {' '.join(more)} out")
        print(table(run))
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
