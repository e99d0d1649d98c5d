"""`python -m verl_mt.doctor [overrides]`: what is wrong with a run, before it begins (docs/doctor.md)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_mt.config.compose import config_of_command
from verl_mt.errors import VerlMTError

if TYPE_CHECKING:
    from rich.console import Console


def main(argv: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """The same as `python -m verl_mt.trainer trainer.dry_run=True [overrides]`: prints the list. Returns the exit
    status: 0, or 2 where something is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        config = config_of_command(words, None, "verl_mt.doctor")
    except VerlMTError as error:
        from verl_mt.doctor.checks import report_uncomposed  # torch and transformers take seconds

        return report_uncomposed(error, console)
    if config is None:
        return 0
    from verl_mt.doctor.checks import report

    return report(config, console)


if __name__ == "__main__":
    sys.exit(main())
