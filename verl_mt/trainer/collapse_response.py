"""What follows when the collapse guard sees a sign: a warning, a bundle to look at, a stop, or the way back."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from verl_mt.config.options import read_thresholds
from verl_mt.config.schema import TrainerConfig
from verl_mt.data.row_files import read_rows, rows_of_step
from verl_mt.data.run_files import row_to_trajectory, write_rows, writing
from verl_mt.data.temporary_files import temporary
from verl_mt.data.trajectory import Status
from verl_mt.diagnostics.collapse_guard import CollapseGuard, Verdict
from verl_mt.diagnostics.step_metrics import tool_runs
from verl_mt.errors import CollapseError
from verl_mt.trainer.checkpoint import CheckpointStore, step_of

log = logging.getLogger(__name__)

MAX_ROLLBACKS = 2
"""A run that collapses again from the same place will do so once more: then it is stopped."""
NUM_ROLLOUTS = 8
_WINDOWS_BACK = 4
"""Checkpoints are kept that many windows back: a sign is seen after it began."""

Action = Literal["warn", "stop", "rollback"]


class CollapseResponse:
    """Watches the steps of one run and does what `trainer.collapse_guard` says.

    `observe` decides before the step's line is written, so that the line says it; `act` does it after.

    Args:
        config: the trainer's section.
        run: the run directory.
        checkpoints: of the run; with stop and rollback it keeps more of them, so that one is older than a collapse.
    """

    def __init__(self, config: TrainerConfig, run: Path, checkpoints: CheckpointStore):
        self.mode = config.collapse_guard
        self._guard = CollapseGuard(read_thresholds(config.collapse_guard_thresholds))
        self._run, self._checkpoints = run, checkpoints
        self._rollbacks = 0
        self._due: tuple[Verdict, Path | None] | None = None
        if self.needs_start:
            checkpoints.reach = _WINDOWS_BACK * self._guard.thresholds.window

    @property
    def needs_start(self) -> bool:
        """Whether a checkpoint before the first step is wanted: the only one that is older than a collapse at once."""
        return self.mode in ("stop", "rollback")

    @property
    def due(self) -> bool:
        """Whether `act` has something to do."""
        return self._due is not None

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Numbers for the step's line: `collapse/signs`, 1 for each sign, and where the run is rolled back to."""
        if self.mode == "off":
            return {}
        verdict = self._guard.observe(step, metrics)
        found = verdict.metrics
        if verdict.new:
            log.warning("step %d: %s", step, verdict.words)
            if self.needs_start:
                may_roll_back = self.mode == "rollback" and self._rollbacks < MAX_ROLLBACKS
                target = self._good_checkpoint(verdict, step) if may_roll_back else None
                self._due = verdict, target
                if target is not None:
                    found["collapse/rolled_back_to"] = float(step_of(target))
        return found

    def act(self, step: int, save: Callable[[], None], restore: Callable[[Path], None]) -> bool:
        """What `observe` decided. Returns whether the run was rolled back, and saved.

        Args:
            step: the step that was just concluded.
            save: writes a checkpoint of this step.
            restore: takes weights and optimizer from a checkpoint, and nothing else.

        Raises:
            CollapseError: the run stops here; the text says how to go on.
        """
        if self._due is None:
            return False
        (verdict, target), self._due = self._due, None
        with writing(self._run / "collapse"):
            bundle = self._write_bundle(step, verdict, target)
        if target is None:
            # Of the collapsed policy: the same command goes on from there, and does not stop at this sign again.
            save()
            raise CollapseError(self._farewell(step, verdict, bundle))
        restore(target)
        # Before it is saved: a run that is killed now and resumed must know that this rollback was made.
        self._rollbacks += 1
        self._guard.rolled_back(step_of(target))
        save()
        log.warning(
            "step %d: weights and optimizer are those of step %d again (%s); rows and steps go on from where they are, "
            "so no batch comes twice. Rollback %d of %d. To look at: %s",
            step, step_of(target), target, self._rollbacks, MAX_ROLLBACKS, bundle,
        )  # fmt: skip
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"guard": self._guard.state_dict(), "rollbacks": self._rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._guard.load_state_dict(state.get("guard", {}))
        self._rollbacks = state.get("rollbacks", 0)

    def _good_checkpoint(self, verdict: Verdict, step: int) -> Path | None:
        """The newest from before it began; else the newest from before the window in which it was seen.

        A sign is a mean over a window that has left its range, so it is seen up to a window after what caused it: the
        newest checkpoint of all was most likely written by a policy that is already ill.
        """
        for last in (verdict.last_good_step, step - self._guard.thresholds.window):
            older = [path for path in self._checkpoints.all() if step_of(path) <= last]
            if older:
                return older[-1]
        return None

    def _farewell(self, step: int, verdict: Verdict, bundle: Path) -> str:
        good = self._good_checkpoint(verdict, step)
        why = ""
        if self.mode == "rollback":
            used_up = self._rollbacks >= MAX_ROLLBACKS
            why = " (it was rolled back twice)" if used_up else " (there is no older checkpoint to go back to)"
        back = "" if good is None else (
            f"; from before it began: trainer.resume_mode=resume_path trainer.resume_from_path={good}, with another "
            "learning rate or reward"
        )  # fmt: skip
        return (
            f"step {step}: {verdict.words}. The run stops here{why}. To look at: {bundle}. The same command goes on "
            f"after step {step} (a sign that is present is not acted on again until it was gone){back}"
        )

    def _write_bundle(self, step: int, verdict: Verdict, target: Path | None) -> Path:
        """`collapse/step_<number>/`: `finding.json`, `config.yaml`, `metrics.jsonl`, `worst_rollouts.jsonl`."""
        folder = self._run / "collapse" / f"step_{step:06d}"
        partial = temporary(folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in ("config.yaml", "metrics.jsonl"):
            if (self._run / name).is_file():
                shutil.copy(self._run / name, partial / name)
        good = self._good_checkpoint(verdict, step)
        finding = {
            "step": step,
            "words": verdict.words,
            "signs": [dataclasses.asdict(sign) for sign in verdict.signs],
            "thresholds": dataclasses.asdict(self._guard.thresholds),
            "action": "stop" if target is None else "rollback",
            "rolled_back_to": None if target is None else str(target),
            "last_good_step": verdict.last_good_step,
            "last_good_checkpoint": None if good is None else str(good),
            "worst_rollouts": self._write_worst(step, verdict, partial / "worst_rollouts.jsonl"),
        }
        (partial / "finding.json").write_text(json.dumps(finding, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return folder

    def _write_worst(self, step: int, verdict: Verdict, file: Path) -> str:
        """The step's rollouts that show the signs, of these those with the lowest reward first; with the highest, where
        the reward rose, because then it is what pays for them."""
        source = rows_of_step(self._run, step)
        if source is None:
            return "not there: trainer.rollout_rows is off"
        names = {sign.name for sign in verdict.signs}

        def badness(row: dict[str, Any]) -> tuple[int, float]:
            trajectory = row_to_trajectory(row)
            shown = ("truncation_rise" in names and trajectory.status is Status.TRUNCATED) + (
                "tool_use_drop" in names and not tool_runs(trajectory)
            )
            reward = trajectory.reward or 0.0
            return -shown, -reward if verdict.reward == "rose" else reward

        count = write_rows(file, sorted(read_rows(source.path), key=badness)[:NUM_ROLLOUTS])
        return f"{count} of {source.path.name}"
