"""Where numbers go: `metrics.jsonl` always; TensorBoard, W&B, MLflow, spans and trackers of a user by config.

Each tracker works in a separate thread, so that a server that is down never delays a run.
"""

from __future__ import annotations

import importlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_mt.config.redact import redact
from verl_mt.config.schema import TrainerConfig
from verl_mt.data.run_files import NO_ROOM, append_metrics, disk_refused, truncate_metrics
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.diagnostics.rollout_table import RolloutTable, rollout_table
from verl_mt.errors import CheckpointError, ConfigError, error_text
from verl_mt.plugins import Registry, load_object

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
    """Takes what a run reports. A subclass overrides what its service can show. The rest is left out.

    Made as `Class(TrackedRun)`. Every call comes from one thread, in order. What a call raises is counted and said
    once. The run goes on.
    """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The numbers of a step."""

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        """A few rollouts to read. `name` is `train`, `val` or `val_greedy`."""

    def trajectories(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """All trajectories of a rollout, as soon as it is over. Not to be changed."""

    def close(self, outcome: Outcome) -> None:
        """The last call."""


class Background(Tracker):
    """A tracker that works in a separate thread.

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
        """Work off what waits, at most `patience_s`. Runs in the trainer's main thread."""
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
        """Runs in the trainer's main thread and waits for nothing: a call beyond `capacity` is dropped."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failed(f"{self._calls.maxsize} calls wait already")

    def _work(self) -> None:
        """Runs in the tracker's thread. Waits for calls."""
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # in this thread a SystemExit would end it, and lose all that follows
                self._failed(error_text(error, named=True))

    def _failed(self, what: str) -> None:
        """Runs in any thread and waits for nothing."""
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            log.warning(
                "tracker %s failed (%s); the run goes on, and trackers/%s/failures in metrics.jsonl counts the losses",
                self.name, redact(what), self.name,
            )  # fmt: skip


trackers: Registry[Callable[[TrackedRun], Tracker]] = Registry("tracker", group="verl_mt.trackers")
"""What `trainer.logger` may name, beside a dotted path; `trackers['mine'] = MyTracker` in a plug-in adds one."""

_spans: Registry[Callable[..., Tracker]] = Registry("trace backend", group="verl_mt.traces")
"""What `rollout.trace.backend` may name."""

_ALWAYS_THERE = ("console", "file")
"""The display's business, and `metrics.jsonl`."""
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


def is_timing(name: str) -> bool:
    """Whether a metric depends on the clock or the network: times, rates, the critical path, trackers' failures."""
    return name.startswith(("time/", "critical_path/", "trackers/")) or name.endswith(("_s", "_ms"))


class JsonLines(Tracker):
    """`metrics.jsonl`, one object per step, on disk before `log` returns: the one tracker that every run has.

    In a deterministic run what the clock says goes to `timings.jsonl`, so that `metrics.jsonl` is the same, byte for
    byte, in every run of the same config. Rollouts need no table here: all of them are in `rollouts/`.
    """

    def __init__(self, folder: Path, *, resume_step: int | None, split_timings: bool):
        self._metrics, self._timings = folder / "metrics.jsonl", folder / "timings.jsonl"
        self._split_timings = split_timings
        for path in (self._metrics, self._timings):
            if path.exists():
                truncate_metrics(path, after_step=-1 if resume_step is None else resume_step)

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        if not self._split_timings:
            append_metrics(self._metrics, {"step": step, **metrics})
            return
        append_metrics(self._timings, {"step": step, **{k: v for k, v in metrics.items() if is_timing(k)}})
        append_metrics(self._metrics, {"step": step, **{k: v for k, v in metrics.items() if not is_timing(k)}})


class Trackers:
    """All trackers of a run as one.

    Args:
        made: each behind its own thread.
        table_rows: rollouts that a table shows; 0 = no tables.
        train_every: training steps between two tables of training rollouts.
    """

    def __init__(self, made: Sequence[Background] = (), *, table_rows: int = 0, train_every: int = 1):
        self._made, self._table_rows, self._train_every = list(made), table_rows, train_every

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The numbers of a step."""
        for tracker in self._made:
            tracker.log(step, metrics)

    def rollouts(self, step: int, name: str, groups: Sequence[TrajectoryGroup]) -> None:
        """The rollouts of a step's training (`train`) or of a pass of its validation (`val`, `val_greedy`)."""
        wanted = self._made and self._table_rows and (name != "train" or step % self._train_every == 0)
        table = rollout_table(step, groups, self._table_rows) if wanted else None
        for tracker in self._made:
            tracker.trajectories(step, groups)
            if table is not None:
                tracker.table(step, name, table)

    def failures(self) -> dict[str, float]:
        """`trackers/<name>/failures`: calls that came to nothing so far, of trackers that have such."""
        return {f"trackers/{t.name}/failures": float(t.failures) for t in self._made if t.failures}

    def close(self, outcome: Outcome) -> None:
        """Let every tracker finish."""
        for tracker in self._made:
            tracker.close(outcome)


def require_trackers(names: Sequence[str], *, spans: str | None = None) -> None:
    """Find what `trainer.logger` and `rollout.trace.backend` name, before anything slow or lasting is done.

    Raises:
        ConfigError: a package that is not installed.
        PluginError: an unknown name, or a dotted path that leads nowhere.
    """
    for name in names:
        if name not in _ALWAYS_THERE:
            _find(name)
        if name in _PACKAGES:
            _require(_PACKAGES[name], f"trainer.logger names {name!r}", name)
    if spans is not None:
        what = f"actor_rollout_ref.rollout.trace.backend is {spans!r}"
        _require("opentelemetry.exporter.otlp.proto.http", what, "otel")


def build_trackers(config: TrainerConfig, run: TrackedRun, *, spans: str | None = None) -> Trackers:
    """The trackers that `trainer.logger` names.

    Args:
        config: the trainer's section.
        run: what they are told.
        spans: `rollout.trace.backend`.

    Raises:
        ConfigError: one that cannot begin, in a run that begins. In one that is resumed it is left out and said.
        CheckpointError: the disk is full.
    """
    made: list[Background] = []
    wanted = [(name, _find(name)) for name in dict.fromkeys(config.logger) if name not in _ALWAYS_THERE]
    if spans is not None:
        wanted.append((spans, _spans.find(spans)))
    for name, make in wanted:
        try:
            made.append(Background(make(run), re.split(r"[.:]", name)[-1]))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise CheckpointError(f"tracker {name}: {disk_refused(run.folder, error)}") from error
            reason = redact(error_text(error, named=True))
            if run.resume_step is None:
                raise ConfigError(f"tracker {name} could not begin: {reason}. Repair it, or leave it out") from error
            log.warning("tracker %s could not go on (%s); the run goes on without it", name, reason)
    # As often as a validation, or where there is none as a checkpoint.
    every = next((n for n in (config.test_freq, config.save_freq) if n > 0), 1)
    return Trackers(made, table_rows=config.log_val_generations, train_every=every)


def _find(name: str) -> Callable[[TrackedRun], Tracker]:
    return load_object(name, what="trainer.logger", registry=trackers)


def _require(package: str, what: str, extra: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{what}, which needs a package that is not installed ({error.name}): pip install 'verl_mt[{extra}]'"
        ) from error
