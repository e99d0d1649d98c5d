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

from typing import Any

from verl_mt.extensions.compat.rewards.answer_style import Format, ReActFormat
from verl_mt.extensions.compat.rewards.math_answer import MathAccuracy
from verl_mt.extensions.compat.rewards.orm import ORM, AsyncORM
from verl_mt.extensions.compat.schedulers.base import MultiTurnScheduler
from verl_mt.extensions.compat.schedulers.driver import NotAScheduler, load_scheduler
from verl_mt.extensions.compat.schedulers.gym import (
    Env,
    GYMScheduler,
    GymScheduler,
    OpenEnvScheduler,
    OpenEnvWrapper,
    envs,
)
from verl_mt.extensions.compat.schedulers.hooks import TrajectoryOver
from verl_mt.extensions.compat.schedulers.requests import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
    UsageInfo,
)
from verl_mt.extensions.compat.schedulers.shipped import (
    MathTipsMultiTurnScheduler,
    MathTipsScheduler,
    ThinkingModelTipsScheduler,
    ToolCallScheduler,
    loss_scale_map,
    multi_turns,
    orms,
)
from verl_mt.extensions.compat.schedulers.swift_names import (
    PRM,
    ContextManager,
    DefaultRMPlugin,
    GenRMPlugin,
    GRPOVllmEngine,
    Messages,
    PtEngine,
    Template,
    TransformersEngine,
    VllmEngine,
    context_managers,
    extract_logprobs_from_choice,
    get_env_args,
    get_logger,
    is_master,
    not_offered_name,
    prms,
    remove_response,
    rm_plugins,
    to_device,
)
from verl_mt.rollout.loss_scale import ConfigLossScale, ContextType, LossScale


def __getattr__(name: str) -> Any:
    """A name of ms-swift's that is not offered loads, and says so when it is used."""
    if (found := not_offered_name(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


InferRequest = RolloutInferRequest
RolloutScheduler = MultiTurnScheduler

__all__ = [
    "ORM",
    "PRM",
    "AsyncORM",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "ConfigLossScale",
    "ContextManager",
    "ContextType",
    "DefaultRMPlugin",
    "Env",
    "Format",
    "GRPOVllmEngine",
    "GYMScheduler",
    "GenRMPlugin",
    "GymScheduler",
    "InferRequest",
    "LossScale",
    "MathAccuracy",
    "MathTipsMultiTurnScheduler",
    "MathTipsScheduler",
    "Messages",
    "MultiTurnScheduler",
    "NotAScheduler",
    "OpenEnvScheduler",
    "OpenEnvWrapper",
    "PtEngine",
    "ReActFormat",
    "RequestConfig",
    "RolloutInferRequest",
    "RolloutOutput",
    "RolloutResponseChoice",
    "RolloutScheduler",
    "Template",
    "ThinkingModelTipsScheduler",
    "ToolCallScheduler",
    "TrajectoryOver",
    "TransformersEngine",
    "UsageInfo",
    "VllmEngine",
    "context_managers",
    "envs",
    "extract_logprobs_from_choice",
    "get_env_args",
    "get_logger",
    "is_master",
    "load_scheduler",
    "loss_scale_map",
    "multi_turns",
    "orms",
    "prms",
    "remove_response",
    "rm_plugins",
    "to_device",
]
