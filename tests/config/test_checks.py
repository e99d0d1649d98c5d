"""Combinations that cannot work are refused before anything starts, all of them in one error."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import pytest

from verl_mt.config.checks import check, reject_unused_keys
from verl_mt.config.compose import compose
from verl_mt.config.normalize import normalize_overrides, raise_problems
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


tiny = functools.cache(compose)


def changed(overrides: Sequence[str]) -> Config:
    """The default task with overrides, without a composition for each."""
    config = copy.deepcopy(tiny())
    outcome = normalize_overrides(list(overrides))[1]
    raise_problems(outcome.problems)
    for item in outcome.items:
        *parents, last = item.key.split(".")
        node = functools.reduce(lambda n, p: n[p] if isinstance(n, dict) else getattr(n, p), parents, config)
        if isinstance(node, dict):
            node[last] = item.value
        else:
            setattr(node, last, item.value)
    return config


def look(config: Config) -> None:
    """What the start of a run looks at."""
    check(config)
    reject_unused_keys(config)


def test_the_schemas_defaults_pass():
    look(Config())


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [f"{ROLLOUT}.multi_turn.enable=False"],
            ["tools_config_file=tools_configs/calculator.yaml does not go with", "enable=False"],
        ),
        ([f"{ROLLOUT}.multi_turn.max_assistant_turns=1"], ["max_assistant_turns is 1", "tools are configured"]),
        ([f"{ROLLOUT}.top_p=0.9"], ["top_p is 0.9", "val_kwargs.top_p"]),
        ([f"{ROLLOUT}.top_k=20"], ["top_k is 20"]),
        ([f"{ROLLOUT}.min_p=0.1"], ["min_p is 0.1"]),
        ([f"{ROLLOUT}.temperature=0"], ["temperature is 0"]),
        ([f"{ROLLOUT}.n=1"], ["n is 1", "grpo", "reinforce_plus_plus"]),
        ([f"{ROLLOUT}.stop=['x','']"], ["stop is ['x', '']", "empty string"]),
        (["data.train_batch_size=12", f"{ACTOR}.ppo_mini_batch_size=5"], ["(5)", "(12)", "1, 2, 3, 4, 6, 12"]),
        (["trainer.nnodes=2"], ["trainer.nnodes is 2", "placement=ray"]),
        (["trainer.n_workers_per_node=2"], ["n_workers_per_node is 2", "placement=ray"]),
        (
            ["trainer.n_gpus_per_node=129", f"{ROLLOUT}.name=sglang", "data.train_batch_size=16"],
            ["128 sequences", "129 ranks"],
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2"],
            ["tensor_model_parallel_size=2 has no effect", "name=sglang or vllm and", "(name is local, servers is [])"],
        ),
        ([f"{ROLLOUT}.engine_kwargs.a=1"], ["engine_kwargs", "sglang"]),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.8"], ["gpu_memory_utilization", "sglang"]),
        ([f"{ROLLOUT}.max_model_len=256"], ["max_model_len (256)", "(256)"]),
        ([f"{ACTOR}.ppo_max_token_len=300"], ["ppo_max_token_len (300)", "384"]),
        (["trainer.resume_mode=resume_path"], ["resume_from_path"]),
        (
            ["trainer.resume_from_path=x"],
            ["no effect unless trainer.resume_mode=resume_path or other_data (it is auto)"],
        ),
        (["trainer.logger=[swanlab]"], ["swanlab", "tensorboard"]),
        (["trainer.test_freq=0"], ["test_freq", "got 0, must be at least 1 or -1"]),
        (["data.train_max_samples=-2"], ["train_max_samples", "got -2, must be at least 1 or -1"]),
        (["trainer.val_only=True", "data.val_files=null"], ["val_files"]),
        (["reward.name=f"], ["reward.path"]),
        (["actor_rollout_ref.model.lora_alpha=32"], ["lora_alpha=32", "lora_rank is set (it is 0)"]),
        (
            ["actor_rollout_ref.model.target_modules=[q_proj]"],
            ["modules=['q_proj']", "lora_rank is set (it is 0)"],
        ),
        (["data.sampler_kwargs.a=1"], ["data.sampler"]),
        ([f"{ACTOR}.optim.betas=[0.9]"], ["betas"]),
        (
            [f"{ACTOR}.optim.lr_warmup_steps=3", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"],
            ["lr_warmup_steps=3", "lr_warmup_steps_ratio=0.1", "set one of them to 0"],
        ),
        (
            ["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=False"],
            ["norm_adv_by_std_in_grpo=False", "unless algorithm.adv_estimator=grpo or grpo_passk (it is rloo)"],
        ),
        ([f"{ROLLOUT}.n=1", "algorithm.adv_estimator=opo"], ["n is 1", "opo"]),
        ([f"{ACTOR}.policy_loss.loss_mode=gspa"], [f"{ACTOR}.policy_loss.loss_mode", "'gspa'", "'gspo'"]),
        ([f"{ACTOR}.policy_loss.lossmode=gspo"], [f"{ACTOR}.policy_loss.lossmode", "did you mean", "loss_mode"]),
        ([f"{ACTOR}.tau_pos=2"], [f"{ACTOR}.policy_loss.tau_pos is 2", "loss_mode=sapo", "vanilla"]),
        ([f"{ACTOR}.policy_loss={{loss_mode:sapo,tau_pos:0}}"], ["tau_pos", "at least"]),
        ([f"{ACTOR}.policy_loss={{loss_mode:sapo,tau_pos:high}}"], ["tau_pos", "'high'", "a number"]),
        (
            [f"{ACTOR}.policy_loss={{loss_mode:clip_cov,clip_cov_lb:2,clip_cov_ub:1}}"],
            ["clip_cov_lb (2)", "clip_cov_ub (1)"],
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=gpg", f"{ACTOR}.clip_ratio_high=0.3"],
            ["clip_ratio_high=0.3", "loss_mode=vanilla or", "(it is gpg)"],
        ),
        ([f"{ROLLOUT}.val_kwargs.top_k=-5"], ["val_kwargs.top_k", "got -5, must be at least 1 or -1"]),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_its_keys(overrides, parts):
    with pytest.raises(ConfigError) as caught:
        look(changed(overrides))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(("name", "value", "range_"), [("test_freq", 0, "1 or -1"), ("total_epochs", 0, "1")])
def test_values_set_in_python_are_checked_too(name, value, range_):
    config = Config()
    setattr(config.trainer, name, value)
    with pytest.raises(ConfigError, match=f"^trainer.{name}: got {value}, must be at least {range_}$"):
        check(config)


def test_several_problems_are_one_error():
    with pytest.raises(ConfigError, match="3 problems") as caught:
        compose([f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.n=1", "trainer.nnodes=2"])
    assert str(caught.value).count("\n  - ") == 3


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ROLLOUT}.n=1", "algorithm.adv_estimator=reinforce_plus_plus"],
        [f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_neg=1.2"],
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio=0.01"],
        [f"{ROLLOUT}.val_kwargs.top_p=0.9", f"{ROLLOUT}.val_kwargs.top_k=20", f"{ROLLOUT}.val_kwargs.temperature=0"],
        [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.n=1", "trainer.val_only=True"],
        [f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.tool_kwargs.tools_config_file=null"],
        [f"{ROLLOUT}.multi_turn=True"],
        ["trainer.deterministic=True"],
        ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=q_proj"],
        ["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.target_modules=all-linear"],
        ["trainer.n_gpus_per_node=4", f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=2"],
    ],
)
def test_what_can_work_is_accepted(overrides):
    look(changed(overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"{ACTOR}.optim.lr=nan", "got nan, must be a finite number"),
        (f"{ROLLOUT}.temperature=inf", "got inf, must be a finite number"),
        (f"{ROLLOUT}.val_kwargs.temperature=-inf", "must be a finite number"),
        ("reward.timeout_s=inf", "must be a finite number"),
        (f"{ROLLOUT}.val_kwargs.min_p=1", "got 1.0, must be below 1"),
        (f"{ROLLOUT}.val_kwargs.top_p=0", "got 0.0, must be at least 1e-06"),
        ("trainer.save_freq=0", "got 0, must be at least 1 or -1"),
    ],
)
def test_numbers_that_the_run_would_stumble_over_are_refused(override, reason, tmp_path):
    key, _, value = override.partition("=")
    yaml_value = {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}.get(value, value)
    (tmp_path / "mine.yaml").write_text(f"defaults: [tiny, _self_]\n{key}: {yaml_value}\n")
    for overrides, name, folder in (([override], None, None), ([], "mine", tmp_path)):
        with pytest.raises(ConfigError) as caught:
            compose(overrides, name, folder)
        assert key in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize("key", ["tool_parser=glm45", "run_calls_in_unclosed_reasoning=True"])
def test_how_calls_are_read_means_something_to_an_agent_which_has_no_tools_of_ours(key):
    look(
        changed(
            [
                f"{ROLLOUT}.agent_function_path=my.agent",
                f"{ROLLOUT}.tool_kwargs.tools_config_file=null",
                f"{ROLLOUT}.multi_turn.{key}",
            ]
        )
    )
    without = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=x", f"{ROLLOUT}.multi_turn.{key}"]
    with pytest.raises(ConfigError, match="agent_function_path"):
        reject_unused_keys(compose(without))


def test_the_weights_of_several_rewards_reach_no_estimator_of_the_users():
    words = ["algorithm.adv_estimator=my.estimators.f", "algorithm.gdpo_reward_weights={score: 1}"]
    with pytest.raises(ConfigError, match=r"adv_estimator=gdpo \(it is my.estimators.f\)"):
        look(changed(words))
