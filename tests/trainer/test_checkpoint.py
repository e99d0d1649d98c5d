"""Checkpoints are whole or absent; the newest few and the best stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verl_mt.errors import CheckpointError
from verl_mt.trainer import checkpoint
from verl_mt.trainer.checkpoint import CheckpointStore


def names(store):
    return [p.name for p in store.all()]


def test_what_was_saved_is_loaded(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, {"x": torch.arange(4), "random": checkpoint.random_state()}, score=0.5)
    state = checkpoint.load(store.latest())
    assert state["x"].tolist() == [0, 1, 2, 3]
    before = torch.rand(2)
    checkpoint.set_random_state(state["random"])
    assert torch.equal(torch.rand(2), before)


def test_the_newest_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step, score in enumerate([0.1, 0.9, 0.3, 0.2, 0.2], start=1):
        store.save(step, {}, score=score)
    assert names(store) == ["step_000002", "step_000004", "step_000005"]
    assert store.best().name == "step_000002"


def test_a_half_written_checkpoint_is_not_seen_and_is_cleaned_up(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {}, score=None)
    half = tmp_path / ".partial-step_000002"
    half.mkdir()
    (half / "state.pt").write_bytes(b"torn")
    assert store.latest().name == "step_000001"
    store.save(3, {}, score=None)
    assert not half.exists()


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"x": 1}, score=None)
    store.save(1, {"x": 2}, score=None)
    assert checkpoint.load(store.latest()) == {"x": 2}


@pytest.mark.parametrize("renames", [0, 1])
def test_a_process_killed_while_a_step_is_saved_again_leaves_a_checkpoint(tmp_path, monkeypatch, renames):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"x": 1}, score=None)
    original, done = Path.rename, []

    def rename(self, target):
        if len(done) == renames:
            raise KeyboardInterrupt  # No handler of `save` runs, as if it had been killed.
        done.append(self)
        return original(self, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", rename)
        store.save(1, {"x": 2}, score=None)
    left = CheckpointStore(tmp_path, keep=1)
    assert checkpoint.load(left.latest()) == {"x": 1}
    left.save(1, {"x": 3}, score=None)
    assert checkpoint.load(left.latest()) == {"x": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_a_checkpoint_that_was_moved_aside_is_an_older_one_like_any_other(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"x": 1}, score=0.9).rename(tmp_path / ".old-step_000001")
    assert store.best() == store.latest() == tmp_path / ".old-step_000001"
    store.save(2, {"x": 2}, score=0.1)
    assert names(store) == [".old-step_000001", "step_000002"], "the best stays"
    store.save(3, {"x": 3}, score=1.0)
    assert names(store) == ["step_000003"]


def test_a_damaged_checkpoint_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"x": 1}, score=None)
    (path / "state.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"step_000001/state\.pt cannot be read"):
        checkpoint.load(path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.load(tmp_path)
