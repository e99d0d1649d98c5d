"""Helpers that ms-swift's plug-in files import beside schedulers and rewards, by way of `verl_mt.rollout.scheduler`.

What needs the other library's own engine or template is a class here too, so that a file with such a plug-in loads
whole; using it says what to use instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.errors import PluginError
from verl_mt.extensions.compat.not_offered import not_offered
from verl_mt.extensions.compat.replacing_names import ReplacingNames
from verl_mt.extensions.compat.schedulers.requests import ChatCompletionResponseChoice
from verl_mt.plugins import Registry

Messages = list[Message]

_REWARD_MODEL = "a reward model is a server that a reward asks (reward.path=llm_judge, or a custom async reward)"


@dataclass(frozen=True)
class SwiftMeanings:
    """What ms-swift means otherwise than the rest of verl_mt; it holds for what its plug-ins import."""

    names: Callable[[Registry[Any]], Any] = ReplacingNames
    """What its registries are: dicts, in which a name that is taken gets the newer plug-in, with a note."""


COMPAT = SwiftMeanings()

rm_plugins = COMPAT.names(Registry[Any]("reward model plug-in"))
"""`rm_plugins['mine'] = C` is taken; no run uses one: `--reward_model_plugin` is refused with the reason."""


def get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """The logger of plug-in code."""
    return logging.getLogger("verl_mt.plugin")


def to_device(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """Tensors on `device`, in the mappings, lists and tuples that hold them; everything else as it is."""
    if isinstance(data, Mapping):
        return type(data)({k: to_device(v, device, non_blocking) for k, v in data.items()})  # type: ignore[call-arg]
    if isinstance(data, tuple | list):
        return type(data)(to_device(v, device, non_blocking) for v in data)
    return data.to(device=device, non_blocking=non_blocking) if hasattr(data, "to") else data


def remove_response(messages: Messages) -> Any:
    """Take a last assistant message off, in place; its content, or None."""
    if messages and messages[-1]["role"] == "assistant":
        return messages.pop()["content"]
    return None


class Template:
    """Names the type in annotations. Prompts are rendered by the model's own chat template.

    Raises:
        PluginError: on making one.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise PluginError(
            "ms-swift's Template is not offered: the run renders prompts by the model's chat template. A scheduler's "
            "self.tokenizer encodes text"
        )


class DefaultRMPlugin:
    """Base of reward-model plug-ins; `__call__` says what to use instead.

    Raises:
        PluginError: on being called.
    """

    def __init__(self, model: Any, template: Any):
        self.model = model
        self.template = template

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        raise PluginError(f"{type(self).__name__}: {_REWARD_MODEL}")


class TransformersEngine:
    """ms-swift's engine for judges.

    Raises:
        PluginError: on making one.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise PluginError(f"{type(self).__name__} is not offered: {_REWARD_MODEL}")


class PtEngine(TransformersEngine):
    """The older name."""


class VllmEngine(TransformersEngine):
    """ms-swift's engine on vLLM."""


class GRPOVllmEngine(TransformersEngine):
    """The type of `infer_engine` in annotations; a scheduler gets its engine before its first hook."""


class GenRMPlugin(DefaultRMPlugin):
    """Base of reward models that write their verdict; `__call__` says what to use instead."""


class ContextManager:
    """Base of ms-swift's former context managers, which rewrote a conversation between two turns.

    Raises:
        PluginError: on being called; a row that asks for one (`ctx_config`) is refused too.
    """

    def __init__(self, ctx_config: Any = None):
        self.ctx_config = ctx_config

    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        """Of the base: says what to use instead."""
        raise PluginError(
            f"{type(self).__name__}: context managers are not called. A scheduler's step may rewrite "
            "infer_request.messages, and a new record begins there"
        )


context_managers = COMPAT.names(Registry[Any]("context manager"))
"""`context_managers['mine'] = C` is taken; no run uses one: a row's `ctx_config` is refused with the reason."""


class PRM:
    """Base of ms-swift's process rewards, which its sampling command uses and its training does not."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PluginError(
            f"{type(self).__name__}: process rewards are not offered. A tool's or interaction's score of "
            "a turn is (reward.placement=turn)"
        )


prms = COMPAT.names(Registry[Any]("process reward"))
"""`prms['mine'] = C` is taken; no run uses one."""


def get_env_args(args_name: str, type_func: Callable[[str], Any], default_value: Any) -> Any:
    """A setting from the environment, where its name stands in capitals; the default where it is absent."""
    value = os.environ.get(args_name.upper())
    return default_value if value is None else type_func(value)


def is_master() -> bool:
    """True: plug-ins run in the trainer's process only."""
    return True


_LOOP = "the run drives the conversations itself; replace a scheduler's run, or its hooks"
_REWARD = "it is registered here: reward.path={} with its settings in reward.kwargs"
_ADVICE = {
    **dict.fromkeys(
        ("run_multi_turn", "multi_turn_lifecycle", "invoke_async_hook", "RolloutTurnAccumulator", "resolve_sync"), _LOOP
    ),
    "CosineReward": _REWARD.format("cosine"),
    "RepetitionPenalty": _REWARD.format("repetition"),
    "SoftOverlong": "it is reward.overlong_buffer",
    **dict.fromkeys(
        ("get_model_tokenizer", "InferClient", "InferEngine", "get_template", "InferArguments"), _REWARD_MODEL
    ),
}


def not_offered_name(name: str) -> Any:
    """A stand-in for a name of ms-swift's that is not offered; None for names that nobody knows."""
    return not_offered("ms-swift", name, _ADVICE[name]) if name in _ADVICE else None


def extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
    """The log-probs of a turn's ids; empty where the engine gives none."""
    return [item["logprob"] for item in (response_choice.logprobs or {}).get("content", [])]
