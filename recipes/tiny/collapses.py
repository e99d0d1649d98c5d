"""What the collapse guard says of three planted collapses, and of healthy runs (docs/diagnostics.md).

    python recipes/tiny/collapses.py --out runs/collapses                # about ten CPU-minutes
    python recipes/tiny/collapses.py --out runs/collapses --only rate

Prints the first step with a sign for each run. Exit status 1 where a planted collapse is silent, or a healthy run is
not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verl_mt.config.compose import compose
from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.trainer.build import build_trainer

_OPTIM = "actor_rollout_ref.actor.optim"
_HACKED = f"reward.path={Path(__file__).with_name('hacked_rewards.py')}"
PLANTED = {
    "rate": [f"{_OPTIM}.lr=3e-3", "trainer.total_training_steps=14"],
    "form": [
        _HACKED,
        "reward.name=form_without_tools",
        "actor_rollout_ref.rollout.temperature=1.2",
        "data.train_batch_size=8",
        f"{_OPTIM}.lr=6e-4",
        f"{_OPTIM}.lr_warmup_steps=2",
        f"{_OPTIM}.lr_scheduler_type=constant",
        "trainer.total_training_steps=12",
    ],
    "length": [_HACKED, "reward.name=length", "trainer.total_training_steps=25"],
}
HEALTHY = {f"seed {seed}": [f"trainer.seed={seed}", f"data.seed={seed}"] for seed in (11, 12, 13)}


def first_signs(folder: Path, overrides: list[str]) -> tuple[int, list[str]]:
    """(Step, signs) of the first step at which the guard of a run saw something; (0, []) = never."""
    quiet = ["data.val_files=null", "trainer.logger=[]", "trainer.rollout_rows=False", "trainer.export_at_end=False"]
    fresh = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable", "trainer.save_freq=-1"]
    trainer = build_trainer(compose([*quiet, "data.val_max_samples=-1", *fresh, *overrides]))
    trainer.fit()
    for line in read_jsonl_tolerant(trainer.log.run.path / "metrics.jsonl"):
        if line.get("collapse/signs", 0) > 0:
            return line["step"], sorted(k.removeprefix("collapse/") for k in line if k.startswith("collapse/"))
    return 0, []


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/collapses"))
    parser.add_argument("--only", choices=[*PLANTED, *HEALTHY], default=None)
    args, overrides = parser.parse_known_args(argv)
    table, wrong = Table("run", "first step with a sign", "signs"), 0
    for name, words in (PLANTED | HEALTHY).items():
        if args.only in (None, name):
            step, signs = first_signs(args.out / name.replace(" ", "_"), [*words, *overrides])
            wrong += (step == 0) == (name in PLANTED)
            table.add_row(name, str(step or "none"), ", ".join(s for s in signs if s != "signs"))
    Console().print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
