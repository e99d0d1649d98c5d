"""The worker group that a config declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from actor_toys import tiny_policy

from verl_mt.config.actor import ActorConfig, ModelConfig, RefConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import ConfigError
from verl_mt.modeling.passes import PLAIN
from verl_mt.workers import setup, worker_group
from verl_mt.workers.sharding import Ranks
from verl_mt.workers.worker_group import build_worker_group


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 29, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(folder)
    return folder


def a_batch():
    trajectories = []
    for sample, reward in enumerate((1.0, 0.0)):
        record = TrajectoryRecord()
        record.append_given([1, 2, 3], kind="prompt", turn=0)
        record.append_sampled([4 + sample, 6], [-1.0, -1.0], [0, 0], turn=1)
        name = f"t{sample}"
        trajectories.append(
            Trajectory(name, "p", "p", name, records=[record], reward=reward, stop_reason=StopReason.FINISHED)
        )
    batch = col.build_batch(trajectories, pad_token_id=0)
    assert batch is not None
    batch[col.ADVANTAGES] = col.expand_to_tokens(batch, torch.tensor([1.0, -1.0]))
    return batch


def build(folder, *, checkpointing: bool = False, **actor):
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=checkpointing)
    config = ActorRolloutRefConfig(model=model, actor=ActorConfig(**actor))
    return build_worker_group(config, total_steps=10, train_batch_size=1)


def test_without_a_kl_term_there_is_no_reference_policy(model_folder):
    workers = build(model_folder)
    batch = a_batch()
    workers.add_ref_log_probs(batch)
    assert workers.ref is None and col.REF_LOG_PROBS not in batch.keys()  # noqa: SIM118
    assert workers.policy_module is workers.actor.module
    assert workers.update(batch)["actor/num_updates"] == 1


def test_the_reference_policy_never_moves_and_survives_a_resume(model_folder):
    workers = build(model_folder, use_kl_loss=True)
    start = workers.compute_log_probs(a_batch())
    for _ in range(3):
        batch = a_batch()
        workers.add_ref_log_probs(batch)
        torch.testing.assert_close(batch[col.REF_LOG_PROBS], start)
        metrics = workers.update(batch)
    assert metrics["actor/kl_loss"] > 0
    resumed = build(model_folder, use_kl_loss=True)
    resumed.load_state_dict(workers.state_dict())
    assert torch.equal(resumed.compute_log_probs(a_batch()), workers.compute_log_probs(a_batch()))
    batch = a_batch()
    resumed.add_ref_log_probs(batch)
    torch.testing.assert_close(batch[col.REF_LOG_PROBS], start)


def test_gradient_checkpointing_is_switched_on_by_the_config(model_folder):
    workers = build(model_folder, checkpointing=True)
    assert workers.policy_module.is_gradient_checkpointing
    assert workers.update(a_batch())["actor/num_updates"] == 1
    assert not workers.policy_module.training


def test_a_device_that_cannot_be_had_is_refused(model_folder):
    config = ActorRolloutRefConfig(model=ModelConfig(path=str(model_folder)))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"trainer\.device=cuda: torch finds no CUDA device"):
            build_worker_group(config, total_steps=1, device="cuda")


@pytest.mark.slow
def test_workers_in_this_process_load_neither_ray_nor_what_only_ranks_need(model_folder):
    code = (
        "import sys; from test_worker_group import build\n"
        f"build({str(model_folder)!r}); assert 'ray' not in sys.modules\n"
        "assert 'torch.distributed.checkpoint' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_an_offloaded_reference_policy_gives_the_same_log_probs(model_folder):
    """On the CPU there is nothing to move; the key only says where the weights wait."""
    results = []
    for offload in (False, True):
        config = ActorRolloutRefConfig(
            model=ModelConfig(path=str(model_folder)),
            actor=ActorConfig(use_kl_loss=True),
            ref=RefConfig(offload=offload),
        )
        batch = a_batch()
        build_worker_group(config, total_steps=1, train_batch_size=1).add_ref_log_probs(batch)
        results.append(batch[col.REF_LOG_PROBS])
    assert torch.equal(*results)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_trial_of_a_policy_over_ranks_is_for_their_device(monkeypatch, rank):
    """And with what `actor.fsdp_size` says: all that `_spread` hands on."""
    asked, made = [], []
    monkeypatch.setattr(setup, "choose_passes", lambda module, **options: asked.append(options) or PLAIN)
    monkeypatch.setattr(setup, "ShardedPolicy", lambda module, ranks, **options: made.append((ranks, options)))
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [PLAIN] * ranks.size)
    actor = ActorConfig(fsdp_size=2, ulysses_sequence_parallel_size=2, share_prefixes=False)
    config = ActorRolloutRefConfig(model=ModelConfig(path="x"), actor=actor)
    placement = setup.Placement("ray", n_workers_per_node=4)
    worker_setup = setup.WorkerSetup(config, 1, None, "cuda", 0, placement)
    ranks = worker_setup.ranks(rank)
    assert (ranks.size, ranks.sequence, ranks.num_parts) == (4, 2, 2)
    setup._spread(tiny_policy(), worker_setup, ranks)
    assert asked == ([{"remove_padding": True, "share_prefixes": False, "device": "cuda"}] if rank == 0 else [])
    assert made == [(ranks, {"device_type": "cuda", "offload": False, "shard": 2})]


def test_peft_is_required_only_where_adapters_are_trained(monkeypatch):
    def lacking() -> None:
        raise ConfigError("peft is not installed")

    def loading(setup) -> None:
        raise ConfigError("the model is loaded")

    monkeypatch.setattr(worker_group, "require_peft", lacking)
    monkeypatch.setattr(worker_group, "load_workers", loading)
    for lora_rank, said in ((0, "the model is loaded"), (4, "peft is not installed")):
        config = ActorRolloutRefConfig(model=ModelConfig(lora_rank=lora_rank))
        with pytest.raises(ConfigError, match=said):
            build_worker_group(config, total_steps=1, train_batch_size=1)
