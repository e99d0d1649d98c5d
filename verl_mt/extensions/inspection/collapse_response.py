"""What follows when the collapse guard sees a sign: a warning, a bundle to look at, a stop, or the way back."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from verl_mt.config.extended import section_of
from verl_mt.data.row_files import read_rows, rows_of_step
from verl_mt.data.run_files import row_to_trajectory, write_rows, writing
from verl_mt.data.temporary_files import temporary
from verl_mt.data.trajectory import Status
from verl_mt.diagnostics.step_metrics import tool_runs
from verl_mt.errors import CollapseError
from verl_mt.extensions.inspection.config import TrainerKeys, read_thresholds
from verl_mt.extensions.inspection.diagnostics.collapse_guard import CollapseGuard
from verl_mt.extensions.inspection.diagnostics.collapse_guard import Verdict as Finding
from verl_mt.trainer.checkpoint import CheckpointStore, step_of
from verl_mt.trainer.step_hook import Continue, HookParts, RollBack, StepHook, StepLine, Stop, Verdict

log = logging.getLogger(__name__)

MAX_ROLLBACKS = 2
"""A run that collapses again from the same place will do so again: then it is stopped."""
NUM_ROLLOUTS = 8
_WINDOWS_BACK = 4
"""Checkpoints are kept that many windows back: a sign is seen after it began."""

Action = Literal["warn", "stop", "rollback"]


class CollapseResponse(StepHook):
    """Watches the steps of one run and does what `trainer.collapse_guard` says.

    It decides before the step's line is written, so that the line says it; its verdict is carried out after.

    Args:
        config: the trainer's section.
        run: the run directory.
        checkpoints: of the run; with stop and rollback it keeps more of them, so that one is older than a collapse.
    """

    name = "collapse"

    def __init__(self, config: TrainerKeys, run: Path, checkpoints: CheckpointStore):
        self.mode = config.collapse_guard
        self._guard = CollapseGuard(read_thresholds(config.collapse_guard_thresholds))
        self._run, self._checkpoints = run, checkpoints
        self._rollbacks = 0
        if self._acts:
            checkpoints.reach = _WINDOWS_BACK * self._guard.thresholds.window
            # The only one that is older than a collapse in the first steps.
            checkpoints.from_start = True

    @classmethod
    def of(cls, parts: HookParts) -> CollapseResponse:
        return cls(section_of(parts.config.trainer, TrainerKeys), parts.folder, parts.checkpoints)

    @property
    def _acts(self) -> bool:
        return self.mode in ("stop", "rollback")

    def after_step(self, line: StepLine) -> Verdict:
        """Adds `collapse/signs`, 1 for each sign, and where the run is rolled back to."""
        if self.mode == "off":
            return Continue()
        step, found = line.number, self._guard.observe(line.number, line.metrics)
        line.metrics |= found.metrics
        if not found.new:
            return Continue()
        log.warning("step %d: %s", step, found.words)
        if not self._acts:
            return Continue()
        may_roll_back = self.mode == "rollback" and self._rollbacks < MAX_ROLLBACKS
        target = self._good_checkpoint(found, step) if may_roll_back else None
        if target is None:
            # The checkpoint is of the collapsed policy: the same command goes on from there, and does not stop at this
            # sign again.
            return Stop(partial(self._write_bundle, step, found, None), partial(self._farewell, step, found))
        line.metrics["collapse/rolled_back_to"] = float(step_of(target))
        before, after = partial(self._going_back, step, found, target), partial(self._back, step, target)
        return RollBack(before, after, target)

    def _going_back(self, step: int, found: Finding, target: Path) -> None:
        self._write_bundle(step, found, target)
        # Before it is saved: a run that is killed now and resumed must know that this rollback was made.
        self._rollbacks += 1
        self._guard.rolled_back(step_of(target))

    def _back(self, step: int, target: Path) -> None:
        log.warning(
            "step %d: weights and optimizer are those of step %d again (%s); rows and steps go on from where they are, "
            "so no batch comes twice. Rollback %d of %d. To look at: %s",
            step, step_of(target), target, self._rollbacks, MAX_ROLLBACKS, self._bundle(step),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"guard": self._guard.state_dict(), "rollbacks": self._rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._guard.load_state_dict(state.get("guard", {}))
        self._rollbacks = state.get("rollbacks", 0)

    def _good_checkpoint(self, found: Finding, step: int) -> Path | None:
        """The newest from before it began; else the newest from before the window in which it was seen.

        A sign is a mean over a window that has left its range, so it is seen up to a window after what caused it: the
        newest checkpoint of all was most likely written by a policy that is already ill.
        """
        for last in (found.last_good_step, step - self._guard.thresholds.window):
            older = [path for path in self._checkpoints.all() if step_of(path) <= last]
            if older:
                return older[-1]
        return None

    def _bundle(self, step: int) -> Path:
        return self._run / "collapse" / f"step_{step:06d}"

    def _farewell(self, step: int, found: Finding) -> CollapseError:
        good = self._good_checkpoint(found, step)
        why = ""
        if self.mode == "rollback":
            used_up = self._rollbacks >= MAX_ROLLBACKS
            why = " (it was rolled back twice)" if used_up else " (there is no older checkpoint to go back to)"
        back = "" if good is None else (
            f"; from before it began: trainer.resume_mode=resume_path trainer.resume_from_path={good}, with another "
            "learning rate or reward"
        )  # fmt: skip
        return CollapseError(
            f"step {step}: {found.words}. The run stops here{why}. To look at: {self._bundle(step)}. The same command "
            f"goes on after step {step} (a sign that is present is not acted on again until it was gone){back}"
        )

    def _write_bundle(self, step: int, found: Finding, target: Path | None) -> None:
        """`collapse/step_<number>/`: `finding.json`, `config.yaml`, `metrics.jsonl`, `worst_rollouts.jsonl`."""
        with writing(self._run / "collapse"):
            self._write_bundle_to(self._bundle(step), step, found, target)

    def _write_bundle_to(self, folder: Path, step: int, found: Finding, target: Path | None) -> None:
        unfinished = temporary(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name in ("config.yaml", "metrics.jsonl"):
            if (self._run / name).is_file():
                shutil.copy(self._run / name, unfinished / name)
        good = self._good_checkpoint(found, step)
        finding = {
            "step": step,
            "words": found.words,
            "signs": [dataclasses.asdict(sign) for sign in found.signs],
            "thresholds": dataclasses.asdict(self._guard.thresholds),
            "action": "stop" if target is None else "rollback",
            "rolled_back_to": None if target is None else str(target),
            "last_good_step": found.last_good_step,
            "last_good_checkpoint": None if good is None else str(good),
            "worst_rollouts": self._write_worst(step, found, unfinished / "worst_rollouts.jsonl"),
        }
        (unfinished / "finding.json").write_text(json.dumps(finding, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    def _write_worst(self, step: int, found: Finding, file: Path) -> str:
        """The step's rollouts that show the signs, of these those with the lowest reward first; with the highest, where
        the reward rose, because then it is what pays for them."""
        source = rows_of_step(self._run, step)
        if source is None:
            return "not there: trainer.rollout_rows is off"
        names = {sign.name for sign in found.signs}

        def badness(row: dict[str, Any]) -> tuple[int, float]:
            trajectory = row_to_trajectory(row)
            shown = ("truncation_rise" in names and trajectory.status is Status.TRUNCATED) + (
                "tool_use_drop" in names and not tool_runs(trajectory)
            )
            reward = trajectory.reward or 0.0
            return -shown, -reward if found.reward == "rose" else reward

        count = write_rows(file, sorted(read_rows(source.path), key=badness)[:NUM_ROLLOUTS])
        return f"{count} of {source.path.name}"
