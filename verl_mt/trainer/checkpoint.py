"""Checkpoints: written whole or not at all, the newest few and the best kept.

A checkpoint is a folder `step_000012` with `state.pt` (actor, optimizer, schedule, generators, data-loader position)
and `meta.json`; where the policy is spread over ranks, weights and optimizer state are beside them in `actor/`, a part
by each rank. It is written under another name, flushed to disk and renamed, so that a process killed at any moment
leaves either the old set of checkpoints or the new one. A step that is saved again first moves its older checkpoint
aside (`.old-step_000012`), which counts as long as nothing has its place; one that is to go loses its name first
(`.gone-step_000012`). What a killed process left under such names goes when the next one starts.

`meta.json` has the SHA-256 of every file of the checkpoint, made while it was written (each rank hashes its files), and
of itself. A checkpoint that is loaded is compared with them.

The best one is the best of those that were validated: only a step at which both `trainer.test_freq` and
`trainer.save_freq` are due can be it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_mt.data.digests import damage, save_tensors
from verl_mt.data.plain_objects import from_plain, to_plain
from verl_mt.data.run_files import disk_refused
from verl_mt.errors import CheckpointError, DataError, error_text
from verl_mt.reading import parse_json, read_bytes, require_file

log = logging.getLogger(__name__)

SCHEMA_VERSION = 4
PICKLED = (2, 3)
"""Earlier versions: `state.pt` is a pickle. Version 2 has no digests."""
_OLD, _GONE = ".old-", ".gone-"
_MAX_READERS = 8
GO_ON = (
    "to go on from it, delete what is damaged (rm -r {damaged}) and give the same command again; or, in a new "
    "directory, trainer.resume_mode=resume_path trainer.resume_from_path={intact}"
)
"""What a trainer can do with an intact checkpoint where a newer one is damaged."""


@dataclass
class CheckpointStore:
    """The checkpoints of one run."""

    folder: Path
    keep: int | None = None
    """Newest ones kept besides the best; None = all."""
    reach: int = 0
    """Also kept are those back to one that is this many steps older than the newest."""
    from_start: bool = False
    """The run begins with one of the weights before its first step."""

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        score: float | None,
        write_more: Callable[[Path], dict[str, str]] = lambda folder: {},
    ) -> Path:
        """Write the checkpoint of `step`. `score` (higher is better; None = not validated) decides which is the best.
        `write_more` adds files to the folder, flushed to disk, while it still has its other name; it returns their
        names and digests.

        Raises:
            CheckpointError: the disk refused; nothing is left behind but the older checkpoints.
        """
        final = self.folder / f"step_{step:06d}"
        partial = self.folder / f".partial-step_{step:06d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            files = write_more(partial)
            with (partial / "state.pt").open("wb") as file:
                files["state.pt"] = save_tensors(to_plain(state), file)
                _sync(file)
            # Last of all: a folder without it is no checkpoint to anybody who reads.
            meta = {"schema_version": SCHEMA_VERSION, "step": step, "score": score, "files": files}
            with (partial / "meta.json").open("w") as file:
                json.dump(meta | {"sha256": _digest_of(meta)}, file)
                _sync(file)
            # Every byte is on the disk before any name changes, for a rename may reach it before the data does. A
            # folder that holds something cannot be replaced by a rename, so the old one steps aside: between the two
            # renames `all` counts it under its other name, and a kill there loses nothing.
            if final.exists():
                _remove(_aside(final))
                final.rename(_aside(final))
            partial.rename(final)
            _sync_folder(self.folder)
        except OSError as error:
            # Before the question how much room there is.
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"checkpoint of step {step}: {disk_refused(final, error)}") from error
        except DataError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step}: {error_text(error)}, which a checkpoint cannot hold. Return only numbers, "
                "texts, tensors, arrays and containers of these from state_dict()"
            ) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._prune()
        return final

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first.

        Raises:
            CheckpointError: where their folder should be is a file.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is a file, and this run's checkpoints belong into a folder of that name: move it away"
            )
        found = {p.name: p for p in self.folder.glob("step_*")}
        for aside in self.folder.glob(f"{_OLD}step_*"):
            found.setdefault(aside.name.removeprefix(_OLD), aside)
        return [found[name] for name in sorted(found) if (found[name] / "meta.json").is_file()]

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return found[-1] if (found := self.all()) else None

    def best(self) -> Path | None:
        """The one with the highest score; the newest of equals; None if none has a score."""
        scored = []
        for path in self.all():
            try:
                meta = read_meta(path)
            except CheckpointError as error:
                log.warning("%s: left out where the best checkpoint is looked for", error)
                continue
            if meta["score"] is not None:
                scored.append((meta["score"], meta["step"], path))
        return max(scored)[2] if scored else None

    def sweep(self) -> None:
        """Remove what a process that was killed has left half written or half deleted."""
        replaced = (p for p in self.folder.glob(f"{_OLD}step_*") if p.with_name(p.name.removeprefix(_OLD)).exists())
        for leftover in (*self.folder.glob(".partial-*"), *self.folder.glob(f"{_GONE}*"), *replaced):
            _remove(leftover)

    def _prune(self) -> None:
        self.sweep()
        if self.keep is None:
            return
        best, found = self.best(), self.all()
        # `reach` is counted back from the newest to a checkpoint that is really there: the one at or just before that
        # step stays, and all after it, so that a way back of so many steps never ends between two checkpoints.
        reached = [p for p in found if step_of(p) <= step_of(found[-1]) - self.reach] if self.reach else found
        oldest = step_of(reached[-1] if reached else found[0])
        for old in found[: -self.keep]:
            if old != best and step_of(old) < oldest:
                # A folder that is being emptied must not look like a checkpoint to the process that comes after a kill.
                gone = old.with_name(_GONE + old.name.removeprefix(_OLD))
                try:
                    old.rename(gone)
                except OSError as error:  # what lies under that name could not be deleted
                    log.warning("%s is kept, for it cannot be moved away: %s", old, error)
                else:
                    _remove(gone)


def _remove(path: Path) -> None:
    """A checkpoint that was moved to another disk stands here as a link: the link goes, and what it points to stays."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.rpartition("_")[2])


def _aside(path: Path) -> Path:
    return path.with_name(_OLD + path.name)


def read_meta(path: Path) -> dict[str, Any]:
    """`meta.json` of a checkpoint.

    Raises:
        CheckpointError: missing, unreadable, damaged, or of a version this program does not know.
    """
    try:
        meta = parse_json(read_bytes(path / "meta.json"))
    except (ValueError, DataError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from error
    version = meta.get("schema_version") if isinstance(meta, dict) else None
    if version not in (SCHEMA_VERSION, *PICKLED):
        raise CheckpointError(f"{path}: schema_version {version!r}, this program reads {SCHEMA_VERSION}")
    digest = meta.pop("sha256", None)
    if (version != min(PICKLED) or digest is not None) and digest != _digest_of(meta):
        raise CheckpointError(f"{path / 'meta.json'} is damaged: its content is not what was written")
    return meta


def find_damage(path: Path) -> str | None:
    """Which file of a checkpoint is damaged, and how; None where all are as they were written. Runs in the caller's
    thread. Waits for threads that read the files."""
    try:
        files = read_meta(path).get("files", {})
    except CheckpointError as error:
        return str(error)
    with ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1)) as readers:
        found = readers.map(lambda item: (item[0], damage(path / item[0], item[1])), files.items())
        return next((f"{path / name} is damaged: {what}" for name, what in found if what is not None), None)


def load(path: Path, *, way_out: str = GO_ON) -> dict[str, Any]:
    """The state that `save` wrote, after all files of the checkpoint were found to be as they were written.

    Args:
        path: the checkpoint.
        way_out: what to do with an older one, `{intact}`, where this and others, `{damaged}`, are not.

    Raises:
        CheckpointError: not a checkpoint, or damaged; names the newest one that is not.
    """
    if (what := find_damage(path)) is not None:
        raise CheckpointError(f"{what}. {_offer(path, way_out)}")
    try:
        return from_plain(read_state(path))
    except DataError as error:
        raise CheckpointError(f"{path / 'state.pt'}: {error_text(error)}. {_offer(path, way_out)}") from error


def read_state(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """`state.pt` of a checkpoint as plain data: no code runs, whoever has written it.

    Raises:
        CheckpointError: unreadable, or a pickle of an earlier version; names the command that converts it.
    """
    if read_meta(path)["schema_version"] in PICKLED:
        raise CheckpointError(
            f"{path} was written by an earlier version of verl_mt: its state.pt is a pickle, which can run code when "
            f"it is read. If you trust it, convert it: python -m verl_mt.convert_checkpoint {path}"
        )
    try:
        require_file(path / "state.pt")
        return torch.load(path / "state.pt", map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        names = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{path / 'state.pt'} names {'an object' if names is None else names[1]}, which no checkpoint of verl_mt "
            "does. Reading it could run code. Do not use this checkpoint"
        ) from error
    except Exception as error:  # a damaged file shows as anything
        raise CheckpointError(f"{path / 'state.pt'} cannot be read: {str(error).splitlines()[0]}") from error


def _offer(path: Path, way_out: str) -> str:
    damaged = [path]
    for other in reversed(CheckpointStore(path.parent).all()):
        if step_of(other) >= step_of(path):
            continue
        if find_damage(other) is None:
            words = way_out.format(intact=other, damaged=" ".join(map(str, damaged)))
            return f"The newest intact checkpoint is {other}: {words}"
        damaged.append(other)
    return "There is no older one that is intact: start a new run (trainer.resume_mode=disable)"


def _digest_of(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def version_of(state: Mapping[str, Any]) -> int:
    """Of a checkpoint's weights. In those of before versions counted rollbacks it is the step's number."""
    return state.get("version", state["step"])


def random_state() -> dict[str, Any]:
    """The global generators of python, numpy and torch."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put them back: of GPUs those of the devices that are visible now, which may be fewer or more."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved, visible = state["cuda"], torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(min(len(saved), visible)):
        torch.cuda.set_rng_state(saved[number], number)
    if saved and len(saved) != visible:
        log.warning(
            "the checkpoint has the random states of %d GPU(s), and %d are visible: those of the first %d are restored",
            len(saved), visible, min(len(saved), visible),
        )  # fmt: skip


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
