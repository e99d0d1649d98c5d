"""The worker group with a critic, in this process."""

from __future__ import annotations

import copy

import pytest
import torch
from actor_toys import REWARDS, make_batch, tiny_policy

from verl_mt.config.actor import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    CriticOptimConfig,
    ModelConfig,
    OptimConfig,
)
from verl_mt.config.schema import ActorRolloutRefConfig, AlgorithmConfig
from verl_mt.data import batch as col
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.modeling.values import ValueModel
from verl_mt.trainer.advantage_step import advantage_estimator
from verl_mt.workers.setup import AlgorithmNeeds
from verl_mt.workers.worker_group import InlineWorkerGroup, build_worker_group


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    tiny_policy().save_pretrained(path)
    return path


def other_model(path, vocab: int):
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(5)
    config = copy.deepcopy(tiny_policy().config)
    config.vocab_size = vocab
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def group_of(folder, critic: CriticConfig | None, **needs) -> InlineWorkerGroup:
    config = ActorRolloutRefConfig(model=ModelConfig(path=str(folder)), actor=ActorConfig(optim=OptimConfig(lr=1e-2)))
    algorithm = AlgorithmNeeds(critic=critic, **needs)
    group = build_worker_group(config, total_steps=10, train_batch_size=3, algorithm=algorithm)
    assert isinstance(group, InlineWorkerGroup)
    return group


def step(group: InlineWorkerGroup, seed: int = 0, **algorithm) -> dict[str, float]:
    batch = make_batch(REWARDS, seed=seed)
    group.add_ref_log_probs(batch)
    metrics = advantage_estimator(AlgorithmConfig(adv_estimator="gae", **algorithm), group)(batch)
    return metrics | group.update(batch)


LEARNS = CriticOptimConfig(lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_group_goes_on_where_its_checkpoint_was(folder, shared):
    whole, resumed = (group_of(folder, CriticConfig(share_trunk=shared, optim=LEARNS)) for _ in range(2))
    step(whole)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert step(resumed, seed=1) == step(whole, seed=1)
    for part in ("actor", "critic"):
        own, other = (getattr(group, part).tensors() for group in (whole, resumed))
        assert all(torch.equal(own[name], other[name]) for name in own)


def test_a_critic_starts_from_the_policys_weights_and_never_shares_them(folder):
    group = group_of(folder, CriticConfig(optim=LEARNS))
    assert group.critic is not None and isinstance(group.critic.module, ValueModel)
    trunk = group.policy_module.model
    own = dict(group.critic.module.trunk.named_parameters())
    assert all(torch.equal(own[n], p) and own[n] is not p for n, p in trunk.named_parameters())


def test_a_critic_may_start_from_another_model_with_as_many_tokens(folder, tmp_path):
    path = other_model(tmp_path / "large", vocab=40)
    group = group_of(folder, CriticConfig(model=CriticModelConfig(path=str(path)), optim=LEARNS))
    assert "critic/vf_loss" in step(group)


def test_a_critic_with_fewer_tokens_than_the_policy_is_refused(folder, tmp_path):
    path = other_model(tmp_path / "small", vocab=20)
    with pytest.raises(ConfigError, match="has 20 tokens and the policy 37"):
        group_of(folder, CriticConfig(model=CriticModelConfig(path=str(path))))


def test_a_penalty_in_the_reward_brings_the_reference_policy_without_a_kl_loss(folder):
    group = group_of(folder, CriticConfig(optim=LEARNS), kl_in_reward=True)
    first, second = (step(group, use_kl_in_reward=True)["actor/reward_kl_penalty"] for _ in range(2))
    assert first == 0 and second != 0, "the policy has moved away from its reference"


@pytest.mark.slow
def test_a_group_without_critic_has_no_values(folder):
    batch, group = make_batch(REWARDS), group_of(folder, None)
    group.add_values(batch)
    assert col.VALUES not in batch.keys() and "critic" not in group.state_dict()  # noqa: SIM118
    with pytest.raises(CheckpointError, match="has a critic, and this run has no"):
        group.load_state_dict(group_of(folder, CriticConfig()).state_dict())
    with pytest.raises(CheckpointError, match="has no critic, and this run has a"):
        group_of(folder, CriticConfig()).load_state_dict(group.state_dict())
