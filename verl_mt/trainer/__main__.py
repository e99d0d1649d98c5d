"""`python -m verl_mt.trainer [overrides]`: train a policy on multi-turn rollouts."""

from __future__ import annotations

import logging
import sys

from verl_mt.config.compose import hydra_main
from verl_mt.config.schema import Config
from verl_mt.plugins import extension_function, optional_function


def train(config: Config) -> None:
    """Build and run, or, with `trainer.dry_run`, look at what a run would be."""
    # After the config is known to be right, and before torch, which takes seconds.
    if (show := optional_function("start_lines")) is not None:
        show(config)
    from verl_mt.trainer.display import PrintableFormatter
    from verl_mt.trainer.restarts import run_to_the_end

    terminal = logging.StreamHandler()
    terminal.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[terminal])
    if config.trainer.dry_run:
        raise SystemExit(extension_function("dry_run")(config))
    trainer = run_to_the_end(config)
    if trainer.exit_status:  # so that what a shell or a scheduler has planned for afterwards does not begin
        raise SystemExit(trainer.exit_status)


if __name__ == "__main__":
    try:
        hydra_main(train)
    except KeyboardInterrupt as error:  # Before the first step, or pressed twice; once ends a run with a checkpoint.
        print("interrupted", file=sys.stderr)
        sys.exit(getattr(error, "exit_status", 130))
