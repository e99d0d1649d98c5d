"""A user's function as a `Reward`: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

Another signature is a subclass of `FunctionReward`, an entry point of the group `verl_mt.reward_signatures`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError, PluginError, error_text, traceback_text
from verl_mt.extension_points import known
from verl_mt.plugins import load_object
from verl_mt.rewards.contract import (
    FailureKind,
    InvalidScore,
    Reward,
    RewardFailure,
    RewardInput,
    Scores,
    as_scores,
)
from verl_mt.user_code import CallTimeout, NotAnException, UserCode


class CallFailed(Exception):
    """A call that raised or was late."""

    def __init__(self, kind: FailureKind, problem: str, traceback_text: str):
        super().__init__(problem)
        self.kind = kind
        self.problem = problem
        self.traceback_text = traceback_text


async def call_with_deadline(
    code: UserCode, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout_s: float
) -> Any:
    """The result of `function(*args, **kwargs)`.

    Raises:
        CallFailed: it raised or was late.
    """
    try:
        return await code.run(function, args, kwargs, timeout_s=timeout_s)
    except CallTimeout as error:
        raise CallFailed("timeout", f"gave no result within reward.timeout_s: {error}", "") from None
    except NotAnException as error:
        raise CallFailed("raised", error_text(error), traceback_text(error.__cause__ or error)) from error
    except Exception as error:
        raise CallFailed("raised", f"raised {error_text(error, named=True)}", traceback_text(error)) from error


MAX_CONCURRENT_CALLS = 32
"""Calls of one batch that run at once; a call's deadline counts from its own start."""


def adapt(function: Callable[..., Any], *, label: str, kwargs: Mapping[str, Any], timeout_s: float) -> Reward:
    """A user's function or callable object as a `Reward`, told apart by the names of its parameters.

    Args:
        function: the callable; classes are instantiated by the caller.
        label: what the config calls it, for errors.
        kwargs: extra arguments of every call.
        timeout_s: deadline of one call in seconds.

    Raises:
        PluginError: none of the signatures, or a required parameter that nothing fills.
        ConfigError: `kwargs` that it does not take.
    """
    found = _parameters(function, label)
    others = known("verl_mt.reward_signatures")
    kinds = [load_object(path, what=f"reward signature {name}") for name, path in others.items()]
    for kind in (*kinds, ComputeScore):
        call = kind.recognize(function)
        if call is not None:
            reward: Reward = kind(call, label=label, kwargs=kwargs, timeout_s=timeout_s)
            return reward
    expected = " or ".join(kind.signature for kind in (ComputeScore, *kinds))
    hint = "" if others else ". Other signatures need verl_mt/extensions, which is not installed here"
    raise PluginError(
        f"reward {label}: cannot tell how to call it from its parameters ({', '.join(map(str, found))}). "
        f"Expected {expected}{hint}"
    )


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of a callable's parameters, without `*args` and `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


class FunctionReward(Reward):
    """A function or callable object as a `Reward`; a subclass is one signature.

    Args:
        function: what `recognize` returned.
        label: what the config calls it, for errors.
        kwargs: extra arguments of every call.
        timeout_s: deadline of one call in seconds.

    Raises:
        ConfigError: `kwargs` that it does not take.
    """

    signature: str
    """For errors: `reward_func(args, sample, **kwargs)`."""
    filled: Sequence[str]
    """Parameters that come from the rollout."""

    @classmethod
    def recognize(cls, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """What to call if `function` has this signature; None = it has another one."""
        raise NotImplementedError(f"{cls.__name__} must implement recognize(function)")

    def __init__(self, function: Callable[..., Any], *, label: str, kwargs: Mapping[str, Any], timeout_s: float):
        _check_kwargs(function, kwargs, self.filled, label)
        self.function = function
        self.label = label
        self.kwargs = dict(kwargs)
        self.timeout_s = timeout_s
        self._code = UserCode(function, object, "verl_mt-reward")
        if _names_math_verify(function):
            verify_in_threads()
        parameters = _parameters(function, label)
        self._takes_any = _takes_any(parameters)
        self._names = {p.name for p in parameters}
        self._required = {
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in self.kwargs
        }

    def _refuse_unfilled(self, gets: str) -> None:
        missing = self._required - set(self.filled)
        if missing:
            raise PluginError(
                f"reward {self.label}: nothing fills its parameter {', '.join(sorted(missing))}; {gets} "
                "and what reward.kwargs holds"
            )

    async def _call(self, *args: Any, **offered: Any) -> Any:
        if "math_verify" in sys.modules:  # also where a call before this one imported it
            verify_in_threads()
        taken = {k: v for k, v in offered.items() if self._takes_any or k in self._names}
        return await call_with_deadline(
            self._code, self.function, args, {**taken, **self.kwargs}, timeout_s=self.timeout_s
        )

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        """Every item in a separate call, some at once."""
        slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def one(item: RewardInput) -> Scores | RewardFailure:
            async with slots:
                try:
                    return as_scores(await self._value(item), self.label)
                except (CallFailed, InvalidScore) as error:
                    return self._failure(item, error)

        return list(await asyncio.gather(*map(one, items)))

    async def _value(self, item: RewardInput) -> Any:
        """What the function returns for one item."""
        raise NotImplementedError

    def _failure(self, item: RewardInput, error: CallFailed | InvalidScore) -> RewardFailure:
        text = f"reward {self.label}, {item.where}: {error}"
        if isinstance(error, InvalidScore):
            return RewardFailure(text, text, error.kind)
        return RewardFailure(text, error.traceback_text or text, error.kind)


def verify_in_threads() -> None:
    """Let `math_verify`, with the deadlines that it has by default, work in the threads that rewards run in.

    Those deadlines are signals, which only a main thread may set: elsewhere every answer raises, and the functions that
    people write around it catch that and score 0. Off the main thread they are left out; `reward.timeout_s` is around
    the whole call. Nothing happens where the package is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        return
    for name in ("math_verify.parser", "math_verify.grader"):
        module = importlib.import_module(name)
        with_signals = getattr(module, "timeout", None)
        if with_signals is None or hasattr(with_signals, "in_threads"):
            continue
        module.timeout = _signals_in_main_thread(with_signals)  # type: ignore[attr-defined]


def _signals_in_main_thread(with_signals: Callable[..., Any]) -> Callable[..., Any]:
    """Only the main thread may use signals: elsewhere the function runs without this deadline."""

    def timeout(timeout_seconds: int | None = 10) -> Callable[..., Any]:
        is_main = threading.current_thread() is threading.main_thread()
        decorator: Callable[..., Any] = with_signals(timeout_seconds=timeout_seconds if is_main else None)
        return decorator

    timeout.in_threads = True  # type: ignore[attr-defined]
    return timeout


def _names_math_verify(function: Callable[..., Any]) -> bool:
    """Whether the file that it stands in imports the package, perhaps inside of a function."""
    kind = function if inspect.isroutine(function) else type(function)
    try:
        return "math_verify" in Path(inspect.getfile(kind)).read_text(encoding="utf-8", errors="replace")
    except (OSError, TypeError):  # written in C, or at a prompt
        return False


class ComputeScore(FunctionReward):
    """`compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict`.

    One call per item. Arguments are passed by name, and only those that the function has: a scorer may leave some out.

    Raises:
        PluginError: a required parameter that nothing fills.
    """

    signature = "compute_score(data_source, solution_str, ground_truth, extra_info)"
    filled: Sequence[str] = ("data_source", "solution_str", "ground_truth", "extra_info")
    reads_response = False
    """`solution_str` is the whole response (`reward.solution_str`)."""

    @classmethod
    def recognize(cls, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """A function with `solution_str`, or with nothing but `**kwargs`."""
        names, parameters = parameter_names(function), list(inspect.signature(function).parameters.values())
        return function if "solution_str" in names or (not names and _takes_any(parameters)) else None

    def __init__(self, function: Callable[..., Any], *, label: str, kwargs: Mapping[str, Any], timeout_s: float):
        super().__init__(function, label=label, kwargs=kwargs, timeout_s=timeout_s)
        self._refuse_unfilled(f"a reward gets {', '.join(self.filled)}")

    async def _value(self, item: RewardInput) -> Any:
        return score_of(
            await self._call(
                data_source=item.data_source,
                solution_str=self._text(item),
                ground_truth=item.ground_truth,
                extra_info=extra_info_of(item),
            )
        )

    def _text(self, item: RewardInput) -> str:
        return item.response_text if self.reads_response else item.solution_str


def messages_of(item: RewardInput) -> list[dict[str, Any]]:
    """A copy: a reward that edits them must not edit the trajectory."""
    return [dict(message) for message in item.extra_info.get("messages") or []]


def score_of(value: Any) -> Any:
    """Of a tuple (score, what led to it), as scorers of code return it, the score."""
    return value[0] if isinstance(value, tuple) and value else value


def extra_info_of(item: RewardInput) -> dict[str, Any]:
    """`extra_info` as a `compute_score` gets it: `num_turns` counts the prompt and the answers too. It holds both texts
    that `solution_str` may be."""
    texts = {"model_text": item.solution_str, "response_text": item.response_text}
    info = {**item.extra_info, "messages": messages_of(item), **texts}
    return info if item.conversation_turns is None else info | {"num_turns": item.conversation_turns}


def _check_kwargs(function: Callable[..., Any], kwargs: Mapping[str, Any], reserved: Sequence[str], label: str) -> None:
    names = parameter_names(function)
    unknown = sorted(set(kwargs) - set(names)) if not _takes_any(_parameters(function, label)) else []
    taken = sorted(set(kwargs) & set(reserved))
    if unknown:
        raise ConfigError(
            f"reward.kwargs: {label} takes no {', '.join(unknown)}. Its parameters: {', '.join(sorted(set(names)))}"
        )
    if taken:
        raise ConfigError(f"reward.kwargs: {', '.join(taken)} of {label} comes from the rollout. Remove it")


def _parameters(function: Callable[..., Any], label: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise PluginError(f"reward {label}: {function!r} is not a function with a readable signature") from error


def _takes_any(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters)
