"""Arguments of a generate or reward function of slime's kind: `args`, `GenerateState`, `sampling_params`."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from verl_mt.chat.template import ChatTemplate
from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import Config, correction_of
from verl_mt.config_paths import resolve_model_path
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import Status
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.aliases.families import families
from verl_mt.plugins import listing, suggest
from verl_mt.rewards.base import Reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.drivers import DriverParts

ROUTER_HOST = "rollout-session.invalid"
"""The router's address in `args`. `post` knows it and hands the request to the session; a name under `.invalid` never
resolves (RFC 2606), so a client of another kind, whose tokens nobody would record, fails at once."""
ROUTER_PORT = 30000


@dataclass(frozen=True)
class SlimeMeanings:
    """What slime means otherwise than the rest of verl_mt; it holds inside this driver and nowhere else."""

    given_up: frozenset[Status] = frozenset({Status.ABORTED})
    """What a function sets on a Sample that is neither scored nor trained. FAILED is no such status: it holds a partial
    answer, which counts like any other, as long as its tokens are the engine's."""
    execution: str = "rollout_id"
    """The field of a Sample that says of which execution it is a part: those of one execution weigh as one."""


COMPAT = SlimeMeanings()


class Runtime:
    """What all calls of a run share; a copy of `args`, deep or not, shares it too."""

    def __init__(
        self, chat: ChatTemplate, reward: Reward, max_concurrent: int | None, tools: Sequence[dict[str, Any]] = ()
    ):
        self.chat = chat
        self.tools = list(tools)
        self.reward = reward
        self.semaphore = asyncio.Semaphore(max_concurrent or 1_000_000)
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Any:
        """A copy: functions run in another thread, and a tokenizer may be set up by one thread only. Runs in any
        thread."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = copy.deepcopy(self.chat.tokenizer)
            return self._tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return self


class GenerateArgs:
    """slime's `args`: the router's address, the config (by section, and under slime's names), the user's own kwargs.

    Every flag of slime's parser has a value: our setting where it has one, else slime's default. A function may set
    further attributes; each call has its own copy.
    """

    def __init__(self, config: Config, runtime: Runtime):
        own = config.actor_rollout_ref.rollout.custom_generate_kwargs
        names = {f.name: getattr(config, f.name) for f in fields(config)} | _slime_names(config)
        taken = sorted(set(own) & set(names))
        if taken:
            raise ConfigError(
                f"actor_rollout_ref.rollout.custom_generate_kwargs: {listing(taken)} would hide what args holds under "
                "that name. Choose another"
            )
        vars(self).update(names, **own, _runtime=runtime, _flags=_flags(config))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_runtime" not in vars(self):
            raise AttributeError(name)
        flags = vars(self)["_flags"]
        if name in flags:
            return copy.deepcopy(flags[name])
        known = [n for n in vars(self) if not n.startswith("_")]
        raise AttributeError(
            f"args has no {name!r}{suggest(name, [*known, *flags])}. Own settings of a function go into "
            f"actor_rollout_ref.rollout.custom_generate_kwargs. There is: {listing(known)}"
        )

    def copy(self) -> GenerateArgs:
        """For one call."""
        return copy.copy(self)


ARGS = "slime args"
"""Their name in `DriverParts.shared`."""


def args_of(config: Config, parts: DriverParts) -> GenerateArgs:
    """The `args` of a run, made once for its generate function and its rewards."""
    if ARGS not in parts.shared:
        assert parts.chat is not None and parts.reward is not None
        runtime = Runtime(parts.chat, parts.reward, config.actor_rollout_ref.rollout.max_concurrent, parts.tool_schemas)
        parts.shared[ARGS] = GenerateArgs(config, runtime)
    args: GenerateArgs = parts.shared[ARGS]
    return args


def runtime_of(args: Any) -> Runtime:
    """What stands behind `args`.

    Raises:
        TypeError: it is not ours.
    """
    runtime = vars(args).get("_runtime") if hasattr(args, "__dict__") else None
    if not isinstance(runtime, Runtime):
        raise TypeError(f"expected the args of a generate function, got {type(args).__name__}")
    return runtime


class GenerateState:
    """slime's state object: `tokenizer`, `processor`, `sampling_params`, `semaphore`, `args`. Cheap to make."""

    aborted = False
    """A rollout that is cancelled cancels its functions. None is told to stop early."""

    def __init__(self, args: GenerateArgs):
        runtime = runtime_of(args)
        self.args = args
        self.tokenizer = runtime.tokenizer
        self.processor = None
        self.chat = runtime.chat
        """The chat template, for functions that render messages: `chat.delta_ids`, `chat.prompt_ids`."""
        self.tools = runtime.tools
        """Schemas of the configured tools, for the prompt; `call_tools` runs them."""
        self.semaphore = runtime.semaphore
        config = args.actor_rollout_ref.rollout
        self.sampling_params = sampling_dict(config, config)


def sampling_dict(sampling: SamplingParams | RolloutConfig, limits: Limits | RolloutConfig) -> dict[str, Any]:
    """`sampling_params` as a generate function gets them: a new dict for every call. Control tokens and stop
    strings stay in texts, as slime looks at them."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": limits.max_tokens_per_turn or limits.response_length,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def _slime_names(config: Config) -> dict[str, Any]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    longest = Limits.from_config(rollout, data.max_prompt_length).max_model_len
    return {
        "sglang_router_ip": ROUTER_HOST,
        "sglang_router_port": ROUTER_PORT,
        "hf_checkpoint": resolve_model_path(config.actor_rollout_ref.model.path),
        "rollout_batch_size": data.train_batch_size,
        "n_samples_per_prompt": rollout.n,
        "rollout_max_prompt_len": data.max_prompt_length,
        "rollout_max_response_len": rollout.max_tokens_per_turn or rollout.response_length,
        "rollout_max_context_len": longest,
        "eval_max_context_len": longest,
        "rollout_temperature": rollout.temperature,
        "rollout_top_p": rollout.top_p,
        "rollout_top_k": rollout.top_k,
        "rollout_stop": list(rollout.stop) or None,
        "rollout_stop_token_ids": list(rollout.stop_token_ids) or None,
        "rollout_skip_special_tokens": False,
        "apply_chat_template": data.apply_chat_template,
        "custom_rm_path": config.reward.path,
    }


@functools.cache
def flag_defaults() -> Mapping[str, Any]:
    """slime's flags and what its parser gives them where a command says nothing."""
    lines = Path(__file__).with_name("flags.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" = ", 1) for line in lines if line and not line.startswith("#")]
    return {name: json.loads(value) for name, value in pairs}


def _flags(config: Config) -> dict[str, Any]:
    """slime's flags: the value of our key where the table of names has one, else slime's default."""
    found = dict(flag_defaults())
    for name, row in families()["slime"].rows.items():
        if row.meaning == "renamed" and row.convert is None and "." not in name:
            value = _setting(config, row.to)
            found[name] = found.get(name) if value is None else value
        elif name not in found:
            found[name] = row.values[0] if row.values else False if row.switch else None
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    estimator = config.algorithm.adv_estimator
    delta = "algorithm.rollout_correction.off_policy_sequence_mask_delta"
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size or config.data.train_batch_size
    return found | {
        "advantage_estimator": "ppo" if estimator == "gae" else estimator,
        "global_batch_size": mini * rollout.n,
        "over_sampling_batch_size": config.data.train_batch_size,
        "rollout_num_gpus": trainer.nnodes * trainer.n_workers_per_node,
        "lr_decay_style": config.actor_rollout_ref.actor.optim.lr_scheduler_type,
        "use_tis": correction_of(config).get("rollout_is") is not None,
        "use_opsm": _setting(config, delta) is not None,
        "use_wandb": "wandb" in trainer.logger,
        "use_tensorboard": "tensorboard" in trainer.logger,
        "debug_rollout_only": trainer.debug_mode == "rollout_only",
        "debug_train_only": trainer.debug_mode == "train_only",
        "eval_max_response_len": rollout.max_tokens_per_turn or rollout.response_length,
    }


def _setting(config: Config, key: str) -> Any:
    """The value at a verl_mt key; None where a mapping on the way does not hold it."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value
