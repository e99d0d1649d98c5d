"""MLflow; `MLFLOW_TRACKING_URI` says where (a server, or `sqlite:///file.db`)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from verl_mt.diagnostics.rollout_table import RolloutTable
from verl_mt.trainer.tracking import Outcome, TrackedRun, Tracker

T = TypeVar("T")
_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_METRICS_PER_CALL, _PARAMS_PER_CALL, _LONGEST_PARAM = 1000, 100, 500
"""Limits of MLflow's REST API."""


class MLflow(Tracker):
    """Curves, the configuration as parameters and as `config.yaml`, and rollouts as tables.

    A resumed run goes on in the same MLflow run; steps after its checkpoint, which it does again, are there twice.
    """

    def __init__(self, run: TrackedRun):
        # A server that is away is asked for minutes otherwise before a start fails.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        # The server gives the id, so that it is kept from the first start on.
        file = run.folder / ".mlflow_id"
        if file.exists():
            self._id = file.read_text()
            self._client.update_run(self._id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(run.project)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        self._client.log_dict(self._id, run.config, "config.yaml")
        params = [Param(mlflow_name(k), str(v)[:_LONGEST_PARAM]) for k, v in _leaves(run.config)]
        for part in _parts(params, _PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=part)
        file.write_text(self._id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        named = [self._metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        for part in _parts(named, _METRICS_PER_CALL):
            self._client.log_batch(self._id, metrics=part)

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        columns = {column: [row[k] for row in table.rows] for k, column in enumerate(table.columns)}
        # A file for each step: MLflow appends to a table by reading all of it and writing it again.
        self._client.log_table(self._id, columns, f"rollouts/{name}_{step:06d}.json")

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, _STATUS[outcome])


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it: letters, digits, `_-. :/`, no empty and no dotted part of a path.

    Example: `val//data/gsm8k.jsonl/pass@8` (a data source that is a path) -> `val/data/gsm8k.jsonl/pass_at_8`.
    """
    allowed = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    parts = (part.replace(".", "_") if part in (".", "..") else part for part in allowed.split("/"))
    return "/".join(part for part in parts if part) or "_"


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parts(items: Sequence[T], size: int) -> Iterator[list[T]]:
    return (list(items[k : k + size]) for k in range(0, len(items), size))
