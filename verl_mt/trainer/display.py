"""What a person sees while a run goes on: a live line, one tidy line per step, a closing summary."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from verl_mt.rollout.runner import RolloutProgress

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
