"""An advantage estimator and a loss of the user's train as the shipped ones do."""

from __future__ import annotations

import json

import pytest
import torch
from command_lab import FEW, NO_VALIDATION, VARIED, fit

from verl_mt.algorithms.advantages import grpo
from verl_mt.config.schema import AlgorithmConfig
from verl_mt.errors import ConfigError, PluginError, UserCodeError
from verl_mt.trainer.advantage_step import own_estimator

SOURCE = """
import torch
from verl_mt.algorithms.advantages import grpo
from verl_mt.algorithms.gae import discounted_returns, whiten_tokens
from verl_mt.algorithms.losses import ppo_clip_loss

def mine(rewards, groups, norm_by_std): return grpo(rewards, groups, norm_by_std=norm_by_std)
def by_token(rewards, mask, gamma): return whiten_tokens(discounted_returns(rewards, mask, gamma=gamma), mask)
def loss(log_probs, old, advantages, mask, clip_low, clip_high, clip_c):
    return ppo_clip_loss(log_probs, old, advantages, mask, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c)
def lonely(rewards): return rewards
def short(rewards, groups): return rewards[:-1]
def infinite(rewards, groups): return rewards / 0
def raises(rewards, groups): return rewards.absent
def text(rewards, groups): return "high"
constant = 1.0
"""


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def estimate(file: str, name: str) -> torch.Tensor:
    from tensordict import TensorDict

    from verl_mt.data import batch as columns

    rewards = torch.tensor([0.0, 1.0, 1.0])
    batch = TensorDict(
        {
            columns.LOSS_MASK: torch.ones(3, 2, dtype=torch.bool),
            columns.TRAJECTORY_INDEX: torch.arange(3),
            columns.GROUP_INDEX: torch.zeros(3, dtype=torch.long),
            columns.REWARDS: rewards,
        },
        batch_size=[3],
    )
    per_trajectory, _ = own_estimator(AlgorithmConfig(adv_estimator=f"{file}:{name}"))
    return per_trajectory(batch, rewards)


def test_rewards_and_groups_reach_it(file):
    assert torch.allclose(estimate(file, "mine"), grpo(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3)).float())


def test_the_name_of_its_second_parameter_says_which_form_it_is(file):
    assert own_estimator(AlgorithmConfig(adv_estimator=f"{file}:mine"))[1] is None
    per_trajectory, by_token = own_estimator(AlgorithmConfig(adv_estimator=f"{file}:by_token", gamma=0.5))
    assert per_trajectory is None
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 4.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    advantages, _ = by_token(rewards, torch.zeros_like(rewards), mask)
    assert (advantages[~mask] == 0).all() and advantages[0, 2] > advantages[0, 1] > advantages[0, 0]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("absent", PluginError, "has no 'absent'"),
        ("constant", ConfigError, "is a float, expected a function"),
        ("lonely", ConfigError, r"takes rewards; expected \(rewards, groups, ...\) or \(rewards, mask, ...\)"),
        ("short", UserCodeError, r"returned shape \(2,\); expected advantages of shape \(3,\)"),
        ("infinite", UserCodeError, r"returned (nan|inf) at \[0\]: advantages must be finite"),
        ("raises", UserCodeError, "raised AttributeError"),
        ("text", UserCodeError, "returned a str"),
    ],
)
def test_one_that_cannot_be_an_estimator_is_named_with_what_is_wrong(file, name, error, text):
    with pytest.raises(error, match=text):
        estimate(file, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shipped", "own"),
    [
        ([], ["algorithm.adv_estimator={file}:mine", "actor_rollout_ref.actor.policy_loss.loss_mode={file}:loss"]),
        (["algorithm.adv_estimator=reinforce_plus_plus"], ["algorithm.adv_estimator={file}:by_token"]),
    ],
)
def test_a_run_with_copies_of_the_shipped_functions_gives_the_same_numbers(file, tmp_path, shipped, own):
    common = [*NO_VALIDATION, *FEW, VARIED, "trainer.deterministic=True", "trainer.total_training_steps=1"]
    common.append("actor_rollout_ref.actor.skip_zero_advantage=False")
    fit(tmp_path / "shipped", *common, *shipped)
    fit(tmp_path / "own", *common, *(word.format(file=file) for word in own))
    a, b = (json.loads((tmp_path / n / "metrics.jsonl").read_text().splitlines()[-1]) for n in ("shipped", "own"))
    assert a == b


@pytest.mark.slow
def test_a_mistake_in_them_is_found_before_anything_is_written(file, tmp_path):
    for key in ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"):
        with pytest.raises(PluginError, match="absent"):
            fit(tmp_path / "run", f"{key}={file}:absent")
    assert not (tmp_path / "run").exists()
