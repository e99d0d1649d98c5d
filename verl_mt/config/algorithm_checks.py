"""What estimators, the critic and KL terms go with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from verl_mt.config.actor import CriticConfig
from verl_mt.config.options import KL_CTRL, read_kl_control
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError
from verl_mt.plugins import names_code

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
WITHOUT_GROUPS = ("reinforce_plus_plus", "gae", "remax")
"""Estimators for which one sample per prompt will do."""
PER_TOKEN = ("gae", "reinforce_plus_plus")
"""Estimators that see where in a trajectory a reward was earned."""
_READS = {"gamma": PER_TOKEN, "lam": ("gae",)}
_DEFAULT_KL_LOSS_COEF = 0.001


def algorithm(config: Config) -> Iterator[str]:
    """Problems of `algorithm`, `critic` and `reward.placement`, by themselves and beside other sections."""
    yield from _groups(config)
    yield from _read_by(config)
    yield from _penalty(config)
    yield from _several_rewards(config)
    yield from _placement(config)
    if config.algorithm.adv_estimator == "gae":
        yield from _critic(config)
    else:
        yield from _no_critic(config)


def _groups(config: Config) -> Iterator[str]:
    rollout, estimator = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    makes_groups = rollout.custom_generate_function_path is not None
    compares = estimator not in WITHOUT_GROUPS and not names_code(estimator)
    if rollout.n == 1 and compares and not makes_groups and not config.trainer.val_only:
        yield (
            f"{_ROLLOUT}.n is 1: {estimator} compares the samples of one prompt and needs at least 2 (1 is possible "
            f"with algorithm.adv_estimator={', '.join(WITHOUT_GROUPS)}, or with a custom generate function that "
            "returns several Samples)"
        )


def _read_by(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if names_code(algorithm.adv_estimator):
        return  # its signature says what it reads
    if not algorithm.norm_adv_by_std_in_grpo and algorithm.adv_estimator not in ("grpo", "grpo_passk"):
        yield (
            f"algorithm.norm_adv_by_std_in_grpo is False, which algorithm.adv_estimator={algorithm.adv_estimator} does "
            "not read: leave it out, or use grpo"
        )
    for name, readers in _READS.items():
        value = getattr(algorithm, name)
        if value != 1.0 and algorithm.adv_estimator not in readers:
            yield (
                f"algorithm.{name} is {value}, which algorithm.adv_estimator={algorithm.adv_estimator} does not read: "
                f"it looks at one reward per trajectory; leave it out, or use {' or '.join(readers)}"
            )


def _penalty(config: Config) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    try:
        options = read_kl_control(algorithm.kl_ctrl)
    except ConfigError as error:
        yield str(error)
        return
    if algorithm.use_kl_in_reward:
        if options.type == "fixed" and options.kl_coef == 0:
            yield "algorithm.use_kl_in_reward with kl_ctrl.kl_coef=0 penalises nothing: give a weight, or leave it out"
        if algorithm.adv_estimator == "gdpo":
            yield (
                "algorithm.use_kl_in_reward with adv_estimator=gdpo: every reward is normalised by itself, and a KL "
                f"penalty is none of them; use {_ACTOR}.use_kl_loss=True"
            )
    else:
        # kl_coef alone passes: verl's scripts give it beside use_kl_in_reward=False, and the run says that it is idle.
        unread = [key for key, value in algorithm.kl_ctrl.items() if key != "kl_coef" and value != "fixed"]
        if unread:
            yield (
                f"{KL_CTRL}.{unread[0]} is {algorithm.kl_ctrl[unread[0]]} without algorithm.use_kl_in_reward=True: no "
                "reference policy would be loaded and no penalty taken; set it, or leave kl_ctrl out"
            )
        if algorithm.kl_penalty != "kl":
            yield (
                f"algorithm.kl_penalty is {algorithm.kl_penalty} without algorithm.use_kl_in_reward=True, which is "
                f"what it is for; set that, or use {_ACTOR}.kl_loss_type with use_kl_loss=True"
            )
    if not actor.use_kl_loss and actor.kl_loss_coef not in (0.0, _DEFAULT_KL_LOSS_COEF):
        yield (
            f"{_ACTOR}.kl_loss_coef is {actor.kl_loss_coef} without use_kl_loss=True: no reference policy would be "
            "loaded; set it, or leave the coefficient out"
        )


def _several_rewards(config: Config) -> Iterator[str]:
    algorithm, weights = config.algorithm, config.algorithm.gdpo_reward_weights
    if algorithm.adv_estimator != "gdpo":
        if weights:
            yield f"algorithm.gdpo_reward_weights are given with adv_estimator={algorithm.adv_estimator}: use gdpo"
        return
    if not weights:
        yield (
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_weights: the names of the numbers that the "
            "reward function returns, with their weights, e.g. {score: 1.0, format: 0.5}"
        )
    bad = [name for name, value in weights.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    for name in bad:
        yield f"algorithm.gdpo_reward_weights.{name} is {weights[name]!r}: expected a number"
    summed = {
        "tool_reward_weight": config.reward.tool_reward_weight,
        "turn_score_weight": config.reward.turn_score_weight,
    }
    for name, value in summed.items():
        if value:
            yield (
                f"reward.{name} is {value} with adv_estimator=gdpo, which looks at the reward function's own numbers "
                "and not at their sum: let the function return it as one of them (extra_info has it)"
            )
    # These are parts of a reward beside the function's own, under names of theirs.
    parts = {
        "turn_cost": ("turn_cost", config.reward.turn_cost),
        "token_cost": ("token_cost", config.reward.token_cost),
        "overlong": ("overlong_buffer.enable", config.reward.overlong_buffer.enable),
    }
    for part, (name, value) in parts.items():
        if value and part not in weights:
            yield (
                f"reward.{name} is {value} with adv_estimator=gdpo, which looks at the numbers that "
                f"algorithm.gdpo_reward_weights names and not at their sum: add {part} to them, with its weight"
            )


def _placement(config: Config) -> Iterator[str]:
    reward, estimator = config.reward, config.algorithm.adv_estimator
    if reward.placement != "turn":
        return
    if estimator not in PER_TOKEN and not names_code(estimator):
        yield (
            f"reward.placement=turn with algorithm.adv_estimator={estimator}, which has one reward per trajectory: use "
            f"{' or '.join(PER_TOKEN)}, or placement=trajectory"
        )
    if not reward.tool_reward_weight and not reward.turn_score_weight:
        yield (
            "reward.placement=turn, but nothing belongs to a turn: give reward.tool_reward_weight or "
            "reward.turn_score_weight, or leave it out"
        )


def _critic(config: Config) -> Iterator[str]:
    critic, trainer, batch = config.critic, config.trainer, config.data.train_batch_size
    if critic.share_trunk and critic.model.path is not None:
        yield (
            f"critic.share_trunk reads the policy's hidden states, and critic.model.path={critic.model.path} names a "
            "model of its own: leave one of them out"
        )
    if critic.optim.lr == 0 and not trainer.val_only:
        yield "critic.optim.lr is 0: the critic would say 0 of every state for ever; give a rate (1e-5 is usual)"
    betas = critic.optim.betas
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        yield f"critic.optim.betas is {betas}: expected two numbers in [0, 1)"
    if critic.ppo_mini_batch_size is not None and batch % critic.ppo_mini_batch_size:
        yield (
            f"critic.ppo_mini_batch_size ({critic.ppo_mini_batch_size}) does not divide data.train_batch_size "
            f"({batch}); both count prompts"
        )
    total = trainer.total_training_steps
    if total is not None and total <= trainer.critic_warmup and trainer.critic_warmup and not trainer.val_only:
        yield (
            f"trainer.critic_warmup ({trainer.critic_warmup}) leaves no step of trainer.total_training_steps ({total}) "
            "in which the policy learns: lower it"
        )


def _no_critic(config: Config) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if config.trainer.critic_warmup:
        yield (
            f"trainer.critic_warmup is {config.trainer.critic_warmup}, but algorithm.adv_estimator={estimator} has no "
            "critic: leave it out, or use gae"
        )
    given = list(_changed(config.critic, CriticConfig(), "critic"))
    if given:
        yield (
            f"{', '.join(given)}: algorithm.adv_estimator={estimator} has no critic; leave critic.* out, or use "
            "algorithm.adv_estimator=gae"
        )


def _changed(given: Any, default: Any, prefix: str) -> Iterator[str]:
    for item in dataclasses.fields(given):
        value, usual = getattr(given, item.name), getattr(default, item.name)
        if dataclasses.is_dataclass(value):
            yield from _changed(value, usual, f"{prefix}.{item.name}")
        elif value != usual:
            yield f"{prefix}.{item.name} is {value}"
