"""Low-rank adapters on Ray ranks: the numbers of one process, merged weights, checkpoints to and fro."""

from __future__ import annotations

import pytest
import torch
from actor_toys import REWARDS, make_batch, tiny_policy

from verl_mt.config.actor import ActorConfig, ModelConfig, OptimConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.data import batch as col
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.workers.setup import Placement
from verl_mt.workers.worker_group import build_worker_group

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_policy().save_pretrained(path)
    return path


def build(folder, ranks=0, **lora):
    """In this process, or on that many Ray workers."""
    model = ModelConfig(path=str(folder), **({"lora_rank": 4} | lora))
    actor = ActorConfig(use_kl_loss=True, kl_loss_coef=0.1, optim=OptimConfig(lr=1e-2))
    config = ActorRolloutRefConfig(model=model, actor=actor)
    placement = Placement("ray", n_workers_per_node=ranks, num_threads=1) if ranks else "inline"
    return build_worker_group(config, total_steps=10, train_batch_size=3, placement=placement)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_on_ranks_are_those_of_one_process(cluster, folder, tmp_path, ranks):
    inline, on_ray = build(folder), build(folder, ranks)
    try:
        assert (on_ray.num_parameters, on_ray.num_trained) == (inline.num_parameters, inline.num_trained)
        for name, tensor in inline.adapter().tensors.items():
            assert torch.equal(on_ray.adapter().tensors[name], tensor), "another start"
        for seed in range(2):
            batch, other = make_batch(REWARDS, seed=seed), make_batch(REWARDS, seed=seed)
            for group, one in ((inline, batch), (on_ray, other)):
                group.add_ref_log_probs(one)
            expected, got = inline.update(batch), on_ray.update(other)
            assert got == pytest.approx(expected, abs=1e-4, rel=1e-3)
            for name in (col.REF_LOG_PROBS, col.OLD_LOG_PROBS):
                torch.testing.assert_close(other[name], batch[name], atol=1e-4, rtol=1e-4, equal_nan=True)
        sent, weights = dict(on_ray.full_state()), dict(inline.full_state())
        assert list(sent) == list(weights)
        for name, tensor in weights.items():
            torch.testing.assert_close(sent[name], tensor, atol=1e-3, rtol=1e-2)
        replica = on_ray.policy_module
        assert replica.state_dict().keys() == tiny_policy().state_dict().keys()
        assert all(torch.equal(replica.state_dict()[name], tensor) for name, tensor in sent.items())
        on_ray.save_shards(tmp_path)
        back = build(folder)
        back.load_state_dict(on_ray.state_dict(), tmp_path)
        assert all(torch.equal(tensor, sent[name]) for name, tensor in back.full_state())
        with pytest.raises(CheckpointError, match=r"written with lora_rank=4 .* says lora_rank=2"):
            build(folder, lora_rank=2).load_state_dict(on_ray.state_dict(), tmp_path)
    finally:
        on_ray.close()


def test_layers_that_the_model_has_not_are_named_from_the_workers_too(cluster, folder):
    with pytest.raises(ConfigError, match="'query' names no linear layer of Qwen3ForCausalLM"):
        build(folder, 2, lora_target_modules=["query"])
