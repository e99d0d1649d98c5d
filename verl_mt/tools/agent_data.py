"""`agent_data`: what tools of verl read of the trajectory that calls them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from verl_mt.data.conversation import Message
from verl_mt.data.media import load_image, load_video, parts_of
from verl_mt.data.trajectory import Trajectory
from verl_mt.tools.toolset import without_nulls

_FIELDS = (
    "request_id, messages, image_data, video_data, tools_kwargs, interaction_kwargs, metrics, extra_fields, "
    "turn_scores, tool_rewards, assistant_turns, user_turns"
)


class AgentData:
    """One trajectory as verl's tools know it: one object per attempt at a conversation, shared by all its tools.

    Tools may set further attributes on it. They live as long as the trajectory.

    Args:
        trajectory: the trajectory; None = there is none (`verl_mt.serve_tools`).
        extra_info: the row's.

    Attributes:
        request_id: a random id. An attempt that starts again after the engine was lost has another one.
        tools_kwargs, interaction_kwargs: the row's entries of these names, without nulls; `{}` where it has none.
        metrics: a dict for the tools' own use.
        extra_fields: a dict for the tools' own use; the reward finds its entries in `extra_info`.
        tool_rewards: the step reward of each call of earlier turns, in order; 0.0 for a call that failed.
    """

    def __init__(self, trajectory: Trajectory | None = None, extra_info: Mapping[str, Any] | None = None):
        self._trajectory = trajectory or Trajectory("", "", "", "")
        self.request_id = uuid4().hex
        self.tools_kwargs, self.interaction_kwargs = (
            copy.deepcopy(without_nulls((extra_info or {}).get(name))) or {}
            for name in ("tools_kwargs", "interaction_kwargs")
        )
        self.metrics: dict[str, Any] = {}
        self.extra_fields: dict[str, Any] = {}
        self.tool_rewards: list[float] = []
        self._environment: Any = None
        """The trajectory's `EnvironmentSession`, whose tools find it here."""

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, the turn that made the call included. Copies: only the rollout appends."""
        return [message.copy() for message in self._trajectory.messages]

    @property
    def image_data(self) -> list[Any]:
        """The images of the conversation in their order, as Pillow's, in RGB.

        Raises:
            DataError: an image cannot be read.
        """
        return [load_image(value) for kind, value in parts_of(self._trajectory.messages) if kind == "image"]

    @property
    def video_data(self) -> list[list[Any]]:
        """The videos of the conversation in their order, each a list of frames.

        Raises:
            DataError: a frame cannot be read.
        """
        return [load_video(value) for kind, value in parts_of(self._trajectory.messages) if kind == "video"]

    @property
    def turn_scores(self) -> list[float]:
        """The interaction's score of each of its turns so far."""
        return list(self._trajectory.turn_scores)

    @property
    def assistant_turns(self) -> int:
        """Assistant turns so far, the one that made the call included."""
        return self._trajectory.num_turns

    @property
    def user_turns(self) -> int:
        """Answers to assistant turns so far: those of tools, all calls of a turn as one, and the interaction's."""
        return max(0, self._trajectory.num_turns - 1)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"agent_data has no {name!r}. It has {_FIELDS}, and what tools have set on it")


def takes_agent_data(execute: Callable[..., Any]) -> bool:
    """Whether an `execute` names `agent_data` or takes any keyword."""
    return _takes_agent_data(execute.__func__) if inspect.ismethod(execute) else _takes_agent_data.__wrapped__(execute)


@functools.lru_cache
def _takes_agent_data(execute: Callable[..., Any]) -> bool:
    parameters = inspect.signature(execute).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or p.name == "agent_data" for p in parameters)
