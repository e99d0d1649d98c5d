"""The run directory: which one this run uses, whether it resumes, and who holds it.

`runs/<experiment>/` holds `config.yaml`, `config_reads.json` (who reads each key), `metrics.jsonl`, `rollouts/`,
`checkpoints/`, `tensorboard/`, `hf/` and, once the run is over, `FINISHED`.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_mt.config.schema import TrainerConfig
from verl_mt.config.tree import leaves, sections
from verl_mt.data.run_files import writing
from verl_mt.errors import CheckpointError
from verl_mt.trainer.checkpoint import CheckpointStore

_PLACEMENT = ("placement", "nnodes", "n_workers_per_node")
"""Change rounding only: a run goes on with more ranks, or fewer. In a deterministic run they may not change."""
_LOCK_PATIENCE_S = 0.1
"""Whoever looks who holds a lock holds it himself, for a moment."""
_BEFORE_THE_FIRST_STEP = ("config.yaml", ".config.yaml", "config_reads.json", ".wandb_id", ".mlflow_id", "spans.jsonl")
_ROWS = ("train_files", "val_files", "train_max_samples", "val_max_samples")
"""Of `data`: which rows there are. They may change where `trainer.resume_mode=other_data` asks for it."""
# Keys that change what a person sees or how often, never what is computed.
_HARMLESS = {
    "trainer": {
        "logger", "progress", "resume_mode", "resume_from_path", "max_actor_ckpt_to_keep", "save_freq",
        "default_local_dir", "experiment_name", "project_name", "rollout_rows", "export_at_end", "log_val_generations",
        "dry_run",
        "collapse_guard", "collapse_guard_thresholds",
    }
}  # fmt: skip


@dataclass
class RunDirectory:
    """An opened (locked) run directory."""

    path: Path
    resume_from: Path | None
    """The checkpoint to load, or None for a new run."""
    _lock: Any = None
    _created: bool = False

    @classmethod
    def open(cls, trainer: TrainerConfig, config: dict[str, Any]) -> RunDirectory:
        """Choose, lock and prepare the directory.

        Args:
            trainer: the trainer's section.
            config: the whole resolved config as plain data, secrets redacted.

        Raises:
            CheckpointError: an unfinished run there has another config (shows the difference), or the checkpoint
                named by `resume_from_path` does not exist.
        """
        wanted = wanted_directory(trainer)
        with _usable(wanted):
            return cls._open(trainer, wanted, config)

    @classmethod
    def _open(cls, trainer: TrainerConfig, wanted: Path, config: dict[str, Any]) -> RunDirectory:
        if _names_checkpoint(trainer):
            return cls._resume_path(trainer, wanted, config)
        for path in _numbered(wanted):
            if _is_fresh(path):
                return cls._fresh(path, config)
            if _passed_over(path, trainer) is not None:
                continue
            _require_config(path)
            lock = _try_lock(path)
            if lock is None:
                continue  # It began to train there a moment ago.
            run = cls(path, None, lock)
            try:
                _refuse_changed_config(path, config, trainer)
                run.resume_from = CheckpointStore(path / "checkpoints").latest()
            except CheckpointError:
                run.close()
                raise
            return run
        raise AssertionError("unreachable: the numbers do not end")

    @classmethod
    def _fresh(cls, path: Path, config: dict[str, Any]) -> RunDirectory:
        path.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(path)
        if lock is None:
            raise CheckpointError(f"{path} is in use by another process; choose another trainer.experiment_name")
        opened = cls(path, None, lock, _created=True)
        partial = path / ".config.yaml"
        try:
            partial.write_text(yaml.safe_dump(config, sort_keys=False))
            partial.rename(path / "config.yaml")
        except OSError:
            opened.abandon()
            raise
        return opened

    @classmethod
    def _resume_path(cls, trainer: TrainerConfig, wanted: Path, config: dict[str, Any]) -> RunDirectory:
        source = _named_checkpoint(trainer)
        fresh = next(path for path in _numbered(wanted) if _is_fresh(path))
        opened = cls._fresh(fresh, config)
        opened.resume_from = source.resolve()
        return opened

    def abandon(self) -> None:
        """The run does not come to its first step: leave a directory of its own as if nothing had been there."""
        if self._created:
            for folder in ("tensorboard", "wandb"):
                shutil.rmtree(self.path / folder, ignore_errors=True)
            for name in (*_BEFORE_THE_FIRST_STEP, ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # Something else is in it: not ours to remove.
                self.path.rmdir()
        self.close()

    def finish(self) -> None:
        """Mark the run as over: the next one starts a new numbered directory."""
        with writing(self.path / "FINISHED"):
            (self.path / "FINISHED").write_text("")

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def wanted_directory(trainer: TrainerConfig) -> Path:
    """The run directory that the config names, before it is numbered."""
    return Path(trainer.default_local_dir or Path("runs") / trainer.experiment_name).expanduser()


def preview(trainer: TrainerConfig, config: dict[str, Any]) -> str:
    """What `RunDirectory.open` would choose, in words; makes and locks nothing.

    Raises:
        CheckpointError: what it would refuse.
    """
    wanted = wanted_directory(trainer)
    with _usable(wanted):
        return _preview(trainer, wanted, config)


def _preview(trainer: TrainerConfig, wanted: Path, config: dict[str, Any]) -> str:
    parent = next(p for p in wanted.absolute().parents if p.exists())
    if not os.access(parent, os.W_OK):
        raise CheckpointError(
            f"cannot make the run directory {wanted}: {parent} is not writable; choose another "
            "trainer.default_local_dir"
        )
    if _names_checkpoint(trainer):
        source = _named_checkpoint(trainer)
        return f"{next(path for path in _numbered(wanted) if _is_fresh(path))}, new, from {source}"
    for path in _numbered(wanted):
        if _is_fresh(path):
            break
        if _passed_over(path, trainer) is not None:
            continue
        _require_config(path)
        _refuse_changed_config(path, config, trainer)
        latest = CheckpointStore(path / "checkpoints").latest()
        return f"{path}, an unfinished run that goes on from {latest.name if latest is not None else 'its beginning'}"
    return f"{path}, new"


def other_directory(trainer: TrainerConfig) -> str | None:
    """Which directory a run will take, and why, if it is not the one that the config names; None if it is.

    Raises:
        CheckpointError: what is there cannot be read or locked.
    """
    wanted = wanted_directory(trainer)
    with _usable(wanted):
        return _other_directory(trainer, wanted)


def _other_directory(trainer: TrainerConfig, wanted: Path) -> str | None:
    passed: list[str] = []
    for path in _numbered(wanted):
        reason = None if _is_fresh(path) else _passed_over(path, trainer)
        if reason is None:
            return f"{', '.join(passed)}: this run takes {path}" if passed else None
        passed.append(f"{path} {reason}")
    raise AssertionError("unreachable: the numbers do not end")


@contextlib.contextmanager
def _usable(wanted: Path) -> Iterator[None]:
    """What its file system refuses (a lock, too) is said with the key that names another."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot make or read the run directory {wanted}: {error}; choose another trainer.default_local_dir"
        ) from error


def _passed_over(path: Path, trainer: TrainerConfig) -> str | None:
    """Why a run that may begin or go on in a directory that is not fresh does not; None if it does."""
    if (holder := _holder(path)) is not None:
        return f"is in use by another trainer ({holder})"
    if (path / "FINISHED").exists():
        return "holds a finished run"
    if trainer.resume_mode == "disable" or _names_checkpoint(trainer):
        return f"holds another run (trainer.resume_mode={trainer.resume_mode})"
    return None


def _require_config(path: Path) -> None:
    if not (path / "config.yaml").exists():
        raise CheckpointError(
            f"{path} is not empty and not a run directory (no config.yaml); choose another "
            "trainer.default_local_dir or trainer.experiment_name"
        )


def _names_checkpoint(trainer: TrainerConfig) -> bool:
    return trainer.resume_mode == "resume_path" or trainer.resume_from_path is not None


def _named_checkpoint(trainer: TrainerConfig) -> Path:
    source = Path(trainer.resume_from_path or "").expanduser()
    if not trainer.resume_from_path or not (source / "meta.json").is_file():
        raise CheckpointError(
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path to name a checkpoint folder "
            f"(runs/<experiment>/checkpoints/step_...); got {trainer.resume_from_path!r}"
        )
    return source


def _numbered(path: Path):
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def _is_fresh(path: Path) -> bool:
    """Absent, empty, or left by a process that was killed before it had written its config."""
    return not path.exists() or all(p.name in (".lock", ".config.yaml") for p in path.iterdir())


def _try_lock(path: Path) -> int | None:
    """The lock dies with its process, also under SIGKILL."""
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                return None
            time.sleep(0.01)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def _holder(path: Path) -> str | None:
    """Who holds the lock, in words; None if nobody does."""
    try:
        handle = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(handle, 200).decode(errors="replace") or "unknown process"
    finally:
        os.close(handle)
    return None


def _refuse_changed_config(path: Path, config: dict[str, Any], trainer: TrainerConfig) -> None:
    new = _comparable(config)
    old = _comparable(_with_new_keys(_read_config(path / "config.yaml"), config))
    same_but_rows = _without_rows(old) == _without_rows(new)
    if old == new or (same_but_rows and trainer.resume_mode == "other_data"):
        return
    go_on = ", go on in these rows with trainer.resume_mode=other_data" if same_but_rows else ""
    lines = difflib.unified_diff(
        yaml.safe_dump(old).splitlines(),
        yaml.safe_dump(new).splitlines(),
        "the unfinished run",
        "this command",
        lineterm="",
        n=0,
    )
    shown = "\n".join(line for line in lines if not line.startswith("@@"))
    raise CheckpointError(
        f"{path} holds an unfinished run with another config:\n{shown}\n"
        f"Give the same command to resume it{go_on}, or start anew with trainer.experiment_name=<another name> "
        "or trainer.resume_mode=disable."
    )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(file.read_text())
        sections = {} if config is None else config
        if not isinstance(sections, dict) or not isinstance(sections.get("trainer", {}), dict):
            raise ValueError("no configuration: a mapping of sections was expected")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{file} of an unfinished run cannot be read ({' '.join(str(error).split())}), so that nobody can say "
            "whether this command goes on with it: put the file back, move the run away, or start anew with "
            "trainer.experiment_name=<another name> or trainer.resume_mode=disable"
        ) from error
    return sections


def _with_new_keys(old: dict[str, Any], new: dict[str, Any], section: str = "") -> dict[str, Any]:
    """The configuration of a run that an older version began: a key that it did not know had its default."""
    filled = dict(old)
    for name, value in new.items():
        key = f"{section}{name}"
        if name not in old and key in leaves():
            filled[name] = leaves()[key].default
        elif isinstance(old.get(name), dict) and isinstance(value, dict) and key in sections():
            filled[name] = _with_new_keys(old[name], value, f"{key}.")
    return filled


def _without_rows(config: dict[str, Any]) -> dict[str, Any]:
    data = config.get("data")
    if not isinstance(data, dict):
        return config
    return config | {"data": {k: v for k, v in data.items() if k not in _ROWS}}


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that may change on resume."""
    trainer = config.get("trainer", {})
    if not trainer.get("deterministic"):
        config = config | {"trainer": {k: v for k, v in trainer.items() if k not in _PLACEMENT}}
    return {
        section: {k: v for k, v in value.items() if k not in _HARMLESS.get(section, ())}
        if isinstance(value, dict)
        else value
        for section, value in config.items()
    }
