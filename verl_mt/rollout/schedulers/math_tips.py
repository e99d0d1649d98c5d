"""Two ways to tell a model that its answer is wrong: inside its own message, or in a turn of its own.

Both need the row's `solution` (its ground truth stands in for it), and give a tip at most `max_tips` times.
"""

from __future__ import annotations

from typing import Any

from verl_mt.data.requests import ChatCompletionResponseChoice, RolloutInferRequest
from verl_mt.errors import DataError
from verl_mt.rewards.math_answer import is_right
from verl_mt.rollout.schedulers.base import MultiTurnScheduler


class _TipsWhenWrong(MultiTurnScheduler):
    tips_prompt: str

    def __init__(self, max_turns: int | None = None, *args: Any, max_tips: int = 1, **kwargs: Any):
        super().__init__(max_turns, *args, **kwargs)
        self.max_tips = max_tips
        # A subclass may do anything; these only compare texts.
        self.runs_inline = type(self).__module__.startswith("verl_mt.")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Over when the answer is right, or no tip is left."""
        if super().check_finished(infer_request, response_choice, current_turn):
            return True
        if "solution" not in infer_request.data_dict:
            raise DataError(f"{type(self).__name__} needs the column solution, or a ground truth; the row has neither")
        answer = str(infer_request.messages[-1]["content"])
        return self._num_tips(infer_request) >= self.max_tips or is_right(answer, infer_request.data_dict["solution"])

    def _num_tips(self, infer_request: RolloutInferRequest) -> int:
        return sum(str(message["content"]).count(self.tips_prompt) for message in infer_request.messages)


class MathTipsScheduler(_TipsWhenWrong):
    """`math_tip_trick`: back to where the model was still thinking, with a doubt put into its mouth.

    The message is cut before its answer and the end of its reasoning; the model goes on behind the doubt, in the same
    message. What it wrote up to the cut stays in training; the doubt, and what was cut, does not.
    """

    tips_prompt = " Wait, there must be a mistake in this. Once more, step by step:"

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Cut, and doubt."""
        message = infer_request.messages[-1]
        text = str(message["content"])
        for end in ("<answer>", "</think>"):
            text = text.partition(end)[0]
        message["content"] = text.rstrip() + self.tips_prompt
        return {"infer_request": infer_request}


class MathTipsMultiTurnScheduler(_TipsWhenWrong):
    """`math_tip_trick_multi_turn`: a user's turn says that the answer is wrong."""

    tips_prompt = "That is not the right answer. Look for the mistake and answer again."

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Ask again."""
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}
