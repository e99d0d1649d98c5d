"""TensorBoard: event files under `tensorboard/` of the run directory."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path

import yaml

from verl_mt.diagnostics.rollout_table import RolloutTable
from verl_mt.trainer.tracking import Outcome, TrackedRun, Tracker


class TensorBoard(Tracker):
    """Curves, the configuration and rollouts as text. A resumed run takes back what was logged after its checkpoint."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        _leave_out_its_traceback()
        purge = None if run.resume_step is None else run.resume_step + 1
        folder = run.folder / "tensorboard"
        _wait_for_a_later_name(folder)
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        if purge is None:
            self._writer.add_text("config", as_written(yaml.safe_dump(run.config, sort_keys=False)), 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        self._writer.add_text(f"rollouts/{name}", table_text(table), step)

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Readers take event files in the order of their names, which begin with the second and end with a number that is
    not padded: of two from one second "9" comes after "10", and what a resumed run takes back would stay."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)


@functools.cache
def _leave_out_its_traceback() -> None:
    """TensorBoard's writing thread hands what it raises (a full disk) to the next call, where it is counted and said;
    besides it dies of it, with a traceback on the screen."""
    shown = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread" or not isinstance(args.exc_value, OSError):
            shown(args)

    threading.excepthook = hook


def table_text(table: RolloutTable) -> str:
    """A table as Markdown: a heading of the short cells for each row, its last cell as a block of code below.

    TensorBoard renders Markdown; a model's text is data, so nothing of it is rendered.
    """
    *short, _ = table.columns
    return "\n\n".join(
        "**"
        + ", ".join(f"{name} {_plain(value)}" for name, value in zip(short, row))
        + "**\n\n"
        + as_written("" if row[-1] is None else str(row[-1]))
        for row in table.rows
    )


def as_written(text: str) -> str:
    """A Markdown block of code."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _plain(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return "".join(
        c if c.isalnum() or c in " .-_/" else "\\" + c if c.isascii() and c.isprintable() else " " for c in text
    )
