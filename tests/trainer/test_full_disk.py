"""A disk that is full ends a run with one line; with room again the same command goes on."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import warm_start
from command_lab import FEW, NO_VALIDATION, command, environment, metrics_of, small_trainer

from verl_mt.data import run_files
from verl_mt.errors import CheckpointError


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize("name", ["metrics.jsonl", "token_texts.jsonl", "step_000001.parquet"])
def test_the_file_that_does_not_fit_is_named_and_the_run_goes_on_later(tmp_path, monkeypatch, name):
    overrides = (*NO_VALIDATION, *FEW, "trainer.total_training_steps=1", "trainer.save_freq=1")
    trainer = small_trainer(tmp_path / "run", *overrides)
    original = os.fsync

    def full(handle):
        if name in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=rf"{name}: No space left on device \("):
        patched.setattr(run_files.os, "fsync", full)
        trainer.fit()
    small_trainer(tmp_path / "run", *overrides).fit()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1]
    assert not [p for p in (tmp_path / "run" / "rollouts").iterdir() if p.name.startswith(".")]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own: (folder, a function that gives it another size)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk of its own can be mounted here: {mounted.stderr.decode().strip()}")

    def resize(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)

    try:
        yield folder, resize
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="only root mounts a disk")
@pytest.mark.parametrize(
    "room", ["40k", "26m", *(pytest.param(room, marks=pytest.mark.release) for room in ("12k", "400k", "18m"))]
)
def test_on_a_full_disk_a_run_ends_with_one_line_and_goes_on_once_there_is_room(small_disk, tmp_path, room):
    """In turn: the configuration, TensorBoard or rollouts, the first checkpoint, a later one do not fit."""
    folder, resize = small_disk
    resize(room)
    # Checkpoints hold the state of the optimizer from the first step on.
    moves = ("actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.skip_zero_advantage=False")
    words = command(
        f"trainer.default_local_dir={folder}/run", *FEW, *moves, "trainer.save_freq=1", "data.val_files=null"
    )
    ended = warm_start.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr, ended.stderr
    (error,) = (line for line in ended.stderr.splitlines() if line.startswith("error:"))
    assert "space" in error and str(folder) in error
    assert not [p for p in Path(folder).rglob("*") if p.name.startswith((".partial-", ".step_")) or p.suffix == ".tmp"]
    resize("200m")
    again = warm_start.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line["step"] for line in metrics_of(folder / "run")] == [1, 2, 3]
    assert (folder / "run" / "FINISHED").exists()
