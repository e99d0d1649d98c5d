"""PPO's workers in processes of their own: values, updates and checkpoints are those of one process."""

from __future__ import annotations

import pytest
import torch
from actor_toys import REWARDS, make_batch, tiny_policy

from verl_mt.config.actor import ActorConfig, CriticConfig, CriticOptimConfig, ModelConfig, OptimConfig
from verl_mt.config.schema import ActorRolloutRefConfig, AlgorithmConfig
from verl_mt.data import batch as col
from verl_mt.errors import CheckpointError
from verl_mt.trainer.advantage_step import advantage_estimator
from verl_mt.workers.setup import AlgorithmNeeds, Placement
from verl_mt.workers.worker_group import build_worker_group

pytestmark = [pytest.mark.ray, pytest.mark.slow]
TWO = Placement("ray", n_workers_per_node=2, num_threads=1)


def build(folder, placement, *, shared: bool = False, warmup: int = 1):
    critic = CriticConfig(optim=CriticOptimConfig(lr=1e-2), share_trunk=shared)
    needs = AlgorithmNeeds(kl_in_reward=True, critic=critic, critic_warmup=warmup)
    config = ActorRolloutRefConfig(
        model=ModelConfig(path=str(folder)), actor=ActorConfig(ppo_max_token_len=64, optim=OptimConfig(lr=1e-2))
    )
    return build_worker_group(config, total_steps=10, train_batch_size=3, placement=placement, algorithm=needs)


def step(group, seed: int = 0):
    """As the trainer does it."""
    batch = make_batch(REWARDS, seed=seed, records=2)
    group.add_ref_log_probs(batch)
    config = AlgorithmConfig(adv_estimator="gae", use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.1})
    metrics = advantage_estimator(config, group)(batch)
    return batch, metrics | group.update(batch)


@pytest.mark.parametrize("shared", [False, True])
def test_steps_and_checkpoints_are_those_of_a_single_process(cluster, tmp_path, shared):
    tiny_policy().save_pretrained(tmp_path / "model")
    inline, on_ray = (build(tmp_path / "model", placement, shared=shared) for placement in ("inline", TWO))
    try:
        for seed in range(3):
            batch, expected = step(inline, seed)
            got_batch, got = step(on_ray, seed)
            assert got == pytest.approx(expected, abs=2e-3, rel=2e-2)
            torch.testing.assert_close(got_batch[col.VALUES], batch[col.VALUES], atol=2e-3, rtol=1e-2)
            assert ("actor/pg_loss" in got) == (seed > 0), "the first step is the critic's alone"
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        on_ray.save_shards(folder)
        state = on_ray.state_dict()
        assert "tensors" not in state["critic"] and state["critic"]["num_batches"] == 3
        back = build(tmp_path / "model", "inline", shared=shared)
        back.load_state_dict(state, folder)
        on_ray.load_state_dict(back.state_dict())
        batch, expected = step(back, seed=7)
        got_batch, got = step(on_ray, seed=7)
        assert got == pytest.approx(expected, abs=1e-3, rel=1e-2)
        with pytest.raises(CheckpointError, match="has a critic, and this run has no"):
            config = ActorRolloutRefConfig(model=ModelConfig(path=str(tmp_path / "model")))
            build_worker_group(config, total_steps=10).load_state_dict(state, folder)
    finally:
        on_ray.close()
