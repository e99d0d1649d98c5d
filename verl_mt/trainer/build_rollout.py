"""From a config to what rolls out: chat, tools, engine, driver and reward around one session context."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from verl_mt import engines
from verl_mt.chat.loading import load_chat
from verl_mt.chat.parser_fit import require_parser
from verl_mt.chat.parsers import ToolParser, get_parser
from verl_mt.chat.sanity import SanityMonitor, parse_mode
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import Config
from verl_mt.data.dataset import DataRow
from verl_mt.data.media import describe, parts_of
from verl_mt.data.requests import SamplingParams
from verl_mt.engines.base import EngineHost, EngineSetup, InferenceEngine
from verl_mt.engines.lock_step import LockStepEngine, OneVersionEngine, WholeTurnsEngine
from verl_mt.engines.scripted import AbsentEngine
from verl_mt.environments.kinds import EnvironmentTools, build_environments, place_of
from verl_mt.errors import ConfigError
from verl_mt.extension_points import find
from verl_mt.interactions.session import load_interactions
from verl_mt.modeling import load
from verl_mt.plugins import extension_function
from verl_mt.rewards.base import Reward, load_reward
from verl_mt.rollout.context import Limits, is_multi_turn
from verl_mt.rollout.drivers import DriverParts, RolloutDriver, build_driver
from verl_mt.rollout.environment_driver import EnvironmentDriver
from verl_mt.rollout.loss_scale import LossScale, load_loss_scale
from verl_mt.rollout.runner import RolloutRunner
from verl_mt.rollout.session import SessionContext
from verl_mt.rollout.stream import RolloutStream
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.registry import ToolSet, load_tools

log = logging.getLogger(__name__)


def build_chat(config: Config) -> ChatTemplate:
    """Tokenizer and template, probed for what the config asks of them."""
    model = config.actor_rollout_ref.model
    chat = load_chat(
        model.path,
        revision=model.revision,
        tokenizer_path=model.tokenizer_path,
        custom_chat_template=model.custom_chat_template,
        template_kwargs=model.template_kwargs,
        trust_prompts=model.trust_prompts,
        trust_remote_code=model.trust_remote_code,
    )
    rollout = config.actor_rollout_ref.rollout
    chat.require(tools=bool(rollout.tool_kwargs.tools_config_file), interaction=bool(rollout.interaction_config_file))
    return chat


def build_fitting_chat(config: Config) -> ChatTemplate:
    """`build_chat` for a model that is going to run: it has an embedding for every token of the tokenizer."""
    chat = build_chat(config)
    check_vocabulary(config, chat)
    return chat


def check_vocabulary(config: Config, chat: ChatTemplate) -> int:
    """Refuse a model without an embedding for every token, before anything large is loaded. Returns how many it has.

    Raises:
        ConfigError: names both numbers.
    """
    model = config.actor_rollout_ref.model
    return load.check_vocabulary(
        model.path, len(chat.tokenizer), revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def build_tools(config: Config) -> ToolSet | None:
    """The tools that the YAML declares, and those of environments; None where there are neither."""
    rollout = config.actor_rollout_ref.rollout
    path = rollout.tool_kwargs.tools_config_file
    tools = load_tools(path) if path else None
    environments = build_environments(rollout.environment, tools, rollout.multi_turn.interaction_timeout_s)
    if environments is None:
        return tools
    named = environments.kinds.values()
    if rollout.interaction_config_file is not None and (both := [k.title for k in named if k.replies]):
        raise ConfigError(
            f"{both[0]} has a method `reply`, and actor_rollout_ref.rollout.interaction_config_file names an "
            "interaction: both answer a turn without calls. Remove one"
        )
    if config.reward.path is None and (silent := [k for k in named if not k.scores]):
        raise ConfigError(
            f"{place_of(silent[0].cls)} has no score(self), and reward.path is null: nothing says what a trajectory is "
            "worth. Write score, or set reward.path"
        )
    return environments


def check_parser(config: Config, chat: ChatTemplate, tools: ToolSet | None) -> None:
    """Refuse a tool parser that finds no call in what the model writes, before anything large is loaded.

    Raises:
        PluginError: no such parser.
        TemplateError: it cannot read the calls that the chat template writes, and another one can.
    """
    rollout, has_tools = config.actor_rollout_ref.rollout, bool(tools)
    if isinstance(tools, EnvironmentTools):
        replies, has_tools = any(kind.replies for kind in tools.kinds.values()), tools.any_tools
        chat.require(tools=has_tools, interaction=replies)
    if not has_tools or not is_multi_turn(rollout) or rollout.custom_generate_function_path is not None:
        return
    name = rollout.multi_turn.tool_parser
    note = require_parser(chat, name, get_parser(name))
    if note is not None:
        log.warning("%s", note)


def loss_scale_of(config: Config) -> LossScale:
    """The run's loss scale; with none named, `default` where there are several turns and `last_round` where not."""
    rollout = config.actor_rollout_ref.rollout
    usual = "default" if is_multi_turn(rollout) else "last_round"
    return load_loss_scale(rollout.multi_turn.loss_scale or usual)


def build_reward(config: Config) -> Reward:
    """The reward that the configuration names. If it names none: the score of environments, or the reward of the rows'
    data source."""
    scored, environment = config.reward, config.actor_rollout_ref.rollout.environment
    path = "environment" if scored.path is None and environment.is_configured else scored.path
    return load_reward(path, scored.name, scored.kwargs, scored.timeout_s, solution_str=scored.solution_str)


def build_runner(
    config: Config,
    chat: ChatTemplate,
    tools: ToolSet | None,
    policy_module: Any,
    engine: InferenceEngine | None = None,
    hosts: tuple[EngineHost, ...] = (),
    overlaps: bool = False,
) -> RolloutRunner:
    """Engine, parser, tool executor, interactions and reward around one session context.

    Args:
        overlaps: the engine is to sample while the policy is trained.
    """
    rollout = config.actor_rollout_ref.rollout
    multi_turn = rollout.multi_turn
    limits = Limits.from_config(rollout, config.data.max_prompt_length)
    engine = engine or _build_engine(config, chat, policy_module, limits.max_model_len, hosts, overlaps)
    if overlaps:
        engines.check_overlap(engine, config)
    engine = _around(engine, rollout, overlaps)
    media = chat.media_kinds & engine.capabilities.media
    executor = None
    environments = tools if isinstance(tools, EnvironmentTools) else None
    limits_of_run = (rollout.max_concurrent, None if environments is None else environments.limit)
    if tools is not None and is_multi_turn(rollout) and (environments is None or environments.any_tools):
        count_tokens = partial(chat.encode_text, neutral=True)
        executor = ToolExecutor(tools, ToolLimits.from_config(multi_turn), count_tokens, media=media)
    scored = config.reward
    reward = build_reward(config)
    schemas = executor.tools.schemas() if executor is not None else []
    parts = DriverParts(_parser(config), media, chat, reward, schemas)
    reward.bind(config, parts)
    if environments is not None:
        driver: RolloutDriver = EnvironmentDriver(environments, config.data.max_prompt_length)
    else:
        driver = build_driver(config, parts)
    return RolloutRunner(
        context=SessionContext(
            chat=chat,
            engine=engine,
            limits=limits,
            parser=_parser(config) if executor is not None else None,
            sampling=training_sampling(config),
            sanity=SanityMonitor(parse_mode(multi_turn.tokenization_sanity_check_mode), multi_turn.max_mismatch_rate),
            use_inference_chat_template=multi_turn.use_inference_chat_template,
            deterministic=config.trainer.deterministic,
            seed=config.trainer.seed,
            loss_scale=loss_scale_of(config),
            train_prompt_assistants=multi_turn.train_prompt_assistants,
        ),
        reward=reward,
        driver=driver,
        tools=executor,
        interactions=load_interactions(rollout.interaction_config_file) if is_multi_turn(rollout) else {},
        interaction_timeout_s=multi_turn.interaction_timeout_s,
        max_concurrent=min((limit for limit in limits_of_run if limit), default=None),
        seats=rollout.max_num_seqs if rollout.name == "local" else None,
        max_retries=rollout.max_retries,
        tool_reward_weight=scored.tool_reward_weight,
        turn_score_weight=scored.turn_score_weight,
        reward_by_turn=scored.placement == "turn",
        turn_cost=scored.turn_cost,
        token_cost=scored.token_cost,
    )


def _around(engine: InferenceEngine, rollout: RolloutConfig, overlaps: bool) -> InferenceEngine:
    """What decides when turns are asked for, where something does."""
    if rollout.mode == "sync":
        return LockStepEngine(engine)
    if not overlaps or rollout.on_update == "continue":
        return engine
    return WholeTurnsEngine(engine) if rollout.on_update == "finish_turn" else OneVersionEngine(engine)


def _build_engine(
    config: Config,
    chat: ChatTemplate,
    policy_module: Any,
    max_model_len: int | None,
    hosts: tuple[EngineHost, ...],
    overlaps: bool,
) -> InferenceEngine:
    """The engine that the config names; one that samples nothing where saved rollouts are trained on."""
    if config.trainer.debug_mode == "train_only":
        return AbsentEngine()
    return engines.build(
        EngineSetup(
            config.actor_rollout_ref,
            policy_module,
            end_token_ids=frozenset(chat.stop_token_ids),
            decode=chat.decode,
            max_model_len=max_model_len,
            deterministic=config.trainer.deterministic,
            seed=config.trainer.seed,
            hosts=hosts,
            overlaps=overlaps,
        )
    )


def begin_workers(config: Config, stream: RolloutStream) -> None:
    """From here on rollout workers drive the stream's conversations, where the config wants some.

    Raises:
        ConfigError: the engine or another key cannot do with them.
        VerlMTError: what a worker could not make.
    """
    if config.trainer.debug_mode == "train_only" or find("verl_mt.functions", "rollout_workers") is None:
        return
    if (pool := extension_function("rollout_workers")(config, stream.runner)) is not None:
        stream.pool = pool
        stream.call(pool.start())


def require_media(engine: InferenceEngine, row: DataRow, *, rollout_name: str) -> None:
    """Refuse a row with images or videos that the engine would not get.

    Raises:
        ConfigError: names the row and the engine.
    """
    unseen = {f"{kind}s" for kind, _ in parts_of(row.prompt)} - engine.capabilities.media
    if unseen:
        raise ConfigError(
            f"{row.place}: the prompt holds {describe(row.prompt)}, but actor_rollout_ref.rollout.name="
            f"{rollout_name} takes text only. Use local (docs/multimodal.md), or leave them out"
        )


def training_sampling(config: Config) -> SamplingParams:
    """How training rollouts sample; `max_new_tokens` is set turn by turn."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_new_tokens=rollout.response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(dict.fromkeys((*rollout.stop, *_parser_stops(config)))),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def _parser(config: Config) -> ToolParser:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    runs = multi_turn.run_calls_in_unclosed_reasoning
    return get_parser(multi_turn.tool_parser, runs_calls_in_unclosed_reasoning=runs)


def _parser_stops(config: Config) -> tuple[str, ...]:
    """Where the tool parser's grammar ends a turn that goes on in the model's mind (ReAct, Search-R1)."""
    rollout = config.actor_rollout_ref.rollout
    has_tools = rollout.tool_kwargs.tools_config_file or rollout.environment.is_configured
    used = has_tools and rollout.custom_generate_function_path is None
    return get_parser(rollout.multi_turn.tool_parser).stop_strings if used and is_multi_turn(rollout) else ()


def validation_sampling(config: Config) -> SamplingParams:
    """How validation samples: `rollout.val_kwargs`, everything else as in training."""
    chosen = config.actor_rollout_ref.rollout.val_kwargs
    return replace(
        training_sampling(config),
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
    )
