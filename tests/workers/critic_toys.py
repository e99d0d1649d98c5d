"""A small critic and batches for it, for tests in one process and over several."""

from __future__ import annotations

import copy

import torch
from actor_toys import REWARDS, make_batch, tiny_policy
from tensordict import TensorDict
from torch import nn

from verl_mt.config.actor import ActorConfig, CriticConfig, CriticOptimConfig
from verl_mt.config.schema import AlgorithmConfig
from verl_mt.data import batch as col
from verl_mt.modeling.values import ValueHead, ValueModel
from verl_mt.trainer.advantage_step import advantage_estimator
from verl_mt.workers.critic import CriticSchedule, CriticWorker, filled_in


def value_model(policy: nn.Module | None = None) -> ValueModel:
    """Over a copy of the policy, with a head that no longer says 0."""
    model = ValueModel(copy.deepcopy(tiny_policy() if policy is None else policy))
    wake(model.head)
    return model


def value_head(seed: int = 0, width: int = 16) -> ValueHead:
    head = ValueHead(width, seed=seed)
    wake(head.layers[-1])
    return head


def wake(linear: nn.Module) -> None:
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    generator = torch.Generator().manual_seed(3)
    weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.3)


def critic(
    module: nn.Module | None = None,
    *,
    policy: nn.Module | None = None,
    lr: float = 1e-2,
    warmup: int = 0,
    shuffle: bool = True,
    optim: dict | None = None,
    **kwargs,
) -> CriticWorker:
    options = CriticOptimConfig(lr=lr, **(optim or {}))
    config = filled_in(CriticConfig(optim=options, share_trunk=policy is not None, **kwargs), ActorConfig())
    schedule = CriticSchedule(total_steps=100, train_batch_size=3, warmup_steps=warmup, norm_constant=8.0)
    if module is None:
        module = value_model() if policy is None else value_head()
    return CriticWorker(module, config, schedule=schedule, shuffle=shuffle, policy=policy)


def batch_with_values(worker: CriticWorker, rewards=REWARDS, *, seed: int = 0, records: int = 1) -> TensorDict:
    """With the critic's values, and the returns and advantages that GAE makes of them."""
    batch = make_batch(rewards, seed=seed, records=records)
    batch[col.VALUES] = worker.compute_values(batch)
    advantage_estimator(AlgorithmConfig(adv_estimator="gae", gamma=0.95, lam=0.9))(batch)
    return batch
