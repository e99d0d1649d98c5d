"""What a configuration cannot be: keys that mean nothing beside the others, and combinations that do not work.

Whether a key means something is declared at the key (`option(..., when=...)`); here stands what is done about it. All
problems of a configuration are one error.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from verl_mt.config.actor import problems_of_ranks
from verl_mt.config.declare import shown
from verl_mt.config.extended import problems_of
from verl_mt.config.options import (
    RC,
    RolloutCorrectionOptions,
    read_kl_control,
    read_rollout_correction,
)
from verl_mt.config.policy_losses import POLICY_LOSSES, loss_mode, read_policy_loss
from verl_mt.config.redact import redact
from verl_mt.config.schema import PER_TOKEN, Config, Leaf, explicit_keys, is_as_checked, leaves, value_of
from verl_mt.errors import ConfigError
from verl_mt.extension_points import known
from verl_mt.plugins import names_code

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_WITHOUT_GROUPS = ("reinforce_plus_plus", "gae", "remax")
"""Estimators whose advantage of a trajectory does not depend on the others of its prompt: one sample will do."""


def check(config: Config) -> None:
    """Verify everything that involves more than one option.

    Raises:
        ConfigError: lists every problem with its keys, what was got and what to do.
    """
    groups = (
        _contradictions, _multi_turn, _sampling, _batches, _lengths, _mappings, _groups, _several_rewards,
        _reward_placement, _critic, _losses, _corrections, _dapo, _placement, _run, _staleness, _numbers,
    )  # fmt: skip
    _raise([text for group in (*groups, problems_of) for text in group(config)])


def check_once(config: Config) -> None:
    """`check`, unless `compose` has done it and nothing was changed since.

    Raises:
        ConfigError: as `check`.
    """
    if not is_as_checked(config):
        check(config)


def reject_unused_keys(config: Config, among: tuple[str, ...] = ("",)) -> None:
    """At the start of a run: what somebody gave means something in it, or is said to rest.

    Args:
        among: beginnings of the keys that a command reads, where it is not training; the others it leaves alone.

    Raises:
        ConfigError: lists every such key with what it is for.
    """
    _raise(list(_unused_keys(config, contradictions=False, among=among)))


def means_nothing(config: Config) -> set[str]:
    """Keys whose condition does not hold."""
    of = partial(value_of, config)
    return {key for key, leaf in leaves().items() if leaf.when is not None and not leaf.when.holds(of)}


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {p}" for p in problems))


def _contradictions(config: Config) -> Iterator[str]:
    """Keys that only another choice than the one of this configuration has a use for."""
    return _unused_keys(config, contradictions=True)


def _unused_keys(config: Config, *, contradictions: bool, among: tuple[str, ...] = ("",)) -> Iterator[str]:
    """A text for keys that were given, with other values than their defaults, and mean nothing here; of those with the
    same condition together.

    Args:
        contradictions: those beside which something else was chosen, else those whose switch is off.
        among: beginnings of the keys to look at.
    """
    of, explicit = partial(value_of, config), explicit_keys(config)
    found: dict[str, list[str]] = defaultdict(list)
    for key, leaf in leaves().items():
        when = leaf.when
        if key not in explicit or not key.startswith(among) or when is None or when.holds(of):
            continue
        if when.contradicts(of) != contradictions:
            continue
        if said := [] if when.disables(explicit) else list(_unused_values(leaf, of(key))):
            found[when.missing(of)] += said
    for missing, said in found.items():
        means, it = ("means", "it") if len(said) == 1 else ("mean", "them")
        yield f"{', '.join(said)}, which {means} something only with {missing}: set that too, or leave {it} out"


def _unused_values(leaf: Leaf, value: Any) -> Iterator[str]:
    """What is refused of the value of a key that means nothing: not its default, nor what may be given all the same."""
    known = {leaf.key: (value, leaf.default, leaf.allow_unused)}
    if (options := leaf.metadata.get("options")) is not None:
        fields = {item.name: item for item in dataclasses.fields(options) if item.name in value}
        known = {
            f"{leaf.key}.{name}": (value[name], item.default, item.metadata["allow_unused"])
            for name, item in fields.items()
        }
    for key, (got, default, allow_unused) in known.items():
        if got != default and allow_unused is not True and got not in (allow_unused or ()):
            yield f"{key} is {shown(redact(got, key.split('.')[-1]))}"


def _multi_turn(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    turns, tools = rollout.multi_turn, rollout.tool_kwargs.tools_config_file
    given = {
        "tool_kwargs.tools_config_file": tools,
        "interaction_config_file": rollout.interaction_config_file,
    }
    for key, file in given.items():
        if file is not None and turns.enable is False:
            yield (
                f"{_ROLLOUT}.{key} is {file!r} but {_ROLLOUT}.multi_turn.enable is False: "
                "switch multi-turn on, or leave the file out (=null)"
            )
    yield from _environment(config)
    yield from _scheduler(config)
    yield from _generate_function(config)
    data = config.data
    if data.system is not None and not data.apply_chat_template:
        yield "data.system is given but data.apply_chat_template is False: a prompt column as it is gets no message"
    if turns.use_inference_chat_template and not data.filter_overlong_prompts and data.truncation != "error":
        yield (
            f"{_ROLLOUT}.multi_turn.use_inference_chat_template shows what production shows, never a cut prompt; "
            f"data.truncation is {data.truncation}: set data.filter_overlong_prompts=True or data.truncation=error"
        )
    if tools is not None and turns.max_assistant_turns == 1:
        yield (
            f"{_ROLLOUT}.multi_turn.max_assistant_turns is 1 but tools are given ({tools}): no call could be answered; "
            "set it to 2 or more, or to null"
        )


def _environment(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.environment.is_configured:
        return
    others = {
        "multi_turn.scheduler": rollout.multi_turn.scheduler,
        "custom_generate_function_path": rollout.custom_generate_function_path,
        "agent_function_path": rollout.agent_function_path,
        "multi_turn.enable=False": None if rollout.multi_turn.enable is not False else False,
    }
    for name, value in others.items():
        if value is not None:
            yield (
                f"{_ROLLOUT}.environment and {_ROLLOUT}.{name} ({value!r}) are set: an environment is played by the "
                "tool loop. Remove one of them (=null)"
            )


def _generate_function(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    key, turns = f"{_ROLLOUT}.custom_generate_function_path", rollout.multi_turn
    if rollout.custom_generate_function_path is None:
        return
    decided_by_it = {
        "interaction_config_file": rollout.interaction_config_file,
        "multi_turn.use_inference_chat_template": turns.use_inference_chat_template or None,
        "multi_turn.loss_scale": turns.loss_scale,
        "multi_turn.train_prompt_assistants": turns.train_prompt_assistants or None,
        "multi_turn.enable=False": None if turns.enable is not False else False,
    }
    for name, value in decided_by_it.items():
        if value is not None:
            yield (
                f"{_ROLLOUT}.{name} does not go with {key}={rollout.custom_generate_function_path!r}: the function "
                "decides what the model is answered and what is trained. Leave it out"
            )


def _scheduler(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    turns, function = rollout.multi_turn, rollout.custom_generate_function_path
    key = f"{_ROLLOUT}.multi_turn.scheduler"
    if turns.scheduler is not None:
        if turns.enable is False:
            yield f"{key} is {turns.scheduler!r} but {_ROLLOUT}.multi_turn.enable is False: switch it on"
        if rollout.interaction_config_file is not None:
            yield (
                f"{key} is {turns.scheduler!r} and {_ROLLOUT}.interaction_config_file is given: a scheduler decides "
                "itself what the model is answered; leave one of them out"
            )
        if function is not None:
            yield f"{key} is {turns.scheduler!r} and {_ROLLOUT}.custom_generate_function_path is {function!r}: give one"
    yield from _agent(config)
    if rollout.mode == "sync" and function is not None:
        yield (
            f"{_ROLLOUT}.mode=sync waits until every conversation asks for a turn, which agents that wait for each "
            "other never do: use mode=async with a custom generate function"
        )


def _agent(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.agent_function_path is None:
        return
    key = f"{_ROLLOUT}.agent_function_path is {rollout.agent_function_path!r}"
    others = {
        "multi_turn.scheduler": rollout.multi_turn.scheduler,
        "custom_generate_function_path": rollout.custom_generate_function_path,
        "interaction_config_file": rollout.interaction_config_file,
        "tool_kwargs.tools_config_file": rollout.tool_kwargs.tools_config_file,
    }
    for name, value in others.items():
        if value is not None:
            yield (
                f"{key} and {_ROLLOUT}.{name} is {value!r}: an agent brings its own tools and decides what comes next; "
                "leave one of them out (=null)"
            )
    if rollout.multi_turn.enable is False:
        yield f"{key} but {_ROLLOUT}.multi_turn.enable is False: switch it on, or leave it out"
    if rollout.mode == "sync":
        yield f"{key} with {_ROLLOUT}.mode=sync: agents ask when they like; use mode=async"


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.val_kwargs.top_p == 0 or rollout.top_p == 0:
        yield f"{_ROLLOUT}: top_p is 0, must be above 0 (1 = off)"
    for name, top_k in (("top_k", rollout.top_k), ("val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k == 0 or top_k < -1:
            yield f"{_ROLLOUT}.{name} is {top_k}, must be -1 (off) or at least 1"
    if "" in rollout.stop:
        yield f"{_ROLLOUT}.stop is {rollout.stop}: an empty string would end every turn at once; leave it out"
    if config.trainer.val_only:
        return
    filters = {"top_p": (rollout.top_p, 1.0), "top_k": (rollout.top_k, -1), "min_p": (rollout.min_p, 0.0)}
    for name, (value, off) in filters.items():
        if value != off:
            yield (
                f"{_ROLLOUT}.{name} is {value}: training needs the full distribution, because the trainer's log-probs "
                f"are over the whole vocabulary; set it to {off} (validation may use val_kwargs.{name})"
            )
    if rollout.temperature == 0:
        yield f"{_ROLLOUT}.temperature is 0: greedy samples of a group are all alike; training needs more than 0"


def _batches(config: Config) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini is not None and batch % mini:
        yield (
            f"{_ACTOR}.ppo_mini_batch_size ({mini}) does not divide data.train_batch_size ({batch}); "
            f"both count prompts: choose {_divisors(batch)}"
        )
        return
    ranks = config.trainer.nnodes * config.trainer.n_workers_per_node
    sequences = (mini or batch) * config.actor_rollout_ref.rollout.n
    makes_more = config.actor_rollout_ref.rollout.custom_generate_function_path is not None
    if sequences < ranks and not makes_more:
        yield (
            f"{sequences} sequences per optimizer step ({mini or batch} prompts x {_ROLLOUT}.n) are fewer than "
            f"{ranks} ranks (trainer.nnodes x trainer.n_workers_per_node): some would never train"
        )


def _divisors(number: int) -> str:
    every = [str(d) for d in range(1, number + 1) if number % d == 0]
    return ", ".join(every if len(every) < 10 else [*every[:3], "...", *every[-4:]])


def _lengths(config: Config) -> Iterator[str]:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    prompt = config.data.max_prompt_length
    if rollout.max_model_len is not None and rollout.max_model_len <= prompt:
        yield (
            f"{_ROLLOUT}.max_model_len ({rollout.max_model_len}) leaves no room after a prompt of "
            f"data.max_prompt_length ({prompt}) tokens"
        )
        return
    longest = min(prompt + rollout.response_length, rollout.max_model_len or prompt + rollout.response_length)
    if rollout.custom_generate_function_path is not None:  # it may write longer prompts of its own
        longest = rollout.max_model_len or longest
    passes = {f"{_ACTOR}.ppo_max_token_len": actor.ppo_max_token_len if actor.ppo_micro_batch_size is None else longest}
    of_ref, of_critic = config.actor_rollout_ref.ref.log_prob_max_token_len, config.critic.ppo_max_token_len
    if of_critic is not None and config.critic.ppo_micro_batch_size is None:
        passes["critic.ppo_max_token_len"] = of_critic
    if (actor.use_kl_loss or config.algorithm.use_kl_in_reward) and of_ref is not None:
        passes["actor_rollout_ref.ref.log_prob_max_token_len"] = of_ref
    for key, limit in passes.items():
        # So much of each rank; as many as share sequences have as much more.
        if limit * actor.ulysses_sequence_parallel_size < longest:
            yield f"{key} ({limit}) is less than the longest sequence ({longest} = prompt + response tokens): raise it"


def _mappings(config: Config) -> Iterator[str]:
    try:
        options = read_kl_control(config.algorithm.kl_ctrl)
    except ConfigError as error:
        yield str(error)
        return
    penalises = options.type == "adaptive" or options.kl_coef > 0
    if config.algorithm.use_kl_in_reward and not penalises:
        yield "algorithm.use_kl_in_reward with kl_ctrl.kl_coef=0 penalises nothing: give a weight, or leave it out"


def _groups(config: Config) -> Iterator[str]:
    rollout, estimator = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    makes_groups = rollout.custom_generate_function_path is not None
    compares = estimator not in _WITHOUT_GROUPS and not names_code(estimator)
    if rollout.n == 1 and compares and not makes_groups and not config.trainer.val_only:
        yield (
            f"{_ROLLOUT}.n is 1: {estimator} compares the samples of one prompt and needs at least 2 (1 is possible "
            f"with algorithm.adv_estimator={', '.join(_WITHOUT_GROUPS)}, or with a custom generate function that "
            "returns several Samples)"
        )


def _several_rewards(config: Config) -> Iterator[str]:
    algorithm, weights = config.algorithm, config.algorithm.gdpo_reward_weights
    if algorithm.adv_estimator != "gdpo":
        return
    if algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward with adv_estimator=gdpo: every reward is normalised by itself, and a KL "
            f"penalty is none of them; use {_ACTOR}.use_kl_loss=True"
        )
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


def _reward_placement(config: Config) -> Iterator[str]:
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
    if config.algorithm.adv_estimator != "gae":
        return
    if critic.share_trunk and critic.model.path is not None:
        yield (
            f"critic.share_trunk reads the policy's hidden states, and critic.model.path={critic.model.path} names a "
            "model of its own: leave one of them out"
        )
    if critic.optim.lr == 0 and not trainer.val_only:
        yield "critic.optim.lr is 0: the critic would say 0 of every state for ever; give a rate (1e-5 is usual)"
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


def _corrections(config: Config) -> Iterator[str]:
    try:
        options = read_rollout_correction(config.algorithm.rollout_correction)
    except ConfigError as error:
        yield str(error)
        return
    given = _switches(options)
    actor = config.actor_rollout_ref.actor
    if given and actor.use_sampler_log_probs == "always":
        yield (
            f"{' and '.join(given)} with {_ACTOR}.use_sampler_log_probs=always: ratios are taken to the sampler "
            "already, and the trainer's log-probs that a correction compares with it are not computed; use auto, or "
            "leave the correction out"
        )
    by_token = [text for text in given if text.endswith("=token") or "=token_k" in text]
    mode = loss_mode(actor.policy_loss)
    if by_token and mode in POLICY_LOSSES and POLICY_LOSSES[mode].depends_on == "trajectory":
        yield (
            f"{' and '.join(by_token)} with {_ACTOR}.policy_loss.loss_mode={mode}: a weight or mask per token "
            "would turn the ratio of a sequence into another one; use sequence or geometric, or a loss per token"
        )
    product = [text for text in given if text.endswith("=sequence") or "=seq_sum" in text]
    agent = config.actor_rollout_ref.rollout.agent_function_path
    if product and agent is not None:
        yield (
            f"{' and '.join(product)} with {_ROLLOUT}.agent_function_path={agent!r}: an agent may hold several "
            "conversations beside each other, which are records of one trajectory, and a product over all of them is "
            "the ratio of none; use token, or geometric (the mean over a trajectory's tokens)"
        )


def _switches(options: RolloutCorrectionOptions) -> list[str]:
    """Those that compare the trainer's log-probs with the sampler's before the first update, as `key=value`."""
    values = {
        "rollout_is": options.rollout_is,
        "rollout_rs": options.rollout_rs,
        "rollout_token_veto_threshold": options.rollout_token_veto_threshold,
    }
    return [f"{RC}.{name}={value}" for name, value in values.items() if value is not None]


def _dapo(config: Config) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if config.algorithm.filter_groups.enable and estimator in _WITHOUT_GROUPS:
        yield (
            f"algorithm.filter_groups.enable is True with algorithm.adv_estimator={estimator}, which does not compare "
            "the samples of a prompt: a group of equal rewards still trains, and leaving it out would bias the "
            "estimate; use grpo, rloo or another that compares groups, or leave filter_groups out"
        )
    buffer, limit = config.reward.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    if buffer.enable and buffer.len > limit:
        yield (
            f"reward.overlong_buffer.len is {buffer.len}, more than actor_rollout_ref.rollout.response_length "
            f"({limit}): even an empty response would be penalised; make it smaller"
        )


def _losses(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    try:
        read_policy_loss(actor.policy_loss).check(actor)
    except ConfigError as error:
        yield str(error)


def _placement(config: Config) -> Iterator[str]:
    trainer = config.trainer
    ranks = {"trainer.nnodes": trainer.nnodes, "trainer.n_workers_per_node": trainer.n_workers_per_node}
    for key, number in ranks.items():
        if number > 1 and trainer.placement != "ray":
            yield f"{key} is {number}, which needs trainer.placement=ray (it is {trainer.placement})"
    parts = config.actor_rollout_ref
    yield from problems_of_ranks(parts.model, parts.actor, trainer.nnodes * trainer.n_workers_per_node)


def _run(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path"
    if trainer.val_only and config.data.val_files is None:
        yield "trainer.val_only needs data.val_files"
    saved = trainer.debug_rollout_data
    is_run = saved is not None and trainer.debug_mode == "train_only" and Path(saved).expanduser().is_dir()
    if saved is not None and "{rollout_id}" not in saved and not is_run:
        yield (
            f"trainer.debug_rollout_data is {saved!r}: write {{rollout_id}} into it, or with "
            "trainer.debug_mode=train_only name a run directory, whose rollout rows are read then"
        )
    if trainer.debug_mode == "train_only" and (trainer.debug_rollout_data is None or trainer.val_only):
        yield (
            "trainer.debug_mode=train_only trains on saved rollouts and samples nothing: it needs "
            "trainer.debug_rollout_data, and does not go with trainer.val_only"
        )
    trackers = ("console", "file", *known("verl_mt.trackers"))
    for name in trainer.logger:
        # A plug-in may register one; those are known when plug-ins are imported.
        if name not in trackers and not config.external_plugins and not re.search("[.:]", name):
            yield (
                f"trainer.logger: unknown tracker {name!r}; known: {', '.join(trackers)}, and the dotted path or "
                "file.py:Name of one of your own"
            )


def _staleness(config: Config) -> Iterator[str]:
    """What needs a step's own conversations, or one version of the weights to have sampled all of them."""
    trainer, factor = config.trainer, 1.0 if config.trainer.val_only else config.data.over_sample
    ahead, more = f"trainer.max_staleness={trainer.max_staleness}", f"data.over_sample={factor:g}"
    in_sync, filters = config.actor_rollout_ref.rollout.mode == "sync", config.algorithm.filter_groups.enable
    unfit = {
        "trainer.deterministic=True": (trainer.deterministic, "a clock decides what is sampled by which weights"),
        f"{_ROLLOUT}.mode=sync": (in_sync, "turns of two steps would wait for each other (mode=async does not)"),
        f"trainer.debug_mode={trainer.debug_mode}": (trainer.debug_mode != "save", "only one of both is done there"),
    }
    given = [name for name, is_given in ((ahead, trainer.steps_ahead), (more, factor > 1)) if is_given]
    found = [(name, key, why) for name in given for key, (is_given, why) in unfit.items() if is_given]
    if factor > 1 and filters:
        found.append((more, "algorithm.filter_groups.enable=True", "its rollouts are of what a step still needs"))
    for name, key, why in found:
        yield f"{name} does not go with {key}: {why}; leave one of them out"
    if factor > (most := max(1, trainer.steps_ahead) + 1):
        yield f"{more}: with {ahead} only up to {most} batches in flight can all be trained in time; set {most} or less"


def _numbers(config: Config) -> Iterator[str]:
    """-1 or a positive number."""
    counts = {
        "trainer.test_freq": config.trainer.test_freq,
        "trainer.save_freq": config.trainer.save_freq,
        "data.train_max_samples": config.data.train_max_samples,
        "data.val_max_samples": config.data.val_max_samples,
    }
    for key, number in counts.items():
        if number == 0 or number < -1:
            yield f"{key} is {number}, must be -1 or at least 1"
    optimizers = {f"{_ACTOR}.optim": config.actor_rollout_ref.actor.optim, "critic.optim": config.critic.optim}
    for key, optim in optimizers.items():
        if len(optim.betas) != 2 or not all(0 <= b < 1 for b in optim.betas):
            yield f"{key}.betas is {optim.betas}: expected two numbers in [0, 1)"
        both = {f"{key}.lr_warmup_steps", f"{key}.lr_warmup_steps_ratio"} <= explicit_keys(config)
        if both and optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
            yield (
                f"{key}.lr_warmup_steps={optim.lr_warmup_steps} and {key}.lr_warmup_steps_ratio="
                f"{optim.lr_warmup_steps_ratio} both say how long the warm-up is: set one of them to 0"
            )
