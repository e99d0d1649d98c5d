"""The base class of interactions: a simulated user. A verl interaction runs after `verl.` -> `verl_mt.`."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl_mt.data.conversation import Message


class BaseInteraction:
    """Answers the model when it has ended its turn without a tool call.

    One object per process and YAML entry, shared by all trajectories, what belongs to one trajectory lives under an
    `instance_id`::

        start_interaction -> generate_response, generate_response, ... -> calculate_score -> finalize_interaction

    `finalize_interaction` runs exactly once for every started instance, whatever happened. Each method may be
    `async def` or a plain `def` (which runs in a thread).

    Args:
        config: the entry's `config`, with `name` added. `interaction_agent` where one is made without.
    """

    runs_inline: bool = False
    """True: no method ever blocks, so all run on the rollout's own loop, without a thread. For cheap pure code only."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What every row has to give in `extra_info.interaction_kwargs`. A run looks before it samples."""
        return ()

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name") or "interaction_agent"

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Make what one trajectory needs.

        Args:
            instance_id: the id that verl_mt proposes. None = choose one.
            kwargs: the row's `extra_info.interaction_kwargs`, `name` included.

        Returns:
            The id to use from now on.
        """
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """React to the conversation.

        Args:
            instance_id: from `start_interaction`.
            messages: all so far, the model's last turn included. A copy.
            kwargs: the row's `extra_info.interaction_kwargs`.

        Returns:
            (should_terminate, text, turn_score, extra): True or False, a text, a finite number, a dict. Anything else
            fails the trajectory. The text becomes the next user message unless it is over, cut to
            `multi_turn.max_tool_response_tokens` like a tool's answer.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement generate_response(instance_id, messages, **kwargs)"
        )

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the whole interaction, asked for once, when it is over."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Free what `start_interaction` made."""


def default_name(class_name: str) -> str:
    """The name of an interaction whose entry gives none: `Gsm8kInteraction` -> `gsm8k`."""
    stem = class_name.removesuffix("Interaction")
    return (stem or class_name).lower()
