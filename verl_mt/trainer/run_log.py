"""Everything a run writes and prints, in one place: metrics, rollout rows, trackers, display, closing summary."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import fmean
from types import TracebackType

from tensordict import TensorDict

from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.diagnostics.dead_start import DeadStart
from verl_mt.trainer.debug_data import DebugData
from verl_mt.trainer.display import Display
from verl_mt.trainer.rollout_files import RolloutFiles
from verl_mt.trainer.run_directory import RunDirectory
from verl_mt.trainer.straggler import Straggler, closing_words
from verl_mt.trainer.tracking import JsonLines, Trackers

log = logging.getLogger(__name__)


class RunLog(AbstractContextManager["RunLog"]):
    """Files under the run directory, trackers and the console."""

    def __init__(
        self,
        run: RunDirectory,
        display: Display,
        trackers: Trackers,
        json_lines: JsonLines,
        *,
        tool_names: Sequence[str],
        rollout_files: RolloutFiles | None,
        debug: DebugData | None = None,
    ):
        self.run = run
        self.display = display
        self.tool_names = tuple(tool_names)
        self._trackers = trackers
        self._json_lines = json_lines
        self.debug = debug
        self._rollout_files = rollout_files
        self.straggler = Straggler()
        self.dead_start = DeadStart()
        self._carried: dict[str, float] = {}
        self._over = False
        self._begun = (time.monotonic(), _cpu_s())

    def __enter__(self) -> RunLog:
        self.display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.__exit__(kind, error, trace)
        self._trackers.close("failed" if kind is not None else "finished" if self._over else "stopped")
        self.run.close()

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of one step."""
        metrics = metrics | self._carried | self._trackers.failures()
        self._carried = {}
        words = self.straggler.take_words()
        if dead := self.dead_start.words(step):
            log.warning("step %d: %s", step, dead)
            metrics["collapse/dead_start"] = 1.0
            words["collapse/words"] = dead
        self._json_lines.log(step, {**metrics, **words})
        self._trackers.log(step, metrics)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write and show a finished step."""
        self.metrics(step, metrics)
        self.display.step(step, metrics)

    def saved(self, seconds: float) -> None:
        """A checkpoint was written after the step's line: its time goes into the next one."""
        self._carried["time/checkpoint_s"] = seconds

    def validation(self, step: int, metrics: dict[str, float], passes: Mapping[str, Sequence[TrajectoryGroup]]) -> None:
        """Show a validation and write the rollouts of its passes, a file `<name>_<step>.jsonl` each."""
        self.display.validation(step, metrics)
        if step == 0:
            self.dead_start.observe(step, passes["val"])
        for name, groups in passes.items():
            self.dump(f"{name.replace('val', 'eval', 1)}_{step}", groups)
            self._trackers.rollouts(step, name, groups)
        if self._rollout_files is not None:
            for name, groups in passes.items():
                self._rollout_files.validation(name, step, groups)

    def dump(self, rollout_id: int | str, groups: Sequence[TrajectoryGroup]) -> None:
        """Save a rollout where `trainer.debug_rollout_data` says; before the update, which may be what fails."""
        if isinstance(rollout_id, int):
            self._trackers.rollouts(rollout_id + 1, "train", groups)
        if self.debug is not None:
            self.debug.save(rollout_id, groups)

    def rollouts(self, step: int, groups: Sequence[TrajectoryGroup], batch: TensorDict | None) -> None:
        """Write the training rollouts of a step, with what the update computed for each token."""
        self.dead_start.observe(step, groups)
        if self._rollout_files is not None:
            self._rollout_files.training(step, groups, batch)

    def interrupted(self, step: int) -> None:
        """Say where the run stands and how to go on."""
        self.display.note(
            f"stopped after step {step}; give the same command to go on from the checkpoint in {self.run.path}"
        )

    def finish(self, step: int) -> None:
        """Mark the run as over and print the closing summary."""
        self.run.finish()
        self._over = True
        wall_s, cpu_s = time.monotonic() - self._begun[0], _cpu_s() - self._begun[1]
        rows = [*self._before_after(), *closing_words(self.run.path)]
        rows.append(("time", f"{wall_s:.0f} s wall, {cpu_s:.0f} s CPU, {step} steps"))
        folder = self.run.path
        rows += [
            (p.name, f"{folder}/{p.name}")
            for p in sorted(folder.iterdir())
            if not p.name.startswith(".") and p.name != "FINISHED"
        ]
        rows.append(("look at it", f"python -m verl_mt.report {folder}"))
        self.display.summary("done", rows)

    def _before_after(self) -> list[tuple[str, str]]:
        metrics = self.run.path / "metrics.jsonl"
        # A run without a step and without validation has measured nothing.
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
        curve = [("reward", f"{rewards[0]:.3f} {sparkline(rewards)} {rewards[-1]:.3f}")] if len(rewards) > 1 else []
        validated = [line for line in lines if "val/accuracy" in line]
        if not validated:
            return curve
        first, last = validated[0], validated[-1]
        return curve + [
            (
                key,
                f"{first[key]:.3f} -> [bold green]{last[key]:.3f}[/]"
                if len(validated) > 1
                else f"[bold]{last[key]:.3f}[/]",
            )
            for key in ("val/accuracy", "val/accuracy_greedy")
            if key in first and key in last
        ]


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as one line of bars, averaged into at most `width` of them; the lowest bar is the smallest value."""
    size = max(1, -(-len(values) // width))
    means = [fmean(values[k : k + size]) for k in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (m - low) / (high - low)) if high > low else 0] for m in means)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system
