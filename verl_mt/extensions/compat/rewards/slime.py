"""slime's reward functions: `reward_func(args, sample)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_mt.extensions.compat.rewards.batches import BatchReward, as_list
from verl_mt.extensions.compat.slime_sample import samples_of
from verl_mt.plugins import listing
from verl_mt.rewards.adapters import FunctionReward, parameter_names
from verl_mt.rewards.contract import InvalidScore, RewardFailure, RewardInput, Scores, reading_scores


class SlimeReward(BatchReward):
    """slime's `reward_func(args, sample, **kwargs) -> float | dict`, called once per Sample.

    With a second parameter named `samples` it is called once with the list of them, and returns a list. Of a dict
    the entry `args.reward_key` is the score where that is set, else `score`.
    """

    signature = "reward_func(args, sample, **kwargs)"
    filled = ("args", "sample", "samples")

    @classmethod
    def recognize(cls, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """A function whose first parameters are `args` and `sample` or `samples`."""
        return function if parameter_names(function)[:2] in (["args", "sample"], ["args", "samples"]) else None

    def __init__(self, function: Callable[..., Any], *, label: str, kwargs: Mapping[str, Any], timeout_s: float):
        names = parameter_names(function)
        if "reward_key" not in names:  # args has it
            kwargs = {name: value for name, value in kwargs.items() if name != "reward_key"}
        super().__init__(function, label=label, kwargs=kwargs, timeout_s=timeout_s)
        self._is_batched = names[1] == "samples"
        self._args: Any = None
        self._refuse_unfilled("a reward of slime's gets args, the sample")

    def bind(self, config: Any, parts: Any) -> None:
        from verl_mt.extensions.compat.generate.args import args_of  # torch: not to tell whose signature it is

        self._args = args_of(config, parts)

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        return await (super().score(items) if self._is_batched else FunctionReward.score(self, items))

    async def _score_batch(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        samples = [_sample_of(item) for item in items]
        if self._is_batched:
            values = as_list(await self._call(self._args, samples), len(items))
        else:
            values = [await self._call(self._args, samples[0])]
        return [by_reward_key(value, self._args) for value in values]


def _sample_of(item: RewardInput) -> Any:
    """The trajectory as slime's `Sample`: the last record's."""
    if item.source is not None or item.trajectory is None:
        return item.source
    row = item.data_row
    label, metadata = (None, None) if row is None else (row.label, row.metadata)
    return samples_of(item.trajectory, item.decode, label=label, metadata=metadata)[-1]


@reading_scores()
def by_reward_key(value: Any, args: Any) -> Any:
    """A dict that a function of slime's kind returned, with the entry that `args.reward_key` names as its score.

    Raises:
        InvalidScore: it has no such entry.
    """
    key = getattr(args, "reward_key", None)
    if not key or not isinstance(value, Mapping):
        return value
    if key not in value:
        raise InvalidScore(f"returned a dict without {key!r} (reward_key). It has {listing(map(str, value))}")
    return {**value, "score": value[key]}
