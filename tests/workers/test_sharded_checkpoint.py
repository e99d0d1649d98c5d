"""A checkpoint of any number of ranks goes on with any other."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from actor_toys import REWARDS, make_batch
from sharded_jobs import digests_of_save, load_and_train, train_and_save
from tables import before_release
from torch.distributed.checkpoint.api import CheckpointException

from verl_mt.data.digests import damage
from verl_mt.errors import CheckpointError
from verl_mt.workers import sharded_checkpoint as module
from verl_mt.workers.sharded_checkpoint import has_shards, load_shards, save_shards, stored_shapes
from verl_mt.workers.sharding import ALONE

OPTIONS = {"total_steps": 6, "ppo_mini_batch_size": 1, "optim": {"lr_warmup_steps": 2}}


def batches(first: int, count: int = 1):
    return [make_batch(REWARDS, seed=seed) for seed in range(first, first + count)]


class Evil:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.mark.parametrize("read", [stored_shapes, lambda folder: load_shards({"w": torch.zeros(3)}, folder)])
def test_metadata_that_names_code_is_refused_and_runs_nothing(tmp_path, read):
    save_shards({"w": torch.arange(3.0)}, tmp_path)
    assert stored_shapes(tmp_path) == {"w": (3,)}
    (tmp_path / "actor" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(CheckpointError, match=r"\.metadata names io\.open"):
        read(tmp_path)
    (tmp_path / "actor" / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(CheckpointError, match=r"\.metadata holds a list"):
        read(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3), before_release(2, 2)])
def test_a_checkpoint_loads_on_another_number_of_ranks_and_training_goes_on(ranks, tmp_path, before, after):
    def run(size, function, *args):
        return function(ALONE, *args, **OPTIONS) if size == 1 else ranks(size)(function, *args, **OPTIONS)[0]

    saved = run(before, train_and_save, batches(0), tmp_path)
    whole_state = saved.pop("tensors")
    loaded, ahead = run(after, load_and_train, saved, tmp_path, batches(1))
    assert loaded.keys() == whole_state.keys()
    assert all(torch.equal(loaded[name], whole_state[name]) for name in loaded)
    assert saved["num_updates"] == 3
    _, expected = load_and_train(ALONE, {**saved, "tensors": whole_state}, None, batches(1), **OPTIONS)
    for name, tensor in expected.items():
        torch.testing.assert_close(ahead[name], tensor, atol=1e-4, rtol=1e-2, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.slow
def test_float32_masters_of_a_bfloat16_policy_are_sharded_and_kept(ranks, tmp_path):
    options = {**OPTIONS, "dtype": torch.bfloat16}
    saved = ranks(2)(train_and_save, batches(0), tmp_path, **options)[0]
    whole_state = saved.pop("tensors")
    masters = {name: t for name, t in whole_state.items() if name.endswith(".master")}
    assert masters and all(t.dtype == torch.float32 for t in masters.values())
    loaded, _ = ranks(3)(load_and_train, saved, tmp_path, batches(1), **options)[0]
    assert loaded.keys() == whole_state.keys()
    assert all(torch.equal(loaded[name], whole_state[name]) for name in loaded)
    alone = train_and_save(ALONE, batches(0), tmp_path / "alone", **options)["tensors"]
    assert {n: (t.dtype, t.shape) for n, t in alone.items()} == {n: (t.dtype, t.shape) for n, t in loaded.items()}


@pytest.mark.slow
def test_a_whole_checkpoint_of_one_process_loads_on_ranks(ranks, tmp_path):
    saved = train_and_save(ALONE, batches(0), tmp_path, **OPTIONS)
    loaded, _ = ranks(3)(load_and_train, saved, None, [], **OPTIONS)[2]
    assert all(torch.equal(loaded[name], saved["tensors"][name]) for name in loaded)


def test_before_the_first_update_there_is_no_optimizer_state_to_save(tmp_path):
    saved = train_and_save(ALONE, [], tmp_path)
    assert not any(name.startswith("optimizer.") for name in stored_shapes(tmp_path))
    saved.pop("tensors")
    _, ahead = load_and_train(ALONE, saved, tmp_path, batches(0, 2))
    straight = train_and_save(ALONE, batches(0, 2), tmp_path / "straight")["tensors"]
    assert all(torch.equal(ahead[name], straight[name]) for name in straight)


def test_each_weight_is_stored_once_although_embeddings_are_tied(tmp_path):
    tensors = train_and_save(ALONE, batches(0), tmp_path)["tensors"]
    assert "module.model.embed_tokens.weight" in tensors and "module.lm_head.weight" not in tensors


def test_sharded_checkpoint_that_are_missing_torn_or_of_another_model_are_refused(tmp_path):
    saved = train_and_save(ALONE, batches(0), tmp_path)["tensors"]
    with pytest.raises(CheckpointError, match="no shards of the actor"):
        load_shards(saved, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"another model: 1 tensors differ, among them module\.extra"):
        load_shards({**saved, "module.extra": torch.zeros(1)}, tmp_path)
    next((tmp_path / "actor").glob("*.distcp")).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"cannot be read: .*resume from an older one"):
        load_shards(saved, tmp_path)


def names_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_every_file_has_a_digest(tmp_path):
    digests = digests_of_save(ALONE, tmp_path)
    assert digests.keys() == names_below(tmp_path) >= {"actor/.metadata"}
    assert all(damage(tmp_path / name, digest) is None for name, digest in digests.items())


@pytest.mark.slow
def test_each_rank_makes_the_digests_of_its_own_files(ranks, tmp_path):
    one, two = ranks(2)(digests_of_save, tmp_path)
    assert one and two and not one.keys() & two.keys()
    assert one.keys() | two.keys() == names_below(tmp_path)
    assert all(damage(tmp_path / name, digest) is None for name, digest in (one | two).items())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_said_in_one_line(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(CheckpointError) as error:
        digests_of_save(ALONE, tmp_path)
    assert f"cannot write {tmp_path}/actor: No space left on device (" in str(error.value)
    assert "\n" not in str(error.value)


# Small ones, in this process

WEIGHTS = {"module.a": [1.0, 2.0], "module.b": [3.0]}
REST = {"optimizer.a.master": [1.5, 2.5], "optimizer.a.exp_avg": [4.0, 5.0]}


def tensors(named):
    return {name: torch.tensor(values) for name, values in named.items()}


def zeros(named):
    return {name: torch.zeros(len(values)) for name, values in named.items()}


@pytest.mark.parametrize(
    "asked", [WEIGHTS | REST, WEIGHTS, {"optimizer.a.master": [1.5, 2.5]}], ids=["all", "weights", "masters"]
)
def test_weights_or_masters_may_be_read_without_the_rest(tmp_path, asked):
    assert not has_shards(tmp_path, "critic")
    digests = save_shards(tensors(WEIGHTS | REST), tmp_path, "critic")
    assert has_shards(tmp_path, "critic") and not has_shards(tmp_path)
    assert all(name.startswith("critic/") for name in digests)
    assert stored_shapes(tmp_path, "critic") == {name: (len(v),) for name, v in (WEIGHTS | REST).items()}
    into = zeros(asked)
    load_shards(into, tmp_path, "critic")
    assert {name: tensor.tolist() for name, tensor in into.items()} == asked


@pytest.mark.parametrize(
    ("asked", "number", "first"),
    [
        ({"module.a": [1.0, 2.0]}, 1, "module.b"),
        ({"module.a": [1.0], "module.b": [1.0, 1.0]}, 2, "module.a"),
        ({"module.a": [1.0, 2.0], "module.b": [3.0], "optimizer.a.master": [1.5, 2.5]}, 1, "optimizer.a.exp_avg"),
    ],
)
def test_shards_of_another_model_are_refused(tmp_path, asked, number, first):
    save_shards(tensors(WEIGHTS | REST), tmp_path)
    with pytest.raises(CheckpointError, match=rf"{number} tensors differ, among them {first}\."):
        load_shards(zeros(asked), tmp_path)


@pytest.mark.parametrize("folder", [None, Path("nowhere")])
def test_missing_shards_are_named(folder):
    with pytest.raises(CheckpointError, match=r"no shards of the critic \(critic/\.metadata\)"):
        stored_shapes(folder, "critic")


def test_what_happened_on_a_rank_is_said_in_one_line(monkeypatch, tmp_path):
    error = CheckpointException("whole traceback", {1: (OSError("disk on fire"), None)})

    def fails(*args, **options):
        raise error

    monkeypatch.setattr(module.dcp, "save", fails)
    with pytest.raises(CheckpointError, match=r"cannot write .*actor: OSError: disk on fire$"):
        save_shards(tensors(WEIGHTS), tmp_path)
    error = OSError("no such place")
    with pytest.raises(CheckpointError, match=r"cannot write .*actor: OSError: no such place$"):
        save_shards(tensors(WEIGHTS), tmp_path)


@pytest.mark.parametrize(
    ("available", "initialised", "alone"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_a_process_of_its_own_saves_alone_and_torch_does_not_warn(monkeypatch, available, initialised, alone):
    of = SimpleNamespace(is_available=lambda: available, is_initialized=lambda: initialised)
    monkeypatch.setattr(module, "dist", of)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with module._quiet_alone() as found:
            warnings.warn("torch.distributed is disabled, unavailable", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert found == alone and [str(w.message) for w in seen] == ["something else"]


def test_shards_are_flushed_to_disk(monkeypatch, tmp_path):
    real, asked = module.FileSystemWriter, []
    monkeypatch.setattr(
        module, "FileSystemWriter", lambda *args, **options: asked.append(options) or real(*args, **options)
    )
    save_shards(tensors(WEIGHTS), tmp_path)
    assert asked == [{"sync_files": True}]
