"""Everything a run writes and prints: metrics, rollout rows, trackers, and what a person sees while it goes on."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from tensordict import TensorDict

from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.diagnostics.critical_path import Straggler, closing_words
from verl_mt.diagnostics.dead_start import DeadStart
from verl_mt.rollout.runner import RolloutProgress
from verl_mt.trainer.debug_data import DebugData
from verl_mt.trainer.rollout_files import RolloutFiles
from verl_mt.trainer.run_directory import RunDirectory
from verl_mt.trainer.tracking import JsonLines, Trackers

log = logging.getLogger(__name__)

# (metric, heading, format): the columns of a step's line, left out where the metric is absent.
_COLUMNS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("turns/mean", "turns", "{:.2f}"),
    ("tools/failure_frequency", "failed calls", "{:.2f}"),
    ("response/tokens_mean", "tokens", "{:.0f}"),
    ("rollout/entropy", "entropy", "{:.3f}"),
    ("actor/clipfrac", "clip", "{:.3f}"),
    ("group/zero_variance", "flat", "{:.2f}"),
    ("rollout/logprob_diff_max", "Δlogp", "{:.0e}"),
    ("rollout/tokens_per_s", "tok/s", "{:.0f}"),
    ("time/step_s", "s", "{:.2f}"),
)

_HIDDEN_AT_0 = ("actor/clipfrac", "tools/failure_frequency")
_VALIDATION = (
    ("val/accuracy", "accuracy", "{:.3f}"),
    ("val/accuracy_greedy", "greedy", "{:.3f}"),
    ("val/tool_calls_mean", "calls", "{:.2f}"),
    ("val/truncated", "truncated", "{:.3f}"),
    ("val/failed", "failed", "{:.0f}"),
    ("val/mismatch_rate", "mismatch", "{:.3f}"),
)
_SHOWN_AT_0 = ("val/accuracy", "val/accuracy_greedy")
"""Of a validation: what is nothing at 0 is left out, but an accuracy of 0 is the news."""


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
        if self._rollout_files is not None:
            self._rollout_files.close()
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
        """Show a validation and write the rollouts of its passes, a file each."""
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

    def flush(self) -> None:
        """Wait until the rollout rows that were given are on the disk: a checkpoint says that they are.

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

    def finish(self, step: int) -> None:
        """Mark the run as over and print the closing summary."""
        self.flush()
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


class Display(AbstractContextManager["Display"]):
    """Prints to the console; `live` adds a progress bar that a pipe or a log file would not want."""

    def __init__(self, *, total_steps: int, live: bool, enabled: bool, console: Console | None = None):
        # A file or a pipe has no width of its own; 80 columns would break every line in two.
        self.console = console or (Console() if sys.stdout.isatty() else Console(width=180))
        self._enabled = enabled
        self._total_steps = total_steps
        self._progress: Progress | None = None
        self._task = TaskID(0)
        # Warnings go through the same console, or they would tear the live line.
        self._log = logging.getLogger("verl_mt")
        self._handler = RichHandler(console=self.console, show_path=False, show_time=False)
        if live and enabled:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                TextColumn("{task.fields[phase]}"),
                console=self.console,
                transient=True,
            )

    def __enter__(self) -> Display:
        if self._enabled:
            self._log.addHandler(self._handler)
            self._log.propagate = False
        if self._progress is not None:
            self._task = self._progress.add_task("train", total=self._total_steps, phase="starting")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.removeHandler(self._handler)
        self._log.propagate = True
        if self._progress is not None:
            self._progress.stop()

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._enabled:
            self.console.print(text, highlight=False)

    def resume_at(self, step: int) -> None:
        """Set the bar where a resumed run begins."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def phase(self, text: str) -> None:
        """What is going on right now."""
        if self._progress is not None:
            self._progress.update(self._task, phase=text)

    def rollout(self, progress: RolloutProgress) -> None:
        """Trajectories, tokens per second and tool calls of the rollout in flight."""
        seconds = max(time.monotonic() - progress.started_s, 1e-9)
        self.phase(
            f"rollout {progress.num_finished}/{progress.num_trajectories} trajectories, "
            f"{progress.num_sampled_tokens / seconds:.0f} tok/s, {progress.num_tool_calls} tool calls"
        )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """One line for a finished step."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        cells = [
            f"{head} [bold]{form.format(metrics[key])}[/]"
            for key, head, form in _COLUMNS
            if key in metrics and (metrics[key] or key not in _HIDDEN_AT_0)
        ]
        warn = [
            f"[yellow]{key.split('/')[1]} {metrics[key]:.0f}[/]"
            for key in ("rollout/failed", "rollout/aborted")
            if metrics.get(key)
        ]
        self.note(f"[dim]step[/] {step:>{len(str(self._total_steps))}}/{self._total_steps}  " + "  ".join(cells + warn))

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """One line for a validation pass."""
        cells = [
            f"{head} [bold]{form.format(metrics[key])}[/]"
            for key, head, form in _VALIDATION
            if key in metrics and (metrics[key] or key in _SHOWN_AT_0)
        ]
        self.note(f"[cyan]validation after step {step}:[/]  " + "  ".join(cells))

    def summary(self, title: str, rows: list[tuple[str, str]]) -> None:
        """The closing box."""
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(f"[dim]{name}[/]", value)
        if self._enabled:
            self.console.print(Panel(table, title=title, expand=False))
