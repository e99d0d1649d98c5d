"""`tool_call_scheduler`: ReAct. The model writes an action, the result is put behind it, the model goes on writing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from verl_mt.data.requests import ChatCompletionResponseChoice, RolloutInferRequest
from verl_mt.errors import ToolCallError
from verl_mt.rollout.schedulers.base import MultiTurnScheduler
from verl_mt.tools.calculator import calculate

_CALL = re.compile(r"Action:[ \t]*(?P<tool>[^\n]*?)[ \t]*\nAction Input:[ \t]*(?P<input>[^\n]*)")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


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
