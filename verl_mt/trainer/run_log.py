"""Everything a run writes and prints: metrics, rollout rows, trackers, and what a person sees while it goes on."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from tensordict import TensorDict

from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.trainer.display import Display
from verl_mt.trainer.rollout_files import RolloutFiles
from verl_mt.trainer.run_directory import RunDirectory
from verl_mt.trainer.tracking import JsonLines, Trackers

log = logging.getLogger(__name__)

_CURVES = {"reward/mean": "reward", "loss": "loss"}
"""Metric of every step -> its name in the closing box."""


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
    ):
        self.run = run
        self.display = display
        self.tool_names = tuple(tool_names)
        self._trackers = trackers
        self._json_lines = json_lines
        self._rollout_files = rollout_files
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
        if self._rollout_files is not None:
            self._rollout_files.close()
        self._trackers.close("failed" if kind is not None else "finished" if self._over else "stopped")
        self.run.close()

    def metrics(self, step: int, metrics: Mapping[str, float], words: Mapping[str, str] | None = None) -> None:
        """Write the numbers of one step, and texts that belong to them."""
        numbers = {**metrics, **self._carried, **self._trackers.failures()}
        self._carried = {}
        self._json_lines.log(step, {**numbers, **(words or {})})
        self._trackers.log(step, numbers)

    def step(self, step: int, metrics: dict[str, float], words: Mapping[str, str] | None = None) -> None:
        """Write and show a finished step."""
        self.metrics(step, metrics, words)
        self.display.step(step, metrics)

    def saved(self, seconds: float) -> None:
        """A checkpoint was written after the step's line: its time goes into the next one."""
        self._carried["time/checkpoint_s"] = seconds

    def validation(self, step: int, metrics: dict[str, float], passes: Mapping[str, Sequence[TrajectoryGroup]]) -> None:
        """Show a validation and write the rollouts of its passes, a file each."""
        self.display.validation(step, metrics)
        for name, groups in passes.items():
            self._trackers.rollouts(step, name, groups)
        if self._rollout_files is not None:
            for name, groups in passes.items():
                self._rollout_files.validation(name, step, groups)

    def rolled_out(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Hand the training rollouts of a step to the trackers, before the update, which may be what fails."""
        self._trackers.rollouts(step, "train", groups)

    def rollouts(self, step: int, groups: Sequence[TrajectoryGroup], batch: TensorDict | None) -> None:
        """Write the training rollouts of a step, with what the update computed for each token."""
        if self._rollout_files is not None:
            self._rollout_files.training(step, groups, batch)

    def flush(self) -> None:
        """Wait until all rollout rows are on the disk: a checkpoint says that they are.

        Raises:
            CheckpointError: the disk refused one of their files; names it.
        """
        if self._rollout_files is not None:
            self._rollout_files.flush()

    def interrupted(self, step: int) -> None:
        """Say where the run stands and how to go on."""
        self.display.note(
            f"stopped after step {step}; give the same command to go on from the checkpoint in {self.run.path}"
        )

    def finish(self, step: int, more: Sequence[tuple[str, str]] = (), spent: Sequence[tuple[str, str]] = ()) -> None:
        """Mark the run as over and print the closing summary: `spent` are rows before its time, `more` at its end."""
        self.flush()
        self.run.finish()
        self._over = True
        wall_s, cpu_s = time.monotonic() - self._begun[0], _cpu_s() - self._begun[1]
        rows = [*self._before_after(), *spent]
        rows.append(("time", f"{wall_s:.0f} s wall, {cpu_s:.0f} s CPU, {step} steps"))
        folder = self.run.path
        rows += [
            (p.name, f"{folder}/{p.name}")
            for p in sorted(folder.iterdir())
            if not p.name.startswith(".") and p.name != "FINISHED"
        ]
        rows += [("look at it", f"python -m verl_mt.report {folder}"), *more]
        self.display.summary("done", rows)

    def _before_after(self) -> list[tuple[str, str]]:
        """What the run began and ended with: windows of its steps, and whole validations."""
        metrics = self.run.path / "metrics.jsonl"
        # A run without a step and without validation has measured nothing.
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        curves = {name: [line[key] for line in lines if key in line] for key, name in _CURVES.items()}
        rows = [(name, self.display.curve(values)) for name, values in curves.items() if len(values) > 1]
        for key in ("val/accuracy", "val/accuracy_greedy", "val/loss"):
            of = [(line["step"], line[key]) for line in lines if key in line]
            if len(of) > 1:
                (begun, first), (ended, last) = of[0], of[-1]
                rows.append((key, f"{first:.3f} -> [bold green]{last:.3f}[/]  [dim]after steps {begun} and {ended}[/]"))
            elif of:
                rows.append((key, f"[bold]{of[0][1]:.3f}[/]"))
        return rows


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system
