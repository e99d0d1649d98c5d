"""What a person sees of a run: a line for each step and validation, as wide as the terminal, and the closing box."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from verl_mt.bounds import MAX_PAGE_CHARACTERS, printable
from verl_mt.diagnostics.step_metrics import first_and_last
from verl_mt.rollout.runner import RolloutProgress

_NARROWEST, _WIDEST = 80, 120
"""Columns of output that goes into a file or a pipe."""
_WIDE = 100
"""Columns from which a longer bar fits."""


@dataclass(frozen=True)
class _Column:
    """A number of a line: left out where the metric is absent, or where the line is full."""

    metric: str
    heading: str
    form: str | Callable[[float], str]
    rank: int
    """Which columns a narrow terminal shows: those of the lowest rank."""
    at_0: bool = True
    """Shown at 0, too."""

    def cell(self, metrics: Mapping[str, float]) -> str | None:
        value = metrics.get(self.metric)
        if value is None or not (value or self.at_0):
            return None
        text = self.form.format(value) if isinstance(self.form, str) else self.form(value)
        return f"{self.heading} [bold]{text}[/]"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:6.1f} min"


# What comes and goes stands at the end, so that the lines of a run are columns.
_STEP = (
    _Column("reward/mean", "reward", "{:6.3f}", 0),
    _Column("loss", "loss", "{:6.3f}", 0),
    _Column("turns/mean", "turns", "{:5.2f}", 5),
    _Column("group/zero_variance", "flat", "{:.2f}", 4),
    _Column("response/tokens_mean", "tokens", "{:5.0f}", 7),
    _Column("rollout/entropy", "entropy", "{:.3f}", 8),
    _Column("rollout/logprob_diff_max", "Δlogp", "{:.0e}", 11),
    _Column("lr", "lr", "{:.1e}", 5),
    _Column("actor/grad_norm", "grad", "{:7.3f}", 12),
    _Column("grad_norm", "grad", "{:7.3f}", 6),
    _Column("tokens", "tokens", "{:5.0f}", 7),
    _Column("rollout/tokens_per_s", "tok/s", "{:5.0f}", 9),
    _Column("time/step_s", "s", "{:6.2f}", 6),
    _Column("time_s", "s", "{:6.2f}", 4),
    _Column("left_s", "left", _minutes, 1),
    _Column("actor/clipfrac", "clip", "{:.3f}", 10, at_0=False),
    _Column("tools/failure_frequency", "failed calls", "{:.2f}", 3, at_0=False),
    _Column("rollout/failed", "[yellow]failed[/]", "{:.0f}", 1, at_0=False),
    _Column("rollout/aborted", "[yellow]aborted[/]", "{:.0f}", 2, at_0=False),
)
_VALIDATION = (
    _Column("val/accuracy", "accuracy", "{:.3f}", 0),
    _Column("val/accuracy_greedy", "greedy", "{:.3f}", 1),
    _Column("val/loss", "loss", "{:.3f}", 2),
    _Column("val/tool_calls_mean", "calls", "{:.2f}", 5, at_0=False),
    _Column("val/truncated", "truncated", "{:.3f}", 4, at_0=False),
    _Column("val/failed", "failed", "{:.0f}", 2, at_0=False),
    _Column("val/mismatch_rate", "mismatch", "{:.3f}", 6, at_0=False),
)


def terminal(*, stderr: bool = False) -> Console:
    """A console that is as wide as the terminal. What goes into a file or a pipe is as wide as the terminal that the
    command runs in, from 80 to 120 columns; without one, 120. COLUMNS in the environment decides before all."""
    made = Console(stderr=stderr)
    if made.is_terminal or made.is_jupyter or os.environ.get("COLUMNS"):
        return made
    columns = next((size for size in map(_columns_of, (sys.stderr, sys.stdin)) if size), _WIDEST)
    return Console(stderr=stderr, width=min(max(columns, _NARROWEST), _WIDEST))


def _columns_of(stream: Any) -> int:
    """Of the terminal behind a stream; 0 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):  # a pipe; a closed file; no file at all, as in a notebook
        return 0


def one_line(head: str, columns: Sequence[_Column], metrics: Mapping[str, float], width: int) -> Text:
    """`head` and the columns that fit beside it, the most important ones, in their own order."""
    cells = [(column.rank, k, text) for k, column in enumerate(columns) if (text := column.cell(metrics)) is not None]
    line = Text.from_markup(head)
    left = width - line.cell_len
    kept: list[tuple[int, Text]] = []
    for _, k, text in sorted(cells):
        cell = Text.from_markup("  " + text)
        left -= cell.cell_len
        if left < 0:  # and nothing less important in its stead: a column would come and go with its digits
            break
        kept.append((k, cell))
    for _, cell in sorted(kept, key=lambda item: item[0]):
        line.append_text(cell)
    return line


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as one line of bars, averaged into at most `width` of them; the lowest bar is the smallest value."""
    size = max(1, -(-len(values) // width))
    means = [fmean(values[k : k + size]) for k in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (m - low) / (high - low)) if high > low else 0] for m in means)


class PrintableFormatter(logging.Formatter):
    """Log records as a terminal may get them: long ones cut, control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), MAX_PAGE_CHARACTERS)


class Display(AbstractContextManager["Display"]):
    """Prints to the console; `live` adds a progress bar that a pipe or a log file would not want."""

    def __init__(self, *, total_steps: int, live: bool, enabled: bool, console: Console | None = None):
        self.console = console or terminal()
        self._enabled = enabled
        self._total_steps = total_steps
        self._progress: Progress | None = None
        self._task = TaskID(0)
        # Warnings go through the same console, or they would tear the live line.
        self._log = logging.getLogger("verl_mt")
        # rich's own highlighter takes minutes for a long word, on the thread that logs.
        plain = NullHighlighter()
        self._handler = RichHandler(console=self.console, show_path=False, show_time=False, highlighter=plain)
        self._handler.setFormatter(PrintableFormatter())
        if live and enabled:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20 if self.console.width >= _WIDE else 8),
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
        """Print a line."""
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
            f"rollout {progress.num_finished}/{progress.num_trajectories}, "
            f"{progress.num_sampled_tokens / seconds:.0f} tok/s, {progress.num_tool_calls} tool calls"
        )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """One line for a finished step."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        number = f"{step:>{len(str(self._total_steps))}}/{self._total_steps}"
        self._line(f"[dim]step[/] {number}", _STEP, metrics)

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """One line for a validation pass."""
        self._line(f"[cyan]validation after step {step}:[/]", _VALIDATION, metrics)

    def _line(self, head: str, columns: Sequence[_Column], metrics: Mapping[str, float]) -> None:
        if self._enabled:
            self.console.print(one_line(head, columns, metrics, self.console.width), highlight=False)

    def curve(self, values: Sequence[float]) -> str:
        """A metric of all steps in one line: single steps are noise, so its ends are means of several."""
        first, last, k = first_and_last(values)
        bars = sparkline(values, 40 if self.console.width >= _WIDE else 20)
        said = f"means of {k} steps each" if k > 1 else "of one step each"
        return f"{first:.3f} {bars} [bold]{last:.3f}[/]  [dim]{said}[/]"

    def summary(self, title: str, rows: list[tuple[str, str]]) -> None:
        """The closing box."""
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(f"[dim]{name}[/]", value)
        if self._enabled:
            self.console.print(Panel(table, title=title, expand=False))
