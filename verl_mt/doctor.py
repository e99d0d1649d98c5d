"""`python -m verl_mt.doctor [overrides]`: what is wrong with a run, before it begins (docs/doctor.md)."""

from __future__ import annotations

import sys


def main() -> int:
    """The same as `python -m verl_mt.trainer trainer.dry_run=True [overrides]`."""
    from verl_mt.trainer.doctor import main as examine  # torch and transformers take seconds

    return examine()


if __name__ == "__main__":
    sys.exit(main())
