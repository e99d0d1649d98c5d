"""`Gsm8kInteraction`: checks a GSM8K answer and asks for another try."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl_mt.data.conversation import Message
from verl_mt.interactions.base import BaseInteraction
from verl_mt.rewards import gsm8k


class Gsm8kInteraction(BaseInteraction):
    """Correct: says so and ends the conversation. Wrong: asks to try again.

    A row gives `extra_info.interaction_kwargs.ground_truth`. An answer is the last `#### N` of the model's last turn,
    or the turn itself where it is nothing but a number.
    """

    runs_inline = True
    correct_text = "Your response is correct!"
    wrong_text = "Your response is incorrect! Think about it once more and try again."

    @property
    def needs(self) -> tuple[str, ...]:
        """The ground truth; nothing where a subclass begins differently."""
        own = type(self).start_interaction is Gsm8kInteraction.start_interaction
        return ("ground_truth",) if own else ()

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Remember the problem's answer."""
        instance_id = instance_id or str(uuid4())
        truth = None if ground_truth is None else str(ground_truth)
        self._instance_dict[instance_id] = {"ground_truth": truth, "response": "", "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(correct?, text, 1.0 or 0.0, {}).

        Raises:
            ValueError: the row gives no ground truth.
        """
        last: Message = next((m for m in reversed(messages) if m.get("role") == "assistant"), {"content": ""})
        self._instance_dict[instance_id]["response"] = last_assistant_text(messages) or last.get("content")
        score = await self.calculate_score(instance_id)
        self._instance_dict[instance_id]["reward"] = score
        correct = score == 1.0
        return correct, self.correct_text if correct else self.wrong_text, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1.0 where the last answer is right.

        Raises:
            ValueError: the row gives no ground truth.
        """
        state = self._instance_dict[instance_id]
        if state["ground_truth"] is None:
            raise ValueError(
                f"interaction {self.name!r} needs the row's ground truth: "
                "set extra_info.interaction_kwargs.ground_truth"
            )
        response = str(state["response"] or "")
        response = response if "####" in response else f"#### {response.strip()}"
        score: Any = gsm8k.compute_score(response, state["ground_truth"], method="strict", format_score=0.0, score=1.0)
        return float(score["score"] if isinstance(score, dict) else score)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the problem."""
        del self._instance_dict[instance_id]


def last_assistant_text(messages: list[Message]) -> str:
    """The text of the model's last turn; typed parts joined, empty where there is none."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return ""
