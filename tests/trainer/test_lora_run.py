"""Whole runs with low-rank adapters: they learn, resume bit for bit, and leave a plain model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from command_lab import FEW, VARIED, fit, metrics_of, small_trainer

from verl_mt import export
from verl_mt.config_paths import resolve_model_path
from verl_mt.modeling.load import load_causal_lm
from verl_mt.modeling.lora import without_adapters
from verl_mt.trainer import checkpoint
from verl_mt.workers.sharded_checkpoint import save_shards

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("lora_run")]  # one process makes the run

LORA = "actor_rollout_ref.model.lora_rank=4"
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1")
SHORT = (
    LORA,
    *KL,
    "data.val_files=null",
    *FEW,
    VARIED,
    "trainer.total_training_steps=2",
    "trainer.deterministic=True",
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.optim.lr=3e-3",
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run of two steps and its export."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    fit(folder, *SHORT)
    return folder


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run / "checkpoints" / "step_000002")["workers"]["actor"]["tensors"]


def test_a_run_goes_on_bit_for_bit(straight, tmp_path):
    saved = f"trainer.resume_from_path={straight}/checkpoints/step_000001"
    lines = fit(tmp_path / "run", *SHORT, "trainer.resume_mode=resume_path", saved)
    assert lines == metrics_of(straight)[1:] and len(lines) == 1
    again, expected = tensors_of(tmp_path / "run"), tensors_of(straight)
    assert again.keys() == expected.keys() and all(".lora_" in name for name in again)
    assert all(torch.equal(again[name], expected[name]) for name in again)


def test_the_reference_of_the_run_is_its_base(straight):
    """The first step's KL term is 0 to the bit: adapters start at 0. Later ones are not."""
    terms = [line["actor/kl_loss"] for line in metrics_of(straight)]
    assert terms[0] == 0 and all(term > 0 for term in terms[1:])
    assert all(line["rollout/logprob_diff_max"] < 1e-4 for line in metrics_of(straight))


def test_its_export_is_a_plain_model_with_the_adapter_beside_it(straight, tmp_path):
    import peft

    assert export.main(["--checkpoint", str(straight), "--out", str(tmp_path / "model")]) == 0
    exported, by_run = (load_causal_lm(str(folder)) for folder in (tmp_path / "model", straight / "hf"))
    base = load_causal_lm("verl_mt://tiny")
    assert exported.state_dict().keys() == base.state_dict().keys()
    assert all(torch.equal(t, by_run.state_dict()[name]) for name, t in exported.state_dict().items())
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "model" / "adapter")
    ids = torch.arange(5, 45).unsqueeze(0)
    with torch.no_grad():
        one, other = exported(input_ids=ids).logits, with_adapter(input_ids=ids).logits
        plain = load_causal_lm("verl_mt://tiny")(input_ids=ids).logits
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert float((one - plain).abs().max()) > 1e-2
    assert str(resolve_model_path("verl_mt://tiny")) == with_adapter.peft_config["default"].base_model_name_or_path


def test_a_sharded_checkpoint_of_adapters_is_exported_too(straight, tmp_path):
    """As Ray workers leave it: the small part in state.pt, adapters in actor/."""
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", ".origin"):
        shutil.copy(straight / name, tmp_path / "run")
    state = checkpoint.load(straight / "checkpoints" / "step_000002")
    tensors = state["workers"]["actor"].pop("tensors")
    store = checkpoint.CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = store.save(2, state, score=None, write_more=lambda folder: save_shards(tensors, folder))
    assert export.main(["--checkpoint", str(folder), "--out", str(tmp_path / "model")]) == 0
    exported, by_run = (load_causal_lm(str(path)).state_dict() for path in (tmp_path / "model", straight / "hf"))
    assert all(torch.equal(tensor, by_run[name]) for name, tensor in exported.items())


def test_another_run_may_start_from_its_export(straight, tmp_path):
    """Which has no adapters: the run puts new ones on it, and they start at 0."""
    trainer = small_trainer(tmp_path / "next", *SHORT, f"actor_rollout_ref.model.path={straight / 'hf'}")
    try:
        merged = without_adapters(trainer.workers.policy_module).state_dict()
    finally:
        trainer.close()
    exported = load_causal_lm(str(straight / "hf")).state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in exported.items())


@pytest.mark.release
def test_adapters_alone_learn_the_default_task(tmp_path):
    lines = fit(
        tmp_path / "run",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
        "actor_rollout_ref.rollout.n=8",
        "data.train_batch_size=12",
        "data.train_max_samples=4096",
        "data.val_files=null",
        "trainer.total_training_steps=12",
        "trainer.deterministic=True",
        "trainer.export_at_end=False",
    )
    rewards = [line["reward/mean"] for line in lines]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.1, rewards
