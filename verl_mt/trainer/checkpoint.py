"""Checkpoints: written whole or not at all, the newest few and the best kept.

A checkpoint is a folder `step_000012` with `state.pt` (actor, optimizer, schedule, generators, data-loader position)
and `meta.json`; where the policy is spread over ranks, weights and optimizer state are beside them in `actor/`, a part
by each rank. It is written under another name, flushed to disk and renamed, so that a process killed at any moment
leaves either the old set of checkpoints or the new one. A step that is saved again first moves its older checkpoint
aside (`.old-step_000012`), which counts as long as nothing has its place.

The best one is the best of those that were validated: only a step at which both `trainer.test_freq` and
`trainer.save_freq` are due can be it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_mt.errors import CheckpointError, VerlMTError

SCHEMA_VERSION = 2
_OLD = ".old-"


@dataclass
class CheckpointStore:
    """The checkpoints of one run."""

    folder: Path
    keep: int | None = None
    """Newest ones kept besides the best; None = all."""
    reach: int = 0
    """Also kept are those back to one that is this many steps older than the newest."""

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        score: float | None,
        write_more: Callable[[Path], None] = lambda folder: None,
    ) -> Path:
        """Write the checkpoint of `step`. `score` (higher is better; None = not validated) decides which is the best.
        `write_more` adds files to the folder, flushed to disk, while it still has its other name.

        Raises:
            CheckpointError: the disk refused; nothing is left behind but the older checkpoints.
        """
        final = self.folder / f"step_{step:06d}"
        partial = self.folder / f".partial-step_{step:06d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            write_more(partial)
            with (partial / "state.pt").open("wb") as file:
                torch.save(state, file)
                _sync(file)
            with (partial / "meta.json").open("w") as file:
                json.dump({"schema_version": SCHEMA_VERSION, "step": step, "score": score}, file)
                _sync(file)
            if final.exists():
                shutil.rmtree(_aside(final), ignore_errors=True)
                final.rename(_aside(final))
            partial.rename(final)
            _sync_folder(self.folder)
        except VerlMTError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot write checkpoint {final}: {error}; free space or choose another folder"
            ) from error
        self._prune()
        return final

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = {p.name: p for p in self.folder.glob("step_*")}
        for aside in self.folder.glob(f"{_OLD}step_*"):
            found.setdefault(aside.name.removeprefix(_OLD), aside)
        return [found[name] for name in sorted(found) if (found[name] / "meta.json").is_file()]

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return found[-1] if (found := self.all()) else None

    def best(self) -> Path | None:
        """The one with the highest score; the newest of equals; None if none has a score."""
        scored = [(meta["score"], meta["step"], p) for p in self.all() if (meta := read_meta(p))["score"] is not None]
        return max(scored)[2] if scored else None

    def _prune(self) -> None:
        replaced = (p for p in self.folder.glob(f"{_OLD}step_*") if p.with_name(p.name.removeprefix(_OLD)).exists())
        for leftover in (*self.folder.glob(".partial-*"), *replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        if self.keep is None:
            return
        best, found = self.best(), self.all()
        reached = [p for p in found if step_of(p) <= step_of(found[-1]) - self.reach] if self.reach else found
        oldest = step_of(reached[-1] if reached else found[0])
        for old in found[: -self.keep]:
            if old != best and step_of(old) < oldest:
                shutil.rmtree(old)


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.rpartition("_")[2])


def _aside(path: Path) -> Path:
    return path.with_name(_OLD + path.name)


def read_meta(path: Path) -> dict[str, Any]:
    """`meta.json` of a checkpoint.

    Raises:
        CheckpointError: missing, unreadable, or of a version this program does not know.
    """
    try:
        meta = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from error
    if meta.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: schema_version {meta.get('schema_version')!r}, this program reads {SCHEMA_VERSION}"
        )
    return meta


def load(path: Path) -> dict[str, Any]:
    """The state that `save` was given.

    Raises:
        CheckpointError: not a checkpoint, or damaged.
    """
    read_meta(path)
    try:
        # Our own file: it holds generator states and counters besides tensors.
        return torch.load(path / "state.pt", map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(
            f"{path}/state.pt cannot be read: {error}; delete this folder to resume from an older one"
        ) from error


def random_state() -> dict[str, Any]:
    """The global generators of python, numpy and torch."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put them back."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
