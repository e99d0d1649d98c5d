"""Checkpoints are whole or absent; the newest few and the best stay."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from verl_mt.data.digests import save_tensors
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
    with pytest.raises(CheckpointError, match=r"step_000001/state\.pt is damaged"):
        checkpoint.load(path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.load(tmp_path)


def add_shard(folder):
    (folder / "actor").mkdir()
    (folder / "actor" / "__0_0.distcp").write_bytes(b"shard" * 100)
    return {"actor/__0_0.distcp": f"{hashlib.sha256(b'shard' * 100).hexdigest()} 500"}


@pytest.mark.parametrize("name", ["state.pt", "meta.json", "actor/__0_0.distcp"])
def test_one_flipped_bit_anywhere_is_seen_and_the_newest_intact_one_offered(tmp_path, name):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        store.save(step, {"x": torch.arange(1000)}, score=0.5, write_more=add_shard)
    for step in (3, 4):
        file = tmp_path / f"step_{step:06d}" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2 if name != "meta.json" else content.index(b"0.5") + 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(store.latest())
    said = str(error.value)
    assert f"step_000004/{name} is damaged" in said
    assert f"The newest intact checkpoint is {tmp_path}/step_000002" in said
    assert f"rm -r {tmp_path}/step_000004 {tmp_path}/step_000003" in said
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={tmp_path}/step_000002" in said
    assert checkpoint.load(tmp_path / "step_000002")["x"].shape == (1000,)


def test_a_missing_shard_is_damage_and_no_other_checkpoint_means_a_new_run(tmp_path):
    path = CheckpointStore(tmp_path).save(1, {}, score=None, write_more=add_shard)
    (path / "actor" / "__0_0.distcp").unlink()
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp is damaged: it is missing.*no older.*resume_mode=disable"
    ):
        checkpoint.load(path)


class Evil:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.mark.parametrize("mmap", [True, False])
def test_a_state_that_names_code_is_refused_and_runs_nothing(tmp_path, mmap):
    """Its digests are right: an attacker computes them too."""
    path = CheckpointStore(tmp_path).save(1, {"x": 1}, score=None)
    with (path / "state.pt").open("wb") as file:
        digest = save_tensors({"prompts": {"drawn": Evil(tmp_path / "owned")}}, file)
    meta = {**checkpoint.read_meta(path), "files": {"state.pt": digest}}
    (path / "meta.json").write_text(json.dumps(meta | {"sha256": checkpoint._digest_of(meta)}))
    assert checkpoint.find_damage(path) is None
    with pytest.raises(CheckpointError, match=r"state\.pt names io\.open, .*Do not use"):
        checkpoint.read_state(path, mmap=mmap)
    with pytest.raises(CheckpointError, match=r"state\.pt names io\.open"):
        checkpoint.load(path)
    assert not (tmp_path / "owned").exists()


def test_the_best_is_looked_for_beside_a_damaged_one(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=2)
    for step, score in enumerate([0.9, 0.1], start=1):
        store.save(step, {}, score=score)
    (tmp_path / "step_000001" / "meta.json").write_text("{")
    store.save(3, {}, score=0.2)
    assert store.best().name == "step_000003" and "step_000001" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("numbers", [10, 1_000_000])
def test_a_full_disk_leaves_the_older_checkpoints_and_nothing_else(tmp_path, numbers):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"x": 1}, score=None)

    def fill_disk(folder):
        (folder / "state.pt").symlink_to("/dev/full")
        return {}

    with pytest.raises(CheckpointError, match=r"step 2: .*No space left on device \(\d+ bytes free.*same command"):
        store.save(2, {"x": torch.arange(numbers)}, score=None, write_more=fill_disk)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_whatever_else_goes_wrong_while_it_is_written_leaves_nothing_either(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 1: sampler\[0\]\.x is a builtins\.generator.*state_dict"):
        store.save(1, {"sampler": [{"x": (n for n in ())}]}, score=None)
    assert not list(tmp_path.iterdir())


def test_a_kill_while_an_old_one_is_deleted_leaves_no_half_checkpoint_for_ever(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"x": 1}, score=None, write_more=add_shard)
    original = shutil.rmtree

    def killed(path, *args, **kwargs):
        if (Path(path) / "actor").exists():
            (Path(path) / "meta.json").unlink()
            raise KeyboardInterrupt  # no handler of `save` runs
        original(path, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint.shutil, "rmtree", killed)
        store.save(2, {"x": 2}, score=None)
    assert names(store) == ["step_000002"]
    CheckpointStore(tmp_path, keep=1).sweep()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


def test_an_old_one_that_cannot_be_moved_away_is_kept_and_ends_no_run(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"x": 1}, score=None)
    (tmp_path / ".gone-step_000001" / "held").mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "_remove", lambda path: None)
    store.save(2, {"x": 2}, score=None)
    assert names(store) == ["step_000001", "step_000002"] and "is kept" in caplog.text


def test_a_checkpoint_on_another_disk_is_replaced_and_left_out_like_any_other(tmp_path):
    store = CheckpointStore(tmp_path / "run", keep=1)
    moved = Path(shutil.move(store.save(1, {"x": 1}, score=None), tmp_path / "disk"))
    (store.folder / "step_000001").symlink_to(moved)
    for _ in range(2):
        store.save(1, {"x": 3}, score=None)
    assert checkpoint.load(store.latest())["x"] == 3 and (moved / "state.pt").is_file()
    shutil.rmtree(store.folder / "step_000001")
    (store.folder / "step_000001").symlink_to(moved)
    store.save(2, {"x": 2}, score=None)
    assert [p.name for p in store.folder.iterdir()] == ["step_000002"]


def test_a_version_that_a_flipped_bit_made_older_is_damage(tmp_path):
    meta = CheckpointStore(tmp_path).save(1, {"x": 1}, score=None) / "meta.json"
    meta.write_text(meta.read_text().replace('"schema_version": 4', '"schema_version": 3'))
    with pytest.raises(CheckpointError, match=r"meta.json is damaged"):
        checkpoint.read_meta(meta.parent)


def test_a_file_in_the_place_of_the_checkpoints_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(CheckpointError, match="checkpoints is a file"):
        CheckpointStore(tmp_path / "checkpoints").latest()


@pytest.mark.parametrize(("saved", "visible"), [(4, 2), (1, 2), (2, 0)])
def test_where_other_gpus_are_visible_the_states_of_those_in_common_are_restored(monkeypatch, caplog, saved, visible):
    restored = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append((state, device)))
    checkpoint.set_random_state(checkpoint.random_state() | {"cuda": [f"state {k}" for k in range(saved)]})
    assert restored == [(f"state {k}", k) for k in range(min(saved, visible))]
    assert f"random states of {saved} GPU(s), and {visible} are visible" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_random_numbers_of_a_gpu_go_on_where_two_were_saved():
    state = checkpoint.random_state()
    expected = torch.rand(3, device="cuda")
    assert len(state["cuda"]) == torch.cuda.device_count()
    checkpoint.set_random_state(state | {"cuda": [*state["cuda"], state["cuda"][0]]})
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_before_versions_counted_rollbacks_they_were_the_steps_number():
    assert checkpoint.version_of({"step": 7}) == 7 and checkpoint.version_of({"step": 7, "version": 9}) == 9
