"""`calc_gsm8k_reward`: the model submits an answer to a GSM8K problem and sees its score."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl_mt.rewards.gsm8k import compute_score
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

NOT_IMPROVED_REWARD = -0.05
"""Step reward of a submission that scores no better than the one before."""


class Gsm8kTool(BaseTool):
    """Scores submitted answers, as verl's tool of this name does.

    A row gives `extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`. The step reward is -0.05 where a
    submission scores no better than the one before (the first: than 0), else 0; `calc_reward` is the last one's score.
    """

    runs_inline = True
    own_name = "calc_gsm8k_reward"
    own_description = "Check an answer to a GSM8K problem. 1.0 means it is correct, 0.0 that it is not."
    answer_description = "The model's answer to the problem, a number"

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """One string, `answer`."""
        schema = self.__dict__.get("tool_schema")
        if schema is not None:
            return schema
        answer = {"type": "string", "description": self.answer_description}
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": self.own_name,
                    "description": self.own_description,
                    "parameters": {"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
                },
            }
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Remember the problem's answer.

        Raises:
            ValueError: the row gives none.
        """
        if ground_truth is None:
            raise ValueError(
                f"{self.name} needs the row's ground truth: "
                f"set extra_info.tools_kwargs.{self.name}.create_kwargs.ground_truth"
            )
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"ground_truth": str(ground_truth), "response": "", "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Score one submission."""
        state = self._instance_dict[instance_id]
        answer = str(parameters["answer"])
        state["response"] = self.solution(answer)
        score = self.score(state["response"], state["ground_truth"])
        improved = score > state["reward"]
        state["reward"] = score
        return ToolResponse(text=f"The answer {answer!r} scores {score}."), 0.0 if improved else NOT_IMPROVED_REWARD, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last submission; 0 without one."""
        state = self._instance_dict[instance_id]
        return self.score(state["response"], state["ground_truth"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the problem."""
        del self._instance_dict[instance_id]

    def solution(self, answer: str) -> str:
        """The text that is scored for a submitted answer."""
        return answer if answer.startswith("#### ") else f"#### {answer}"

    def score(self, solution: str, ground_truth: str) -> float:
        """1 for a right solution, else 0; 0 for an empty one."""
        if not solution:
            return 0.0
        score = compute_score(solution, ground_truth, method="flexible", format_score=0.0, score=1.0)
        return float(score["score"] if isinstance(score, dict) else score)
