"""An advantage estimator and a loss of the user's train as the shipped ones do."""

from __future__ import annotations

import json

import pytest
import torch
from command_lab import FEW, NO_VALIDATION, VARIED, fit

from verl_mt.algorithms.advantages import grpo
from verl_mt.config.actor import ActorConfig
from verl_mt.config.schema import AlgorithmConfig, Config, DataConfig
from verl_mt.errors import ConfigError, PluginError, UserCodeError
from verl_mt.extensions.inspection.doctor.checks import CHECKS
from verl_mt.extensions.inspection.doctor.findings import Subject, run_checks
from verl_mt.trainer import build
from verl_mt.trainer.advantage_step import own_estimator, try_own_estimator
from verl_mt.workers.loss import try_own_loss

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
def both(rewards, mask, groups): return rewards
def per_turn(rewards, groups, turns): return rewards
def tokens_of_groups(rewards, groups): return rewards[:, None].expand(-1, 7)
def by_rewards(rewards, mask): return rewards.sum(1)
def from_batch(rewards, groups, batch): return rewards + batch["a column of the rows"]
def as_a_table(rewards, groups): return (rewards.view(2, 3) + torch.rand(2, 3)).flatten()
class Mean:
    def __call__(self, rewards, groups): raise RuntimeError("called")
stateful = Mean()
def one_number(log_probs, old, advantages, mask): return -(log_probs * advantages).sum()
def detached(log_probs, old, advantages, mask): return (log_probs * advantages).detach()
def needs_more(log_probs, old, advantages, mask, values): return log_probs
constant = 1.0
"""
ROLLOUT = "actor_rollout_ref.rollout"


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
        ("lonely", ConfigError, r"takes rewards. Expected \(rewards, groups, ...\) or \(rewards, mask, ...\)"),
        ("short", UserCodeError, r"returned shape \(2,\). Expected advantages of shape \(3,\)"),
        ("infinite", UserCodeError, r"returned (nan|inf) at \[0\]: advantages must be finite"),
        ("raises", UserCodeError, "raised AttributeError"),
        ("text", UserCodeError, "returned a str"),
    ],
)
def test_one_that_cannot_be_an_estimator_is_named_with_what_is_wrong(file, name, error, text):
    with pytest.raises(error, match=text):
        estimate(file, name)


def config_with(**algorithm) -> Config:
    """Of steps of 2 prompts x 3 samples."""
    config = Config(algorithm=AlgorithmConfig(**algorithm), data=DataConfig(train_batch_size=2))
    config.actor_rollout_ref.rollout.n = 3
    return config


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("both", ConfigError, r"takes rewards, mask, groups, and nothing fills in groups: .* may take gamma, lam"),
        ("per_turn", ConfigError, r"nothing fills in turns: .* may take norm_by_std, tokens, batch besides"),
        ("tokens_of_groups", UserCodeError, r"returned shape \(6, 7\). Expected .* \(6,\) \(tried at start on made-up"),
        ("by_rewards", UserCodeError, r"returned shape \(6,\). Expected advantages of shape \(6, 8\)"),
        ("raises", UserCodeError, r"raised AttributeError: .* rewards of 2 prompts x 3 samples. Expected \(rewards, g"),
        ("short", UserCodeError, r"returned shape \(5,\)"),
        ("infinite", UserCodeError, r"returned (nan|inf)"),
    ],
)
def test_an_estimator_of_a_wrong_form_is_found_on_made_up_rewards(file, name, error, text):
    with pytest.raises(error, match=text):
        try_own_estimator(config_with(adv_estimator=f"{file}:{name}"))


@pytest.mark.parametrize("name", ["mine", "by_token", "from_batch", "stateful", "as_a_table"])
def test_one_that_works_is_not_refused_and_none_with_a_state_is_called(file, name):
    before = torch.random.get_rng_state()
    try_own_estimator(config_with(adv_estimator=f"{file}:{name}"))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one_number", r"returned shape \(\). Expected a loss for each token, \(2, 4\).* \(tried at start on made-up"),
        ("detached", "returned a loss without gradient"),
        ("needs_more", r"raised TypeError: .*missing 1 required positional argument: 'values'"),
    ],
)
def test_a_loss_of_a_wrong_form_is_found_on_made_up_log_probs(file, name, text):
    with pytest.raises(UserCodeError, match=text):
        try_own_loss(ActorConfig(policy_loss={"loss_mode": f"{file}:{name}"}))
    try_own_loss(ActorConfig(policy_loss={"loss_mode": f"{file}:loss"}))


def test_both_are_tried_before_anything_is_loaded_and_by_the_doctor(file):
    estimator = config_with(adv_estimator=f"{file}:short")
    with pytest.raises(UserCodeError, match=r"returned shape \(5,\)"):
        build._before_anything_slow(estimator, None)
    loss = config_with()
    loss.actor_rollout_ref.actor.policy_loss = {"loss_mode": f"{file}:one_number"}
    with pytest.raises(UserCodeError, match=r"returned shape \(\)"):
        build.build_workers(loss, total_steps=1)
    for config, text in ((estimator, "returned shape (5,)"), (loss, "returned shape ()")):
        (found,) = run_checks([c for c in CHECKS if c.name == "advantages and loss"], Subject(config))
        assert found.status == "error" and text in found.text


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
