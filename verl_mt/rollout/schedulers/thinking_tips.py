"""`thinking_tips_scheduler`: for models that think, and forget in production what they thought in earlier turns."""

from __future__ import annotations

import copy
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.data.requests import ChatCompletionResponseChoice, RequestConfig, RolloutInferRequest, RolloutOutput
from verl_mt.rollout.schedulers.math_tips import MathTipsMultiTurnScheduler


class ThinkingModelTipsScheduler(MathTipsMultiTurnScheduler):
    """Asks again when the answer is wrong; the history that the model then reads holds no reasoning.

    Each turn is a record of its own: it is trained as it was sampled, reasoning included, behind the prompt that the
    model really read. All records share the trajectory's reward (`reward.path=thinking_tips`).
    """

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Forget the reasoning, ask again."""
        infer_request.messages = [_without_reasoning(message) for message in infer_request.messages]
        return super().step(infer_request, response_choice, current_turn)

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> list[RolloutOutput]:
        """One output per turn."""
        outputs: list[RolloutOutput] = []
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice, turn = response.choices[0], len(outputs) + 1
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            outputs.append(
                RolloutOutput(
                    response,
                    messages=copy.deepcopy(infer_request.messages),
                    response_token_ids=choice.token_ids,
                    rollout_infos={"num_turns": turn},
                )
            )
            if choice.finish_reason == "abort" or await self._is_over(infer_request, choice, turn):
                return outputs
            infer_request = self.step(infer_request, choice, turn)["infer_request"]


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {**message, "content": str(message["content"]).rpartition("</think>")[2].lstrip("\n")}
