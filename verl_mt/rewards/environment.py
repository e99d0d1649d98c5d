"""The reward of environments: what `score` returned."""

from __future__ import annotations

from collections.abc import Sequence

from verl_mt.rewards.contract import Reward, RewardFailure, RewardInput, Scores


class EnvironmentReward(Reward):
    """The number that the trajectory's environment gave, with the further numbers of its dict."""

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        return [self._score(item) for item in items]

    def _score(self, item: RewardInput) -> Scores | RewardFailure:
        scores = item.extra_info["rollout_infos"].get("environment", {}).get("score")
        if scores is None:
            text = f"reward environment: {item.where} has no score of an environment: its class has no score(self)"
            return RewardFailure(text, text, "absent")
        return dict(scores)
