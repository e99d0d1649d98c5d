"""Reward functions that score a batch in one call; verl's `compute_score` for a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from verl_mt.errors import value_text
from verl_mt.rewards.adapters import CallFailed, ComputeScore, FunctionReward, extra_info_of, parameter_names, score_of
from verl_mt.rewards.contract import InvalidScore, RewardFailure, RewardInput, Scores, as_scores, reading_scores

log = logging.getLogger(__name__)


class BatchReward(FunctionReward):
    """The whole batch in one call.

    A batch that raises, is late or has the wrong length is called again item by item, which is said once, so that only
    the items at fault fail. An entry that is None or no number fails its item only.
    """

    _warned = False

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        if len(items) <= 1:
            return await super().score(items)
        try:
            values = await self._score_batch(items)
        except (CallFailed, InvalidScore) as error:
            self._warn(len(items), error)
            return await super().score(items)
        return [self._checked(item, value) for item, value in zip(items, values)]

    async def _score_batch(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        raise NotImplementedError

    async def _value(self, item: RewardInput) -> Any:
        return (await self._score_batch([item]))[0]

    def _checked(self, item: RewardInput, value: Any) -> Scores | RewardFailure:
        try:
            return as_scores(value, self.label)
        except InvalidScore as error:
            return self._failure(item, error)

    def _warn(self, size: int, error: CallFailed | InvalidScore) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "reward %s: a batch of %d %s; its items are scored one by one, in calls that do not see the others",
                self.label, size, error,
            )  # fmt: skip


class VerlBatchReward(BatchReward, ComputeScore):
    """verl's `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list[float | dict]`.

    Lists of the batch's length, by name, and only those that the function has.
    """

    signature = "compute_score(data_sources, solution_strs, ground_truths, extra_infos)"
    filled = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

    @classmethod
    def recognize(cls, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """A function with `solution_strs`."""
        return function if "solution_strs" in parameter_names(function) else None

    async def _score_batch(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        values = await self._call(
            data_sources=[item.data_source for item in items],
            solution_strs=[self._text(item) for item in items],
            ground_truths=[item.ground_truth for item in items],
            extra_infos=[extra_info_of(item) for item in items],
        )
        return [score_of(value) for value in as_list(values, len(items))]


@reading_scores()
def as_list(values: Any, count: int) -> Sequence[Any]:
    """What a batched function returned.

    Raises:
        InvalidScore: not one value per item.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple) or len(values) != count:
        got = f"{len(values)} of them" if isinstance(values, list | tuple) else value_text(values, 80)
        raise InvalidScore(f"must return a list of {count} scores, one per item. Got {got}")
    return values
