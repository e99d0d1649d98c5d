"""The run directory: which one this run uses, whether it resumes, and who holds it.

`runs/<experiment>/` holds `config.yaml`, `metrics.jsonl`, `rollouts/`, `checkpoints/`, `tensorboard/`,
`hf/` and, once the run is over, `FINISHED`.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import itertools
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_mt.config.redact import redact
from verl_mt.config.schema import TrainerConfig, leaves, sections
from verl_mt.data import run_origin
from verl_mt.data.run_files import holder_of, writing
from verl_mt.data.temporary_files import sweep
from verl_mt.errors import CheckpointError, DataError
from verl_mt.reading import read_yaml
from verl_mt.trainer.checkpoint import CheckpointStore

_PLACEMENT = ("placement", "nnodes", "n_workers_per_node")
"""Of `trainer`: change rounding only, so a run goes on with more ranks, or fewer. Not so in a deterministic run."""
_LAYOUT = ("fsdp_size", "ulysses_sequence_parallel_size", "param_offload", "optimizer_offload")
"""The same of `actor_rollout_ref.actor`: how the ranks hold the policy and share rows."""
_WAY_OUT = "start a new run with trainer.experiment_name=<another name> or trainer.resume_mode=disable"
_UNFOLDED = 10**6
"""Columns of a difference that is shown: in the second line of a folded value nobody would see whose it is."""
_LOCK_PATIENCE_S = 0.1
"""Whoever looks who holds a lock holds it himself, for a moment."""
_BEFORE_THE_FIRST_STEP = (
    "config.yaml", ".config.yaml", run_origin.FILE, ".wandb_id", ".mlflow_id", "spans.jsonl",
)  # fmt: skip
_ROWS = ("train_files", "val_files", "train_max_samples", "val_max_samples")
"""Of `data`: which rows there are. They may change where `trainer.resume_mode=other_data` asks for it."""


@dataclass
class RunDirectory:
    """An opened (locked) run directory."""

    path: Path
    resume_from: Path | None
    """The checkpoint to load, or None for a new run."""
    _lock: Any = None
    _created: bool = False

    @classmethod
    def open(
        cls, trainer: TrainerConfig, config: dict[str, Any], *, way_out: str = _WAY_OUT, lost: Path | None = None
    ) -> RunDirectory:
        """Choose, lock and prepare the directory.

        Args:
            trainer: the trainer's section.
            config: the whole resolved config as plain data, secrets redacted.
            way_out: what else can be done where an unfinished run there has another config.
            lost: the directory of a run of the same config that goes on, whatever `resume_mode` says.

        Raises:
            CheckpointError: an unfinished run there has another config (shows the difference), or the checkpoint
                named by `resume_from_path` does not exist.
        """
        with _usable(trainer):
            source = _named_checkpoint(trainer)
            if lost is not None:
                found = cls._go_on(lost, trainer, config, way_out)
                if found is None:
                    raise CheckpointError(f"{lost} was taken by another process while its run was being restarted")
                found.resume_from = found.resume_from or (source and source.resolve())
                return found
            for place in _places(trainer):
                if place.fresh:
                    opened = cls._begin(place.path, config)
                    opened.resume_from = source and source.resolve()
                    return opened
                if place.refusal is None and (found := cls._go_on(place.path, trainer, config, way_out)) is not None:
                    return found
        raise AssertionError("unreachable: the numbers do not end")

    @classmethod
    def _begin(cls, path: Path, config: dict[str, Any]) -> RunDirectory:
        path.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(path)
        # Two runs that begin side by side both see a fresh directory; the lock lets one of them have it. The other ends
        # here instead of taking the next number: they were given the same name, most likely by mistake.
        if lock is None:
            raise CheckpointError(f"{path} is in use by another process. Choose another trainer.experiment_name")
        opened = cls(path, None, lock, _created=True)
        # The config makes a directory this run's: until the rename it is fresh to the process that comes after a kill.
        partial = path / ".config.yaml"
        try:
            content = yaml.safe_dump(config, sort_keys=False).encode()
            run_origin.sign(path, content)
            partial.write_bytes(content)
            partial.rename(path / "config.yaml")
        except OSError:
            opened.abandon()
            raise
        return opened

    @classmethod
    def _go_on(cls, path: Path, trainer: TrainerConfig, config: dict[str, Any], way_out: str) -> RunDirectory | None:
        """The unfinished run there; None where another process took its lock a moment ago."""
        _require_config(path)
        lock = _try_lock(path)
        if lock is None:
            return None
        run = cls(path, None, lock)
        try:
            _refuse_changed_config(path, config, trainer, way_out)
            sweep(path)
            checkpoints = CheckpointStore(path / "checkpoints")
            checkpoints.sweep()
            run.resume_from = checkpoints.latest()
        except CheckpointError:
            run.close()
            raise
        return run

    def abandon(self) -> None:
        """The run does not come to its first step: leave its directory as if nothing had been there."""
        if self._created:
            for folder in ("tensorboard", "wandb", ".hydra"):
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
    with _usable(trainer):
        parent = next(p for p in wanted.absolute().parents if p.exists())
        if not os.access(parent, os.W_OK):
            raise CheckpointError(
                f"cannot make the run directory {wanted}: {parent} is not writable. Choose another "
                "trainer.default_local_dir"
            )
        source = _named_checkpoint(trainer)
        place = next(place for place in _places(trainer) if place.refusal is None)
        if place.fresh:
            return f"{place.path}, new{f', from {source}' if source is not None else ''}"
        _require_config(place.path)
        _refuse_changed_config(place.path, config, trainer)
        latest = CheckpointStore(place.path / "checkpoints").latest()
        return f"{place.path}, an unfinished run that goes on from {latest.name if latest else 'its beginning'}"


def other_directory(trainer: TrainerConfig) -> str | None:
    """Which directory a run will take, and why, if it is not the one that the config names; None if it is.

    Raises:
        CheckpointError: what is there cannot be read or locked.
    """
    with _usable(trainer):
        passed: list[str] = []
        for place in _places(trainer):
            if place.refusal is None:
                return f"{', '.join(passed)}: this run takes {place.path}" if passed else None
            passed.append(f"{place.path} {place.refusal}")
    raise AssertionError("unreachable: the numbers do not end")


@contextlib.contextmanager
def _usable(trainer: TrainerConfig) -> Iterator[None]:
    """What its file system refuses (a lock, too) is said with the key that names another directory."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot make or read the run directory {wanted_directory(trainer)}: {error}. Choose another "
            "trainer.default_local_dir"
        ) from error


@dataclass(frozen=True)
class _Place:
    """A directory that a run may take: a fresh one, or one in which it goes on."""

    path: Path
    fresh: bool
    refusal: str | None
    """Why it takes neither; None if it may."""


def _places(trainer: TrainerConfig) -> Iterator[_Place]:
    """`runs/name`, `runs/name-2`, `runs/name-3`, ... without an end, as they are when they are asked for."""
    wanted = wanted_directory(trainer)
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        fresh = _is_fresh(path)
        yield _Place(path, fresh, None if fresh else _refusal(path, trainer))


def _refusal(path: Path, trainer: TrainerConfig) -> str | None:
    if (holder := holder_of(path)) is not None:
        return f"is in use by another trainer ({holder})"
    if (path / "FINISHED").exists():
        return "holds a finished run"
    if trainer.resume_mode == "disable" or _names_checkpoint(trainer):
        return f"holds another run (trainer.resume_mode={trainer.resume_mode})"
    return None


def _require_config(path: Path) -> None:
    if not (path / "config.yaml").exists():
        raise CheckpointError(
            f"{path} is not empty and not a run directory (no config.yaml). Choose another "
            "trainer.default_local_dir or trainer.experiment_name"
        )


def _names_checkpoint(trainer: TrainerConfig) -> bool:
    return trainer.resume_mode == "resume_path" or trainer.resume_from_path is not None


def _named_checkpoint(trainer: TrainerConfig) -> Path | None:
    """The checkpoint that a run in a new directory begins from; None where none is asked for."""
    if not _names_checkpoint(trainer):
        return None
    source = Path(trainer.resume_from_path or "").expanduser()
    if not trainer.resume_from_path or not (source / "meta.json").is_file():
        raise CheckpointError(
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path to name a checkpoint folder "
            f"(runs/<experiment>/checkpoints/step_...). Got {trainer.resume_from_path!r}"
        )
    return source


def _is_fresh(path: Path) -> bool:
    """Absent, empty, or left by a process that was killed before it had written its config."""
    return not path.exists() or all(
        p.is_file() and p.name in (".lock", ".config.yaml", run_origin.FILE) for p in path.iterdir()
    )


def _try_lock(path: Path) -> int | None:
    """The lock's file handle; None where somebody else holds it. It dies with its process, also under SIGKILL."""
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


def _refuse_changed_config(path: Path, config: dict[str, Any], trainer: TrainerConfig, way_out: str = _WAY_OUT) -> None:
    new = _comparable(config)
    written = redact(_read_config(path / "config.yaml"))  # an earlier version may have written more
    old = _comparable(_with_correction(_with_new_keys(written, config), config))
    same_but_rows = _without_rows(old) == _without_rows(new)
    if old == new or (same_but_rows and trainer.resume_mode == "other_data"):
        return
    go_on = ", go on in these rows with trainer.resume_mode=other_data" if same_but_rows else ""
    lines = difflib.unified_diff(
        yaml.safe_dump(old, width=_UNFOLDED).splitlines(),
        yaml.safe_dump(new, width=_UNFOLDED).splitlines(),
        "the unfinished run",
        "this command",
        lineterm="",
        n=0,
    )
    shown = "\n".join(line for line in lines if not line.startswith("@@"))
    raise CheckpointError(
        f"{path} holds an unfinished run with another config:\n{shown}\n"
        f"Give the same command to resume it{go_on}, or {way_out}. To continue with other settings: docs/resume.md."
    )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = read_yaml(file)
        sections = {} if config is None else config
        if not isinstance(sections, dict) or not isinstance(sections.get("trainer", {}), dict):
            raise ValueError("no configuration: a mapping of sections was expected")
    except (ValueError, DataError) as error:
        raise CheckpointError(
            f"{file} of an unfinished run cannot be read ({' '.join(str(error).split())}), so this command cannot "
            "tell whether it resumes that run: put the file back, move the run away, or start a new run with "
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
        elif isinstance(old.get(name, {}), dict) and isinstance(value, dict) and key in sections():
            filled[name] = _with_new_keys(old.get(name, {}), value, f"{key}.")
    return filled


def _without_rows(config: dict[str, Any]) -> dict[str, Any]:
    data = config.get("data")
    if not isinstance(data, dict):
        return config
    return config | {"data": {k: v for k, v in data.items() if k not in _ROWS}}


def _with_correction(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run that an older version began: the correction that follows from `max_staleness` was
    written as `{}`."""
    algorithm, followed = old.get("algorithm"), {"rollout_is": "token"}
    written = new.get("algorithm", {}).get("rollout_correction")
    if not isinstance(algorithm, dict) or algorithm.get("rollout_correction") != {} or written != followed:
        return old
    ahead = old.get("trainer", {}).get("max_staleness")
    return old | {"algorithm": algorithm | {"rollout_correction": followed}} if ahead else old


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that may change on resume: a row that stopped a run may be left out when it goes on."""
    may_change = {key for key, leaf in leaves().items() if leaf.metadata.get("may_change")}
    trainer = config.get("trainer", {})
    free = () if trainer.get("deterministic") else _PLACEMENT
    kept = {"trainer": {k: v for k, v in trainer.items() if f"trainer.{k}" not in may_change and k not in free}}
    actor_rollout_ref = config.get("actor_rollout_ref")
    if not trainer.get("deterministic") and isinstance(actor_rollout_ref, dict):
        actor = {k: v for k, v in (actor_rollout_ref.get("actor") or {}).items() if k not in _LAYOUT}
        kept["actor_rollout_ref"] = {**actor_rollout_ref, "actor": actor}
    if isinstance(data := config.get("data"), dict):
        kept["data"] = {k: v for k, v in data.items() if f"data.{k}" not in may_change}
    return config | kept
