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

from verl_mt.data.requests import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
)
from verl_mt.rewards.base import ORM, orms
from verl_mt.rollout.loss_scale import ContextType, LossScale, loss_scale_map
from verl_mt.rollout.schedulers.base import MultiTurnScheduler
from verl_mt.rollout.schedulers.door import NotAScheduler, load_scheduler
from verl_mt.rollout.schedulers.hooks import TrajectoryOver
from verl_mt.rollout.schedulers.shipped import (
    Env,
    GymScheduler,
    MathTipsMultiTurnScheduler,
    MathTipsScheduler,
    ThinkingModelTipsScheduler,
    ToolCallScheduler,
    envs,
    multi_turns,
)

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
    "NotAScheduler",
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
