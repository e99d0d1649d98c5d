"""Hooks that say what a run's steps look like: what delayed a step, and whether the run was dead from its start."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.extensions.inspection.diagnostics.critical_path import Straggler, closing_words
from verl_mt.extensions.inspection.diagnostics.dead_start import DeadStart
from verl_mt.trainer.step_hook import Continue, HookParts, StepHook, StepLine, TrainStep, Verdict

log = logging.getLogger(__name__)


class CriticalPathHook(StepHook):
    """`critical_path/...` of each step and the closing summary's words on it.

    Args:
        folder: the run directory.
        lock_step: see the engine's capability of that name.
    """

    def __init__(self, folder: Path, *, lock_step: bool):
        self.straggler = Straggler()
        self._folder, self._lock_step = folder, lock_step

    @classmethod
    def of(cls, parts: HookParts) -> CriticalPathHook | None:
        """None where conversations delay no step: ahead of their steps, and read from files."""
        trainer, engine = parts.config.trainer, parts.source.stream.runner.context.engine
        if trainer.steps_ahead or trainer.debug_mode == "train_only":
            return None
        return cls(parts.folder, lock_step=engine.capabilities.lock_step)

    def after_update(self, step: TrainStep) -> None:
        step.metrics |= self.straggler.observe(step.groups, step.timing, lock_step=self._lock_step)

    def after_step(self, line: StepLine) -> Verdict:
        line.words |= self.straggler.take_words()
        return Continue()

    def summary(self) -> list[tuple[str, str]]:
        return closing_words(self._folder)


class DeadStartHook(StepHook):
    """Warns once, after the first steps, that nothing could be learned from them."""

    name = "dead_start"

    def __init__(self) -> None:
        self._watch = DeadStart()

    def after_rollout(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        self._watch.observe(step + 1, groups)

    def after_validation(self, step: int, passes: Mapping[str, Sequence[TrajectoryGroup]]) -> None:
        if step == 0:
            self._watch.observe(step, passes["val"])

    def after_step(self, line: StepLine) -> Verdict:
        if dead := self._watch.words(line.number):
            log.warning("step %d: %s", line.number, dead)
            line.metrics["collapse/dead_start"] = 1.0
            line.words["collapse/words"] = dead
        return Continue()

    def state_dict(self) -> dict[str, Any]:
        return self._watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(state)
