"""Rewards by name: the registry, the scorers of known data sources, and `load_reward`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl_mt.errors import ConfigError, EngineError, PluginError, VerlMTError, error_text, traceback_text, value_text
from verl_mt.plugins import Registry, import_file, keep_default_dtype, listing, load_object, suggest
from verl_mt.rewards import arithmetic, exact_match, gsm8k
from verl_mt.rewards.adapters import ComputeScore, adapt
from verl_mt.rewards.contract import (
    InvalidScore,
    Reward,
    RewardFailure,
    RewardInput,
    Scores,
    as_scores,
)

if TYPE_CHECKING:
    from verl_mt.data.dataset import DataRow

__all__ = [
    "Reward",
    "RewardFailure",
    "RewardInput",
    "Scores",
    "default_scorers",
    "load_reward",
    "rewards",
    "score_all",
]

rewards: Registry[Any] = Registry(
    "reward",
    {
        "gsm8k": gsm8k.compute_scores,
        "exact_match": exact_match.compute_scores,
        "arithmetic": arithmetic.compute_score,
        "environment": "verl_mt.rewards.environment:EnvironmentReward",
    },
    group="verl_mt.rewards",
)

default_scorers: dict[str, Any] = {
    "openai/gsm8k": gsm8k.compute_score,
    "gsm8k": gsm8k.compute_score,
    "verl_mt/arithmetic": arithmetic.compute_score,
    **{
        f"searchR1_{name}": exact_match.compute_score
        for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    },
}
"""`data_source` -> scorer, where the config names no reward."""


def load_reward(
    path: str | None = None,
    name: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    *,
    solution_str: str = "model",
) -> Reward:
    """The reward that the config names.

    Args:
        path: registered name, dotted path, `file.py:name`, a bare file or module. None = by the row's `data_source`.
        name: the function in a bare file or module. None = `compute_score`.
        kwargs: a function gets them with every call, a class when it is made (by its classmethod `from_reward_kwargs`
            if it has one).
        timeout_s: deadline of one call in seconds.
        solution_str: what a `compute_score` gets there: `model`, the model's own text, or `response`, the whole
            response.

    Raises:
        PluginError: nothing there, or it is not a reward.
        ConfigError: `kwargs` that it does not take, or keys that contradict each other.
    """
    reward = _load(path, name, kwargs, timeout_s)
    if solution_str == "response":
        if not isinstance(reward, ComputeScore):
            label = f"{path}:{name}" if name else path
            raise ConfigError(
                f"reward.solution_str=response has no effect on {label}, which has no parameter solution_str. Remove "
                "it, or set reward.path instead of custom_reward_function.path"
            )
        reward.reads_response = True
    return reward


def _load(path: str | None, name: str | None, kwargs: Mapping[str, Any] | None, timeout_s: float) -> Reward:
    if timeout_s <= 0:
        raise ConfigError(f"reward.timeout_s must be positive, got {timeout_s}")
    kwargs = dict(kwargs or {})
    if path is None:
        if name is not None or kwargs:
            raise ConfigError(
                "reward.name and reward.kwargs belong to reward.path, which is null. Name a reward there "
                f"(registered: {listing(rewards)})"
            )
        return DataSourceReward(default_scorers, timeout_s=timeout_s)
    target, label = _find(path, name)
    if isinstance(target, type):
        try:
            target = getattr(target, "from_reward_kwargs", target)(**kwargs)
        except (VerlMTError, KeyboardInterrupt):
            raise
        except BaseException as error:
            text = error_text(error, named=True)
            raise PluginError(
                f"reward {label}: making it with reward.kwargs {sorted(kwargs)} failed: {text}"
            ) from error
        kwargs = {}
    if isinstance(target, Reward):
        if kwargs:
            raise ConfigError(f"reward.kwargs: {label} is an object already. It takes no arguments")
        target.timeout_s = timeout_s
        return target
    if not callable(target):
        raise PluginError(f"reward {label}: expected a function or a class, got {value_text(target, 80)}")
    return adapt(target, label=label, kwargs=kwargs, timeout_s=timeout_s)


def _find(path: str, name: str | None) -> tuple[Any, str]:
    """The object, and what to call it in errors."""
    if path in rewards:
        if name is not None:
            raise ConfigError(f"reward.name is {name!r}, but reward.path {path!r} is a registered reward. Remove one")
        return rewards.find(path), path
    if path.endswith(".py"):
        target: Any = import_file(path, "reward.path")
    elif name is not None:
        return load_object(f"{path}:{name}", what="reward.path", registry=rewards), f"{path}:{name}"
    else:
        target = load_object(path, what="reward.path", registry=rewards)
    if not isinstance(target, ModuleType):
        return target, path
    wanted = name or "compute_score"
    if not hasattr(target, wanted):
        functions = [n for n, v in vars(target).items() if callable(v) and not n.startswith("_")]
        raise PluginError(
            f"reward.path: {path} has no {wanted!r}{suggest(wanted, functions)}. It has {listing(functions)}. "
            "reward.name names the function."
        )
    return getattr(target, wanted), f"{path}:{wanted}"


async def score_all(reward: Reward, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
    """`reward.score(items)`, whatever a `Reward` of the user's own does there: one checked result per item."""
    label, problem, found = f"reward {type(reward).__name__}", "", []
    try:
        found = list(await reward.score(items))
        if len(found) != len(items):
            problem = details = f"{label} must return one result per item, {len(items)}; got {len(found)}"
    except (EngineError, KeyboardInterrupt):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        problem, details = f"{label}: raised {error_text(error, named=True)}", traceback_text(error)
    finally:
        keep_default_dtype(label)
    if problem:
        return [RewardFailure(f"{problem} ({item.where})", details) for item in items]
    return [_as_result(value, label, item) for value, item in zip(found, items)]


def _as_result(value: Any, label: str, item: RewardInput) -> Scores | RewardFailure:
    if isinstance(value, RewardFailure):
        return value
    try:
        return as_scores(value, label)
    except InvalidScore as error:
        text = f"{label}, {item.where}: {error}"
        return RewardFailure(text, text, error.kind)


class DataSourceReward(Reward):
    """Each item by the scorer of its `data_source`. The shipped scorers are quick and run where they are called."""

    def __init__(self, scorers: Mapping[str, Any], *, timeout_s: float):
        self.scorers = dict(scorers)
        self._rewards = {
            name: _Inline(function, name)
            if inspect.getmodule(function) in (gsm8k, arithmetic, exact_match)
            else adapt(function, label=name, kwargs={}, timeout_s=timeout_s)
            for name, function in self.scorers.items()
        }

    def bind(self, config: Any, parts: Any) -> None:
        for reward in self._rewards.values():
            reward.bind(config, parts)

    def check(self, row: DataRow) -> None:
        where = row.place
        if row.data_source not in self.scorers:
            raise ConfigError(f"{where}: {self._unknown(row.data_source)}")
        wanted = row.raw.get("reward_model")
        style = wanted.get("style") if isinstance(wanted, dict) else None
        if style == "model":
            raise ConfigError(
                f"{where}: reward_model.style is 'model', so a model is to score it, but without reward.path the "
                f"rule for {row.data_source!r} would. Name the scorer in reward.path (llm_judge asks a model), or set "
                "the rows' style to rule"
            )

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        results: list[Scores | RewardFailure | None] = [None] * len(items)
        by_source: dict[str, list[int]] = {}
        for position, item in enumerate(items):
            by_source.setdefault(item.data_source, []).append(position)
        for source, positions in by_source.items():
            if source in self._rewards:
                scored = await self._rewards[source].score([items[p] for p in positions])
            else:
                scored = [self._failure(items[p]) for p in positions]
            for position, result in zip(positions, scored):
                results[position] = result
        return [result for result in results if result is not None]

    def _failure(self, item: RewardInput) -> RewardFailure:
        text = f"{item.where}: {self._unknown(item.data_source)}"
        return RewardFailure(text, text, "unknown_data_source")

    def _unknown(self, data_source: str) -> str:
        return (
            f"no scorer for data_source {data_source!r}{suggest(data_source, self.scorers)}. "
            f"Known: {listing(self.scorers)}. To score your rows, name your function: reward.path=my_reward.py"
        )


class _Inline(Reward):
    """A shipped scorer, without thread and deadline."""

    def __init__(self, function: Any, label: str):
        self.function = function
        self.label = label
        self._names = set(inspect.signature(function).parameters)

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        return [self._score_one(item) for item in items]

    def _score_one(self, item: RewardInput) -> Scores | RewardFailure:
        offered = {
            "data_source": item.data_source,
            "solution_str": item.solution_str,
            "ground_truth": item.ground_truth,
            "extra_info": item.extra_info,
        }
        try:
            return as_scores(self.function(**{k: v for k, v in offered.items() if k in self._names}), self.label)
        except Exception as error:
            text = f"reward {self.label}, {item.where}: {error_text(error)}"
            return RewardFailure(text, traceback_text(error))
