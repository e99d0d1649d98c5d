"""Estimators, the critic and KL terms that do not go together are refused at the start, with the reason and the fix."""

from __future__ import annotations

import pytest
from test_checks import ACTOR, ROLLOUT, changed, look

from verl_mt.config.compose import compose
from verl_mt.config.options import KLControlOptions, read_kl_control
from verl_mt.errors import ConfigError, UnknownKeyError

pytestmark = pytest.mark.slow  # many configurations

ESTIMATOR = "algorithm.adv_estimator"
GAE = f"{ESTIMATOR}=gae"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["critic.optim.lr=1e-4"],
            ["critic.optim.lr=0.0001 has no effect unless", "adv_estimator=gae (it is grpo)"],
        ),
        (
            ["critic.share_trunk=True", "critic.ppo_epochs=2"],
            ["share_trunk=True, critic.ppo_epochs=2 have no effect", "or remove them"],
        ),
        (["trainer.critic_warmup=3"], ["critic_warmup=3", "adv_estimator=gae (it is grpo)"]),
        ([GAE, "trainer.critic_warmup=60"], ["critic_warmup (60)", "no step", "(60)"]),
        ([GAE, "critic.share_trunk=True", "critic.model.path=x"], ["share_trunk", "path=x", "Remove one"]),
        ([GAE, "critic.optim.lr=0"], ["critic.optim.lr is 0", "1e-5"]),
        ([GAE, "critic.optim.betas=[0.9]"], ["critic.optim.betas is [0.9]"]),
        ([GAE, "critic.ppo_mini_batch_size=5"], ["critic.ppo_mini_batch_size (5)", "(16)"]),
        ([GAE, "critic.ppo_max_token_len=100"], ["critic.ppo_max_token_len (100)", "longest sequence"]),
        (
            ["algorithm.gamma=0.99"],
            ["gamma=0.99", "(it is grpo)", "gae or reinforce_plus_plus"],
        ),
        (
            ["algorithm.lam=0.95", f"{ESTIMATOR}=reinforce_plus_plus"],
            ["lam=0.95", "=gae (it is rein"],
        ),
        (["algorithm.kl_ctrl.type=adaptive"], ["kl_ctrl.type=adaptive", "use_kl_in_reward=True (it is False)"]),
        (["algorithm.kl_penalty=k3"], ["kl_penalty=k3", "use_kl_in_reward=True (it is False)"]),
        (
            [f"{ACTOR}.kl_loss_coef=0.2"],
            ["kl_loss_coef=0.2", "unless", "use_kl_loss=True (it is False)"],
        ),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0"], ["kl_coef=0", "penalises nothing"]),
        (["algorithm.kl_ctrl.coef=1"], ["algorithm.kl_ctrl.coef", "unknown key", "kl_coef"]),
        ([f"{ESTIMATOR}=gdpo"], ["gdpo needs algorithm.gdpo_reward_weights"]),
        (["algorithm.gdpo_reward_weights.score=1"], ["gdpo_reward_weights", "adv_estimator=gdpo (it is grpo)"]),
        (
            [f"{ESTIMATOR}=gdpo", "algorithm.gdpo_reward_weights.score=1", "algorithm.use_kl_in_reward=True"],
            ["use_kl_in_reward", "normalised by itself", "use_kl_loss"],
        ),
        (
            [f"{ESTIMATOR}=gdpo", "algorithm.gdpo_reward_weights.score=1", "reward.tool_reward_weight=1"],
            ["reward.tool_reward_weight=1", "extra_info has it"],
        ),
        (
            [f"{ESTIMATOR}=gdpo", "algorithm.gdpo_reward_weights.score=1", "reward.turn_cost=0.1"],
            ["reward.turn_cost is 0.1", "add turn_cost to them"],
        ),
        (
            [f"{ESTIMATOR}=gdpo", "algorithm.gdpo_reward_weights.score=1", "reward.overlong_buffer.enable=True"],
            ["overlong_buffer.enable", "add overlong to them"],
        ),
        (
            ["reward.placement=turn", "reward.tool_reward_weight=0.1"],
            ["placement=turn", "adv_estimator=grpo", "one reward per trajectory", "gae or reinforce_plus_plus"],
        ),
        ([GAE, "reward.placement=turn"], ["nothing belongs to a turn", "reward.tool_reward_weight"]),
        ([f"{ROLLOUT}.n=1"], ["n is 1", "grpo", "reinforce_plus_plus, gae, remax"]),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_fix(overrides, parts):
    with pytest.raises(ConfigError) as caught:
        look(changed(overrides))
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [GAE, f"{ROLLOUT}.n=1", "critic.optim.lr=1e-3", "algorithm.gamma=0.99", "algorithm.lam=0.95"],
        [GAE, "trainer.critic_warmup=5", "critic.share_trunk=True", "critic.ppo_mini_batch_size=4"],
        [f"{ESTIMATOR}=remax", f"{ROLLOUT}.n=1"],
        [f"{ESTIMATOR}=reinforce_plus_plus", "algorithm.gamma=0.99"],
        ["algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True"],
        ["algorithm.use_kl_in_reward=False", "algorithm.kl_ctrl.kl_coef=0.001"],
        [GAE, "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=1"],
        [GAE, "reward.placement=turn", "reward.turn_score_weight=0.5"],
        [f"{ESTIMATOR}=gdpo", "algorithm.gdpo_reward_weights.score=1"],
        [f"{ESTIMATOR}=gdpo", "algorithm.gdpo_reward_weights={score: 1, turn_cost: 1}", "reward.turn_cost=0.1"],
        [f"{ACTOR}.kl_loss_coef=0.0"],
    ],
)
def test_combinations_that_work_pass(overrides):
    look(changed(overrides))


def test_verls_command_for_ppo_is_understood():
    config = compose(
        [
            GAE, "algorithm.gamma=1.0", "algorithm.lam=0.95", "critic.optim.lr=1e-5",
            "critic.model.use_remove_padding=True", "critic.optim.lr_warmup_steps_ratio=0.0",
            "critic.model.enable_gradient_checkpointing=True", "critic.ppo_micro_batch_size_per_gpu=32",
            "critic.model.fsdp_config.param_offload=False", "critic.model.fsdp_config.optimizer_offload=False",
            "critic.ppo_max_token_len_per_gpu=8192", "trainer.critic_warmup=1", "critic.cliprange_value=0.2",
            "critic.strategy=fsdp2", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.002",
        ]
    )  # fmt: skip
    critic = config.critic
    assert (critic.ppo_micro_batch_size, critic.ppo_max_token_len, critic.cliprange_value) == (32, 8192, 0.2)
    assert config.trainer.critic_warmup == 1 and config.algorithm.lam == 0.95
    assert read_kl_control(config.algorithm.kl_ctrl) == KLControlOptions(kl_coef=0.002)


def test_slimes_flags_for_ppo_are_understood():
    config = compose(["advantage_estimator=ppo", "lambd=0.9", "critic_lr=1e-4", "value_clip=0.3"])
    assert (config.algorithm.adv_estimator, config.algorithm.lam) == ("gae", 0.9)
    assert (config.critic.optim.lr, config.critic.cliprange_value) == (1e-4, 0.3)


def test_a_critic_in_megatron_says_what_there_is_instead():
    with pytest.raises((ConfigError, UnknownKeyError), match="FSDP2"):
        compose([GAE, "critic.megatron.tensor_model_parallel_size=2"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": "adaptiv"}, "expected one of 'fixed', 'adaptive'"),
        ({"kl_coef": -1}, "at least 0"),
        ({"kl_coef": "much"}, "expected a number"),
        ({"type": "adaptive", "kl_coef": 0}, "stays 0"),
    ],
)
def test_a_weight_that_cannot_be_is_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        read_kl_control(given)
