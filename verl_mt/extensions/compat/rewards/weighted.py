"""Several rewards as one: their weighted sum is the score, and each is a separate number in metrics and rows."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_mt.errors import ConfigError, value_text
from verl_mt.plugins import listing
from verl_mt.rewards.base import load_reward, score_all
from verl_mt.rewards.contract import RESERVED_PARTS, Reward, RewardFailure, RewardInput, Scores

if TYPE_CHECKING:
    from verl_mt.data.dataset import DataRow


class WeightedSum(Reward):
    """`weighted_sum`: score = sum of weight * reward over those that say something of the trajectory.

    A reward that gives None or NaN has nothing to say of it (several tasks in one data set, each with a reward of its
    own) and is left out; a trajectory of which none says anything fails, and so does one that a reward fails. Each
    reward's own number stands beside the score under its name, without its weight, and its further numbers as
    `name/further`. A reward named `format` that is weighted stands there as `format_reward`: `reward/without_format` is
    the score without the part `format`.

    Args:
        rewards: what `reward.path` takes, each: registered names, dotted paths, file.py:name.
        weights: a number for each of them; None = 1 for each.
        kwargs: name of a part -> that reward's own arguments.

    Raises:
        ConfigError: no rewards, two of one name, another number of weights or one that is not
            finite, arguments of an unknown part.
    """

    def __init__(
        self,
        rewards: Sequence[str],
        weights: Sequence[float] | None = None,
        kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        paths = _checked_paths(rewards)
        self.weights = _checked_weights(weights, len(paths))
        self.names = [
            "format_reward" if name == "format" and weight != 1 else name
            for name, weight in zip(map(_name_of, paths), self.weights)
        ]
        repeated = sorted({name for name in self.names if self.names.count(name) > 1 or name in RESERVED_PARTS})
        if repeated:
            raise ConfigError(
                f"reward.kwargs.rewards: each part needs a distinct name, other than {', '.join(RESERVED_PARTS)}. "
                f"Got {', '.join(repeated)} from {', '.join(paths)}. The name is the last word of the path"
            )
        own = dict(kwargs or {})
        if unknown := [name for name in own if name not in map(_name_of, paths)]:
            known = ", ".join(map(_name_of, paths))
            raise ConfigError(f"reward.kwargs.kwargs: no part {listing(unknown)}. There are {known}")
        self._parts = [load_reward(path, kwargs=own.get(_name_of(path))) for path in paths]

    @property
    def timeout_s(self) -> float:
        """Of one call of one reward, in seconds."""
        return self._parts[0].timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        for part in self._parts:
            part.timeout_s = value

    def bind(self, config: Any, parts: Any) -> None:
        for part in self._parts:
            part.bind(config, parts)

    def check(self, row: DataRow) -> None:
        for part in self._parts:
            part.check(row)

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        by_part = await asyncio.gather(*(score_all(part, items) for part in self._parts))
        return [self._sum(item, results) for item, results in zip(items, zip(*by_part))]

    def _sum(self, item: RewardInput, results: Sequence[Scores | RewardFailure]) -> Scores | RewardFailure:
        numbers: Scores = {}
        total = 0.0
        for name, weight, result in zip(self.names, self.weights, results):
            if isinstance(result, RewardFailure):
                if result.kind != "absent":
                    return result
                continue
            total += weight * result["score"]
            numbers[name] = result["score"]
            numbers |= {f"{name}/{key}": value for key, value in result.items() if key != "score"}
        if not numbers:
            text = f"reward weighted_sum, {item.where}: none of {', '.join(self.names)} gave a number"
            return RewardFailure(text, text, "absent")
        return {"score": total, **numbers}


def _name_of(path: str) -> str:
    return re.split(r"[:./]", path.removesuffix(".py"))[-1]


def _checked_paths(rewards: Any) -> list[str]:
    if isinstance(rewards, str) or not isinstance(rewards, Sequence) or not rewards:
        raise ConfigError(f"reward.kwargs.rewards: expected a list of rewards, got {value_text(rewards, 80)}")
    if wrong := [path for path in rewards if not isinstance(path, str)]:
        raise ConfigError(f"reward.kwargs.rewards: expected names and paths, got {value_text(wrong[0], 80)}")
    return list(rewards)


def _checked_weights(weights: Any, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    numbers = isinstance(weights, Sequence) and not isinstance(weights, str)
    if not numbers or any(isinstance(w, bool) or not isinstance(w, int | float) for w in weights):
        raise ConfigError(f"reward.kwargs.weights: expected a list of numbers, got {value_text(weights, 80)}")
    if unusable := [w for w in weights if not math.isfinite(w)]:
        raise ConfigError(
            f"reward.kwargs.weights: {unusable[0]} is not finite. Give finite numbers, 0 to only log a part"
        )
    if len(weights) != count:
        raise ConfigError(f"reward.kwargs.weights: {len(weights)} weights for {count} rewards. Give one for each")
    return [float(weight) for weight in weights]
