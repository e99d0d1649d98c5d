"""Schedulers: everything that a plug-in file of ms-swift imports, from one place.

Example:
    >>> from verl_mt.rollout.scheduler import MultiTurnScheduler, multi_turns
    >>> class AskAgain(MultiTurnScheduler):
    ...     def step(self, infer_request, response_choice, current_turn):
    ...         infer_request.messages.append({"role": "user", "content": "Are you sure?"})
    ...         return {"infer_request": infer_request}
    >>> multi_turns["ask_again"] = AskAgain  # then: actor_rollout_ref.rollout.multi_turn.scheduler=ask_again
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from verl_mt.data.requests import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
)
from verl_mt.errors import ConfigError, PluginError, error_text
from verl_mt.plugins import Registry, load_object
from verl_mt.rewards.base import ORM, orms
from verl_mt.rollout.loss_scale import ContextType, LossScale, loss_scale_map
from verl_mt.rollout.schedulers.base import MultiTurnScheduler, missing_methods
from verl_mt.rollout.schedulers.conversation import TrajectoryOver
from verl_mt.rollout.schedulers.gym import Env, GymScheduler, envs
from verl_mt.rollout.schedulers.math_tips import MathTipsMultiTurnScheduler, MathTipsScheduler
from verl_mt.rollout.schedulers.thinking_tips import ThinkingModelTipsScheduler
from verl_mt.rollout.schedulers.tool_call import ToolCallScheduler

__all__ = [
    "ORM",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "ContextType",
    "Env",
    "GymScheduler",
    "LossScale",
    "MathTipsMultiTurnScheduler",
    "MathTipsScheduler",
    "MultiTurnScheduler",
    "RequestConfig",
    "RolloutInferRequest",
    "RolloutOutput",
    "RolloutResponseChoice",
    "ThinkingModelTipsScheduler",
    "ToolCallScheduler",
    "TrajectoryOver",
    "envs",
    "load_scheduler",
    "loss_scale_map",
    "multi_turns",
    "orms",
]

CONFIG_KEY = "actor_rollout_ref.rollout.multi_turn.scheduler"

multi_turns: Registry[Any] = Registry(
    "multi-turn scheduler",
    {
        "math_tip_trick": MathTipsScheduler,
        "math_tip_trick_multi_turn": MathTipsMultiTurnScheduler,
        "thinking_tips_scheduler": ThinkingModelTipsScheduler,
        "tool_call_scheduler": ToolCallScheduler,
        "gym_scheduler": GymScheduler,
    },
)
"""`multi_turns['mine'] = MyScheduler` registers a scheduler by name."""


class NotAScheduler(PluginError, NotImplementedError):
    """A class that decides nothing: neither `step` nor `run`."""


def load_scheduler(path: str, *, max_turns: int | None = None, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Make the scheduler that the config names.

    Args:
        path: registered name, dotted path, or `file.py:Name`.
        max_turns: of the run; `kwargs` may give another.
        kwargs: of the constructor.

    Raises:
        PluginError: nothing there, no scheduler, or its constructor raised.
        NotAScheduler: it has neither `step` nor `run`.
    """
    kind = load_object(path, what=CONFIG_KEY, registry=multi_turns)
    if not isinstance(kind, type) or not issubclass(kind, MultiTurnScheduler):
        raise PluginError(f"{CONFIG_KEY}: {path} is no subclass of MultiTurnScheduler, got {kind!r:.100}")
    if kind.step is MultiTurnScheduler.step and kind.run is MultiTurnScheduler.run:
        raise NotAScheduler(f"{CONFIG_KEY}: {missing_methods(kind)}")
    arguments = {"max_turns": max_turns, **(kwargs or {})}
    try:
        signature = inspect.signature(kind)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = [] if takes_any else sorted(set(arguments) - set(signature.parameters) - {"max_turns"})
        if unknown:
            raise ConfigError(
                f"{CONFIG_KEY}_kwargs: {kind.__name__} takes no {', '.join(unknown)}; its parameters: "
                f"{', '.join(signature.parameters)}"
            )
        if not takes_any and "max_turns" not in signature.parameters:
            del arguments["max_turns"]
        scheduler = kind(**arguments)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        text = error_text(error, named=True)
        raise PluginError(f"{CONFIG_KEY}: making {kind.__name__}({arguments}) failed: {text}") from error
    if not hasattr(scheduler, "max_turns"):
        scheduler.max_turns = max_turns  # a constructor that does not call its base's
    return scheduler
