"""A checkpoint of any placement becomes a folder that `from_pretrained` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tables import before_release

from verl_mt import export
from verl_mt.config.compose import compose
from verl_mt.trainer import checkpoint
from verl_mt.trainer.build import build_trainer
from verl_mt.workers.sharded_checkpoint import save_shards

pytestmark = pytest.mark.slow

SMALL = [
    "data.train_batch_size=2", "data.train_max_samples=8", "data.val_files=null", "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=1", "trainer.logger=[]", "trainer.num_threads=1", "trainer.resume_mode=disable",
]  # fmt: skip


@pytest.fixture
def run(finished) -> Path:
    return finished("plain")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_is_exported_as_the_run_itself_would(run, tmp_path, capsys):
    assert export.main([str(run), "--out", str(tmp_path / "model")]) == 0
    assert "written to" in capsys.readouterr().out
    assert same(weights(tmp_path / "model"), weights(run / "hf"))
    names = {p.name for p in (tmp_path / "model").iterdir()}
    assert names == {p.name for p in (run / "hf").iterdir()}


def test_a_sharded_checkpoint_is_exported_too(run, tmp_path):
    """As Ray workers leave it: the small part in state.pt, all tensors in actor/."""
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", ".origin"):
        shutil.copy(run / name, tmp_path / "run")
    state = checkpoint.load(run / "checkpoints" / "step_000004")
    tensors = state["workers"]["actor"].pop("tensors")
    store = checkpoint.CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = store.save(1, state, score=None, write_more=lambda folder: save_shards(tensors, folder))
    assert export.main(["--checkpoint", str(folder), "--out", str(tmp_path / "model")]) == 0
    assert same(weights(tmp_path / "model"), weights(run / "hf"))


@pytest.fixture(scope="module")
def bfloat16_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bfloat16") / "run"
    options = [f"trainer.default_local_dir={folder}", "actor_rollout_ref.model.dtype=bfloat16"]
    options += ["trainer.total_training_steps=2", "actor_rollout_ref.rollout.response_length=24"]
    options += ["actor_rollout_ref.actor.skip_zero_advantage=False", "actor_rollout_ref.actor.entropy_coeff=0.01"]
    build_trainer(compose([*SMALL, *options])).fit()
    return folder


@pytest.mark.parametrize("sharded", [before_release(False), True])
def test_float32_weights_of_a_bfloat16_run_are_those_of_its_optimizer(bfloat16_run, tmp_path, sharded):
    """Rounded they are what the run itself exports."""
    folder = bfloat16_run / "checkpoints" / "step_000002"
    tensors = checkpoint.load(folder)["workers"]["actor"]["tensors"]
    if sharded:
        state = checkpoint.load(folder)
        del state["workers"]["actor"]["tensors"]
        (tmp_path / "run").mkdir()
        for name in ("config.yaml", ".origin"):
            shutil.copy(bfloat16_run / name, tmp_path / "run")
        store = checkpoint.CheckpointStore(tmp_path / "run" / "checkpoints")
        folder = store.save(1, state, score=None, write_more=lambda folder: save_shards(tensors, folder))
    assert export.main(["--checkpoint", str(folder), "--out", str(tmp_path / "exact"), "--dtype", "float32"]) == 0
    found, rounded = weights(tmp_path / "exact"), weights(bfloat16_run / "hf")
    assert {t.dtype for t in found.values()} == {torch.float32}
    masters = {name: t for name, t in tensors.items() if name.endswith(".master")}
    assert masters and any(not torch.equal(t, t.to(torch.bfloat16).float()) for t in masters.values())
    for name, master in masters.items():
        own = name.removeprefix("optimizer.").removesuffix(".master")
        assert torch.equal(found[own], master) and torch.equal(rounded[own], master.to(torch.bfloat16))


def test_adapters_are_exported_with_the_weights_that_they_were_trained_on(finished, tmp_path, capsys):
    run = finished("lora")
    told = ["--checkpoint", str(run), "--out", str(tmp_path / "model"), "--dtype"]
    assert export.main([*told, "float32"]) == 2 and "trained on weights in bfloat16" in capsys.readouterr().err
    assert export.main([*told, "bfloat16"]) == 0
    assert same(weights(tmp_path / "model"), weights(run / "hf"))


def test_a_damaged_checkpoint_is_refused_with_the_newest_intact_one(run, tmp_path, capsys):
    store = checkpoint.CheckpointStore(run / "checkpoints")
    damaged = store.save(5, checkpoint.load(store.latest()), score=None)
    content = bytearray((damaged / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "state.pt").write_bytes(content)
    assert export.main(["--checkpoint", str(run), "--out", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert f"{damaged}/state.pt is damaged" in said
    assert f"verl_mt.export {run}/checkpoints/step_000004 exports it" in said
    assert not (tmp_path / "model").exists()


def test_what_is_no_checkpoint_or_has_no_config_is_refused(run, tmp_path, capsys):
    assert export.main(["--checkpoint", str(tmp_path), "--out", str(tmp_path / "model")]) == 2
    assert "neither a checkpoint (no meta.json) nor a run directory" in capsys.readouterr().err
    moved = tmp_path / "a" / "b" / "step_000004"
    shutil.copytree(run / "checkpoints" / "step_000004", moved)
    assert export.main(["--checkpoint", str(moved), "--out", str(tmp_path / "model")]) == 2
    assert "--config" in capsys.readouterr().err
    words = ["--checkpoint", str(moved), "--out", str(tmp_path / "model"), "--config", str(run / "config.yaml")]
    assert export.main(words) == 0
