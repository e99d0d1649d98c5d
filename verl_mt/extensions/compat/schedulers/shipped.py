"""The schedulers that ship with the library, and the registry that finds schedulers by name.

- `math_tip_trick` and `math_tip_trick_multi_turn` tell a model that its answer is wrong: inside its own message, or in
  a new turn. Both need the row's `solution` (its ground truth stands in for it), and give a tip at most
  `max_tips` times.
- `thinking_tips_scheduler`: the same for models that think, and forget in production what they thought before.
- `tool_call_scheduler`: ReAct. The model writes an action, the result is put behind it, the model goes on writing.
- `gym_scheduler`, `openenv_scheduler`: the conversation is an episode in an environment (gym.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.errors import DataError, ToolCallError
from verl_mt.extensions.compat.rewards.math_answer import is_right
from verl_mt.extensions.compat.schedulers.base import MultiTurnScheduler
from verl_mt.extensions.compat.schedulers.gym import GYMScheduler, OpenEnvScheduler
from verl_mt.extensions.compat.schedulers.requests import (
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from verl_mt.extensions.compat.schedulers.swift_names import COMPAT
from verl_mt.plugins import Registry
from verl_mt.rewards.base import rewards
from verl_mt.rollout.loss_scale import loss_scales
from verl_mt.tools.calculator import calculate

_CALL = re.compile(r"Action:[ \t]*(?P<tool>[^\n]*?)[ \t]*\nAction Input:[ \t]*(?P<input>[^\n]*)")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class _TipsWhenWrong(MultiTurnScheduler):
    tips_prompt: str

    def __init__(
        self,
        max_turns: int | None = None,
        *args: Any,
        max_tips: int = 1,
        acc_function: Callable[[list[str], list[Any]], list[float]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(max_turns, *args, **kwargs)
        self.max_tips = max_tips
        self.acc_func = acc_function
        """Scores answers against solutions, 1 = right; None = the rule of `math_answer`."""
        # A subclass may do anything; these only compare texts.
        self.runs_inline = type(self).__module__.startswith("verl_mt.") and acc_function is None

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Over when the answer is right, or no tip is left."""
        if super().check_finished(infer_request, response_choice, current_turn):
            return True
        if "solution" not in infer_request.data_dict:
            raise DataError(f"{type(self).__name__} needs the column solution, or a ground truth. The row has neither")
        answer, solution = str(infer_request.messages[-1]["content"]), infer_request.data_dict["solution"]
        if self._num_tips(infer_request) >= self.max_tips:
            return True
        return is_right(answer, solution) if self.acc_func is None else self.acc_func([answer], [solution])[0] == 1

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


class ToolCallScheduler(MultiTurnScheduler):
    """Reads `Action:` / `Action Input:` pairs and appends `Observation:` lines to the same message.

    Returns ids and mask of the turn itself, as a scheduler with an environment of its own would: the tool's text is
    never trained. Over when a turn calls nothing.

    Args:
        tools: name -> function of the input's text; a `ToolCallError` is told to the model. None = a calculator.
    """

    def __init__(
        self,
        max_turns: int | None = None,
        *args: Any,
        tools: Mapping[str, Callable[[str], str]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(max_turns, *args, **kwargs)
        self.tools = dict(tools or {"calculator": calculate})
        self.runs_inline = tools is None and type(self) is ToolCallScheduler

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Over without a call."""
        if super().check_finished(infer_request, response_choice, current_turn):
            return True
        return not extract_tool_calls(response_choice.message.content or "")

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Run the calls, append what they say."""
        results = [self._run(*call) for call in extract_tool_calls(response_choice.message.content or "")]
        text = "".join(f"\nObservation: {result}" for result in results) + "\n"
        infer_request.messages[-1]["content"] += text
        ids = list(response_choice.token_ids or [])
        observation = self.infer_engine.tokenizer.encode(text, add_special_tokens=False)
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + observation,
            "response_loss_mask": [1] * len(ids) + [0] * len(observation),
            "rollout_infos": {"tool_results": results, "num_turns": current_turn},
        }

    def _run(self, name: str, argument: str) -> str:
        if name not in self.tools:
            return f"<error>there is no tool {name!r}; there is {', '.join(self.tools)}</error>"
        try:
            return str(self.tools[name](argument))
        except ToolCallError as error:
            return f"<error>{error}</error>"


def extract_tool_calls(text: str) -> list[tuple[str, str]]:
    """(tool, input) of every pair, in order; what is written inside `<think>...</think>` is no call."""
    return [(m["tool"], m["input"].strip()) for m in _CALL.finditer(_THOUGHT.sub("", text))]


schedulers: Registry[Any] = Registry(
    "multi-turn scheduler",
    {
        "math_tip_trick": MathTipsScheduler,
        "math_tip_trick_multi_turn": MathTipsMultiTurnScheduler,
        "thinking_tips_scheduler": ThinkingModelTipsScheduler,
        "tool_call_scheduler": ToolCallScheduler,
        "gym_scheduler": GYMScheduler,
        "openenv_scheduler": OpenEnvScheduler,
    },
)
multi_turns = COMPAT.names(schedulers)
"""`multi_turns['mine'] = MyScheduler` registers a scheduler by name."""
orms = COMPAT.names(rewards)
"""The rewards of `verl_mt.rewards` as ms-swift's plug-ins see them."""
loss_scale_map = COMPAT.names(loss_scales)
"""The loss scales as ms-swift's plug-ins see them."""
