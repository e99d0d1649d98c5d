"""Weights & Biases. The key comes from the environment; `WANDB_MODE=offline` writes to the run directory only."""

from __future__ import annotations

import secrets
from pathlib import Path

from verl_mt.diagnostics.rollout_table import RolloutTable
from verl_mt.trainer.tracking import Outcome, TrackedRun, Tracker

STEP = "trainer/step"
_EXIT_CODES: dict[Outcome, int] = {"finished": 0, "failed": 1, "stopped": 255}


class Wandb(Tracker):
    """Curves over `trainer/step`, and rollouts as a `wandb.Table`.

    W&B's own step only ever grows, and a run that is resumed from a checkpoint goes over some steps again: the curves
    are drawn over a step of our own. Offline, each start makes a folder of its own with the same run id;
    `wandb sync --append` puts them together.
    """

    def __init__(self, run: TrackedRun):
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id(run.folder),
            dir=str(run.folder.resolve()),  # W&B's own process may have another working directory
            config=run.config,
            resume="allow",
            # It would send the words of the command line, and a secret may stand among them.
            settings=wandb.Settings(x_disable_meta=True),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, STEP: step})

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        shown = self._wandb.Table(columns=list(table.columns), data=table.rows, allow_mixed_types=True)
        self._run.log({f"rollouts/{name}": shown, STEP: step})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=_EXIT_CODES[outcome])


def run_id(folder: Path) -> str:
    """The same on resume, so that the curves go on: kept beside the metrics."""
    file = folder / ".wandb_id"
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return file.read_text()
