"""What a tracker is, and the thread behind which one works, so that a server that is down never holds a run up."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_mt.config.redact import redact
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.diagnostics.rollout_table import RolloutTable
from verl_mt.errors import error_text

log = logging.getLogger(__name__)

Outcome = Literal["finished", "stopped", "failed"]
"""How a run ended: at its last step, by Ctrl-C with a checkpoint, or with an error."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run when it is made."""

    folder: Path
    """The run directory; a tracker keeps there what it needs to go on in the same curves."""
    project: str
    name: str
    config: dict[str, Any]
    """The resolved configuration, secrets redacted."""
    resume_step: int | None = None
    """Last step that stays; None = nothing was logged before, or none of it stays."""


class Tracker:
    """Takes what a run reports. A subclass overrides what its service can show; the rest is left out.

    Made as `Class(TrackedRun)`. Every call comes from one thread, in order. What a call raises is counted and said
    once; the run goes on.
    """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The numbers of a step."""

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        """A few rollouts to read; `name` is `train`, `val` or `val_greedy`."""

    def trajectories(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """All trajectories of a rollout, as soon as it is over; not to be changed."""

    def close(self, outcome: Outcome) -> None:
        """The last call."""


class Background(Tracker):
    """A tracker that works in a thread of its own.

    Args:
        tracker: does the work.
        name: as `trainer.logger` spells it.
        capacity: calls that may wait; what comes beyond them is dropped and counted.
        patience_s: how long `close` waits for the calls that are left.
    """

    def __init__(self, tracker: Tracker, name: str, *, capacity: int = 256, patience_s: float = 60.0):
        self.name = name
        self.failures = 0
        self._tracker, self._patience_s = tracker, patience_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(capacity)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._later(lambda: self._tracker.log(step, metrics))

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        self._later(lambda: self._tracker.table(step, name, table))

    def trajectories(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        self._later(lambda: self._tracker.trajectories(step, groups))

    def close(self, outcome: Outcome) -> None:
        """Work off what waits, at most `patience_s`."""
        deadline = time.monotonic() + self._patience_s
        try:
            self._calls.put(lambda: self._tracker.close(outcome), timeout=self._patience_s)
            self._calls.put(None, timeout=max(0.0, deadline - time.monotonic()))
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass  # said below: the thread still lives
        if self._thread.is_alive():
            log.warning(
                "tracker %s: %d calls were not written within %.0f s of the run's end",
                self.name, self._calls.qsize() + 1, self._patience_s,
            )  # fmt: skip

    def _later(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failed(f"{self._calls.maxsize} calls wait already")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # in this thread a SystemExit would end it, and lose all that follows
                self._failed(error_text(error, named=True))

    def _failed(self, what: str) -> None:
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            log.warning(
                "tracker %s failed (%s); the run goes on, and trackers/%s/failures in metrics.jsonl counts the losses",
                self.name, redact(what), self.name,
            )  # fmt: skip
