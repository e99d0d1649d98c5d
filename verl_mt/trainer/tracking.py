"""Where numbers go: `metrics.jsonl` always; TensorBoard, W&B, MLflow, spans and trackers of one's own by config."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verl_mt.config.redact import redact
from verl_mt.config.schema import TrainerConfig
from verl_mt.data.run_files import NO_ROOM, append_metrics, disk_refused, truncate_metrics
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.diagnostics.rollout_table import rollout_table
from verl_mt.errors import CheckpointError, ConfigError, error_text
from verl_mt.plugins import Registry, load_object
from verl_mt.trainer.rollout_spans import RolloutSpans
from verl_mt.trainer.track_mlflow import MLflow
from verl_mt.trainer.track_tensorboard import TensorBoard
from verl_mt.trainer.track_wandb import Wandb
from verl_mt.trainer.tracker import Background, Outcome, TrackedRun, Tracker

log = logging.getLogger(__name__)

trackers: Registry[Callable[[TrackedRun], Tracker]] = Registry(
    "tracker", {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
)
"""What `trainer.logger` may name, beside a dotted path; `trackers['mine'] = MyTracker` in a plug-in adds one."""

_ALWAYS_THERE = ("console", "file")
"""The display's business, and `metrics.jsonl`."""
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


def is_timing(name: str) -> bool:
    """Whether a metric depends on the clock or the network: times, rates, the critical path, trackers' failures."""
    return name.startswith(("time/", "critical_path/", "trackers/")) or name.endswith(("_s", "_per_s"))


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
        wanted.append((spans, lambda run: RolloutSpans.open(run, to_file=spans == "otel_file")))
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
                raise ConfigError(f"tracker {name} could not begin: {reason}; repair it, or leave it out") from error
            log.warning("tracker %s could not go on (%s); the run goes on without it", name, reason)
    # As often as a validation, or where there is none as a checkpoint.
    every = next((n for n in (config.test_freq, config.save_freq) if n > 0), 1)
    return Trackers(made, table_rows=config.log_val_generations, train_every=every)


def _find(name: str) -> Callable[[TrackedRun], Tracker]:
    return load_object(name, what="trainer.logger", registry=trackers)


def _require(package: str, what: str, extra: str) -> None:
    import importlib

    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{what}, which needs a package that is not installed ({error.name}): pip install 'verl_mt[{extra}]'"
        ) from error


__all__ = [
    "JsonLines",
    "Outcome",
    "TrackedRun",
    "Tracker",
    "Trackers",
    "build_trackers",
    "is_timing",
    "require_trackers",
]
