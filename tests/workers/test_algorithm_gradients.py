"""Six algorithms on one batch that another policy sampled: their gradients are six different ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_loss import drifting, flat, off_policy

from verl_mt.algorithms.advantages import grpo, reinforce_plus_plus, rloo
from verl_mt.algorithms.aggregate import tokens_per_trajectory
from verl_mt.algorithms.gae import gae, whiten_tokens
from verl_mt.data import batch as col


def ppo(batch) -> torch.Tensor:
    """With the values of a critic that has not learned yet."""
    mask = batch[col.LOSS_MASK]
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    places = torch.arange(mask.shape[1]).expand_as(mask)
    last = places == torch.where(mask, places, -1).amax(1, keepdim=True)
    rewards = torch.where(last, batch[col.REWARDS].double().unsqueeze(1), 0.0)
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    return whiten_tokens(advantages, mask).float()


def of_trajectories(estimate):
    def fill(batch) -> torch.Tensor:
        rewards_N, group_N = col.trajectory_rewards(batch)
        return col.expand_to_tokens(batch, estimate(batch, rewards_N, group_N))

    return fill


def _tokens(batch) -> torch.Tensor:
    return tokens_per_trajectory(batch[col.LOSS_MASK], batch[col.TRAJECTORY_INDEX])[0]


GRPO = of_trajectories(lambda _, rewards, groups: grpo(rewards, groups))
ALGORITHMS = {
    "ppo": (ppo, "vanilla"),
    "grpo": (GRPO, "vanilla"),
    "gspo": (GRPO, "gspo"),
    "cispo": (GRPO, "cispo"),
    "reinforce++": (of_trajectories(lambda b, r, g: reinforce_plus_plus(r, g, tokens_N=_tokens(b))), "vanilla"),
    "rloo": (of_trajectories(lambda _, rewards, groups: rloo(rewards, groups)), "vanilla"),
}


@pytest.mark.slow
@pytest.mark.cap("C65")
def test_on_a_fixed_off_policy_batch_the_gradients_of_six_algorithms_differ_pairwise():
    """In direction too: none is another one with a different learning rate."""
    found = {}
    for name, (advantages, loss) in ALGORITHMS.items():
        batch = drifting(1)
        batch[col.ADVANTAGES] = advantages(batch)
        result = off_policy(loss, batch, skip_zero_advantage=False)
        assert loss == "gspo" or result["metrics"]["actor/clipfrac"] > 0
        found[name] = flat(result)
    for one, other in itertools.combinations(found, 2):
        a, b = found[one] / found[one].norm(), found[other] / found[other].norm()
        assert (a - b).norm() > 0.02, (one, other, (a - b).norm())
