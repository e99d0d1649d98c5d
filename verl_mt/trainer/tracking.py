"""Where numbers go: `metrics.jsonl` always; TensorBoard, W&B and MLflow by config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from verl_mt.data.run_files import append_metrics, truncate_metrics
from verl_mt.errors import ConfigError


class Tracker(Protocol):
    """Takes one flat dict of numbers per step."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def is_timing(name: str) -> bool:
    """Whether a metric depends on the clock: `time/*`, `*_s`, rates per second, the critical path."""
    return name.startswith(("time/", "critical_path/")) or name.endswith(("_s", "_per_s"))


class JsonLines:
    """`metrics.jsonl`, one object per step, on disk before `log` returns.

    In a deterministic run what the clock says goes to `timings.jsonl`, so that `metrics.jsonl` is the same, byte for
    byte, in every run of the same config.
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

    def close(self) -> None:
        """Every line is on disk already."""


class TensorBoard:
    """Event files under `tensorboard/`."""

    def __init__(self, folder: Path, *, resume_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=None if resume_step is None else resume_step + 1
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; `WANDB_MODE=offline` works. The key comes from the environment."""

    def __init__(self, folder: Path, *, project: str, name: str, config: dict[str, Any], resume_step: int | None):
        wandb = _import("wandb")
        self._run = wandb.init(
            project=project,
            name=name,
            id=_run_id(folder),
            dir=str(folder),
            config=config,
            resume="allow" if resume_step is not None else None,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow; `MLFLOW_TRACKING_URI` says where. A resumed run goes on in the same MLflow run."""

    def __init__(self, folder: Path, *, project: str, name: str, config: dict[str, Any]):
        self._mlflow = _import("mlflow")
        self._mlflow.set_experiment(project)
        # The server gives the id, so that it is kept from the first start on.
        file = folder / ".mlflow_id"
        known = file.read_text() if file.exists() else None
        run = self._mlflow.start_run(run_id=known, run_name=name)
        if known is None:
            file.write_text(run.info.run_id)
            self._mlflow.log_dict(config, "config.yaml")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._mlflow.log_metrics({mlflow_name(k): v for k, v in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it: letters, digits, `_-. :/`, no empty and no dotted part of a path.

    Example: `val//data/gsm8k.jsonl/pass@8` (a data source that is a path) -> `val/data/gsm8k.jsonl/pass_at_8`.
    """
    allowed = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    parts = (part.replace(".", "_") if part in (".", "..") else part for part in allowed.split("/"))
    return "/".join(part for part in parts if part) or "_"


def require_trackers(names: list[str]) -> None:
    """Import what the named trackers need, before anything slow or lasting is done.

    Raises:
        ConfigError: a package that is not installed.
    """
    for name in names:
        if name in ("wandb", "mlflow"):
            _import(name)


def build_trackers(
    names: list[str],
    folder: Path,
    *,
    project: str,
    name: str,
    config: dict[str, Any],
    resume_step: int | None,
) -> list[Tracker]:
    """The trackers that `trainer.logger` names (`console` is the display's business).

    Raises:
        ConfigError: an unknown name, or a package that is not installed.
    """
    trackers: list[Tracker] = []
    for wanted in names:
        if wanted == "tensorboard":
            trackers.append(TensorBoard(folder, resume_step=resume_step))
        elif wanted == "wandb":
            trackers.append(Wandb(folder, project=project, name=name, config=config, resume_step=resume_step))
        elif wanted == "mlflow":
            trackers.append(MLflow(folder, project=project, name=name, config=config))
        elif wanted != "console":
            raise ConfigError(f"trainer.logger: got {wanted!r}, expected console, tensorboard, wandb or mlflow")
    return trackers


def _run_id(folder: Path) -> str:
    """The same on resume, so that the curves continue: kept beside the metrics."""
    import secrets

    file = folder / ".wandb_id"
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return file.read_text()


def _import(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger names {package!r}, which is not installed: pip install 'verl_mt[{package}]'"
        ) from error
