"""`calc_geo3k_reward`: the model submits an answer to a geometry problem and sees its score."""

from __future__ import annotations

from verl_mt.extensions.compat.rewards import geo3k
from verl_mt.extensions.compat.tools.gsm8k_tool import Gsm8kTool


class Geo3kTool(Gsm8kTool):
    """Scores submitted answers, as verl's tool of this name does: `Gsm8kTool` with the reward of geometry problems.

    A row gives `extra_info.tools_kwargs.calc_geo3k_reward.create_kwargs.ground_truth`.
    """

    own_name = "calc_geo3k_reward"
    own_description = "Check an answer to a geometry problem. 1.0 means correct, 0.0 that it is not."
    answer_description = "The model's answer to the geometry problem"

    def solution(self, answer: str) -> str:
        """The answer itself."""
        return answer

    def score(self, solution: str, ground_truth: str) -> float:
        """1 for a right answer, else 0."""
        return geo3k.compute_score(solution, ground_truth, use_boxed=False, format_score=0.0)
