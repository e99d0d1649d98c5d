"""The familiar reward signatures as `Reward`: verl's `compute_score`, for one answer or a batch of them, ms-swift's
`__call__`, slime's `reward_func`.

A batch is a group: the samples of one prompt, whose rewards are compared with each other.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from verl_mt.data.trajectory import Status, StopReason
from verl_mt.errors import ConfigError, PluginError, error_text, traceback_text, value_text
from verl_mt.plugins import extension_function, listing
from verl_mt.rewards.contract import (
    FailureKind,
    InvalidScore,
    Reward,
    RewardFailure,
    RewardInput,
    RunState,
    Scores,
    as_scores,
    reading_scores,
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


log = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 32
"""Calls of one batch that run at once; a call's deadline counts from its own start."""

Signature = Literal["verl", "verl_batch", "swift", "slime"]

_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class OrmArguments:
    """What stands in for the trainer's arguments, which ms-swift hands to its rewards.

    Args:
        values: `reward.kwargs.args`: name -> value.
    """

    def __init__(self, values: Mapping[str, Any] | None = None):
        vars(self).update(values or {})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name!r}: ms-swift's arguments are not handed to rewards; give those that this one reads in "
            f"reward.kwargs.args, for example {{{name}: ...}}"
        )


class ORM:
    """Base of ms-swift's outcome rewards; subclassing it is not required.

    Example:
        >>> class Short(ORM):
        ...     def __call__(self, completions, **kwargs):
        ...         return [1.0 if len(text) < 100 else 0.0 for text in completions]
    """

    def __init__(self, args: Any = None, **kwargs: Any):
        self.args = args

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(completions, **kwargs)")


class AsyncORM:
    """Base of ms-swift's outcome rewards whose `__call__` is async; subclassing it is not required."""

    def __init__(self, args: Any = None, **kwargs: Any):
        self.args = args

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} must implement async __call__(completions, **kwargs)")


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
    call = _documented_call(function)
    signature = signature_of(call, label)
    if signature == "slime" and not _names_it(call, "reward_key"):
        kwargs = {name: value for name, value in kwargs.items() if name != "reward_key"}  # args has it
    reserved: dict[str, Sequence[str]] = {
        "swift": ("completions", "messages"),
        "slime": ("args", "sample", "samples"),
        "verl": _VERL_ARGUMENTS,
        "verl_batch": _VERL_BATCH_ARGUMENTS,
    }
    _check_kwargs(call, kwargs, reserved[signature], label)
    adapters: dict[str, type[_FunctionReward]] = {
        "swift": SwiftReward,
        "slime": SlimeReward,
        "verl": VerlReward,
        "verl_batch": VerlBatchReward,
    }
    return adapters[signature](call, label=label, kwargs=kwargs, timeout_s=timeout_s)


def signature_of(function: Callable[..., Any], label: str) -> Signature:
    """Whose signature it is.

    Raises:
        PluginError: nobody's; shows what was got and what is possible.
    """
    parameters = _parameters(function, label)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if "completions" in names:
        return "swift"
    if names[:1] == ["args"] and names[1:2] in (["sample"], ["samples"]):
        return "slime"
    if "solution_strs" in names:
        return "verl_batch"
    if "solution_str" in names or (not names and _takes_any(parameters)):
        return "verl"
    raise PluginError(
        f"reward {label}: cannot tell how to call it from its parameters ({', '.join(map(str, parameters))}). Expected "
        "compute_score(data_source, solution_str, ground_truth, extra_info), "
        "compute_score(data_sources, solution_strs, ground_truths, extra_infos), __call__(completions, **kwargs), or "
        "reward_func(args, sample, **kwargs)"
    )


class _FunctionReward(Reward):
    reads_response: bool = False
    """`solution_str` is the whole response (`reward.solution_str`)."""

    def __init__(self, function: Callable[..., Any], *, label: str, kwargs: Mapping[str, Any], timeout_s: float):
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

    async def _call(self, *args: Any, **offered: Any) -> Any:
        if "math_verify" in sys.modules:  # also where a call before this one imported it
            verify_in_threads()
        taken = {k: v for k, v in offered.items() if self._takes_any or k in self._names}
        return await call_with_deadline(
            self._code, self.function, args, {**taken, **self.kwargs}, timeout_s=self.timeout_s
        )

    def _text(self, item: RewardInput) -> str:
        return item.response_text if self.reads_response else item.solution_str

    async def _score_one(self, item: RewardInput) -> Scores | RewardFailure:
        raise NotImplementedError

    async def _score_alone(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        """Every item in a call of its own, some at once."""
        slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def one(item: RewardInput) -> Scores | RewardFailure:
            async with slots:
                return await self._score_one(item)

        return list(await asyncio.gather(*map(one, items)))

    def _failure(self, item: RewardInput, error: CallFailed | InvalidScore) -> RewardFailure:
        text = f"reward {self.label}, {item.where}: {error}"
        if isinstance(error, InvalidScore):
            return RewardFailure(text, text, error.kind)
        return RewardFailure(text, error.traceback_text or text, error.kind)

    def _checked(self, item: RewardInput, value: Any) -> Scores | RewardFailure:
        try:
            return as_scores(value, self.label)
        except InvalidScore as error:
            return self._failure(item, error)


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
    """Only the main thread may use signals: elsewhere the function runs without a deadline of its own."""

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


class VerlReward(_FunctionReward):
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict`.

    One call per item. Arguments are passed by name, and only those that the function has: a scorer may leave some out.
    """

    def __init__(self, function: Callable[..., Any], *, label: str, kwargs: Mapping[str, Any], timeout_s: float):
        super().__init__(function, label=label, kwargs=kwargs, timeout_s=timeout_s)
        _refuse_unfilled(self._required, _VERL_ARGUMENTS, label)

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        return await self._score_alone(items)

    async def _score_one(self, item: RewardInput) -> Scores | RewardFailure:
        try:
            value = await self._call(
                data_source=item.data_source,
                solution_str=self._text(item),
                ground_truth=item.ground_truth,
                extra_info=_verl_info(item),
            )
            return as_scores(_of_verl(value), self.label)
        except (CallFailed, InvalidScore) as error:
            return self._failure(item, error)


class _BatchReward(_FunctionReward):
    """The whole batch in one call.

    A batch that raises, is late or has the wrong length is called again item by item, which is said once, so that only
    the items at fault fail. An entry that is None or no number fails its item only.
    """

    _warned = False

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        if len(items) <= 1:
            return await self._score_alone(items)
        try:
            values = await self._score_batch(items)
        except (CallFailed, InvalidScore) as error:
            self._warn(len(items), error)
            return await self._score_alone(items)
        return [self._checked(item, value) for item, value in zip(items, values)]

    async def _score_batch(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        raise NotImplementedError

    async def _score_one(self, item: RewardInput) -> Scores | RewardFailure:
        try:
            return self._checked(item, (await self._score_batch([item]))[0])
        except (CallFailed, InvalidScore) as error:
            return self._failure(item, error)

    def _warn(self, size: int, error: CallFailed | InvalidScore) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "reward %s: a batch of %d %s; its items are scored one by one, in calls that do not see the others",
                self.label, size, error,
            )  # fmt: skip


class VerlBatchReward(_BatchReward):
    """verl's `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list[float | dict]`.

    Lists of the batch's length, by name, and only those that the function has.
    """

    def __init__(self, function: Callable[..., Any], *, label: str, kwargs: Mapping[str, Any], timeout_s: float):
        super().__init__(function, label=label, kwargs=kwargs, timeout_s=timeout_s)
        _refuse_unfilled(self._required, _VERL_BATCH_ARGUMENTS, label)

    async def _score_batch(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        values = await self._call(
            data_sources=[item.data_source for item in items],
            solution_strs=[self._text(item) for item in items],
            ground_truths=[item.ground_truth for item in items],
            extra_infos=[_verl_info(item) for item in items],
        )
        return [_of_verl(value) for value in _as_list(values, len(items))]


class SwiftReward(_BatchReward):
    """ms-swift's `__call__(completions, **kwargs) -> list[float]`: the whole batch in one call.

    `completions` are the texts of the last assistant turns; `kwargs` hold, as lists of the batch's length, the columns
    of the rows, `messages`, `is_truncated`, `finish_reason` (length or stop), `rollout_infos`, `request_id` (the
    trajectory's id), `prompt_id`, `response_token_ids` (one list of ids; in a run of several turns one for each
    assistant message), `solution` and `ground_truth` (where the rows have no such column); and for the whole batch
    `trajectory_inputs`: trajectory id -> its records in order, and `trainer_state` (`TrainerState`).
    """

    async def _score_batch(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        columns = swift_columns(items)
        missing = self._required - columns.keys() - {"completions"}
        if missing:
            raise InvalidScore(
                f"needs the column {', '.join(sorted(missing))}; "
                f"the rows have {', '.join(sorted(items[0].row)) or 'none'}"
            )
        offered = {name: column for name, column in columns.items() if name not in self.kwargs}
        values = await self._call([item.completion for item in items], **offered)
        return _as_list(values, len(items))


class SlimeReward(_BatchReward):
    """slime's `reward_func(args, sample, **kwargs) -> float | dict`, called once per Sample.

    With a second parameter named `samples` it is called once with the list of them, and returns a list. Of a dict
    the entry `args.reward_key` is the score where that is set, else `score`.
    """

    def __init__(self, function: Callable[..., Any], *, label: str, kwargs: Mapping[str, Any], timeout_s: float):
        super().__init__(function, label=label, kwargs=kwargs, timeout_s=timeout_s)
        self._is_batched = [p.name for p in _parameters(function, label)][1] == "samples"
        self._args: Any = None
        missing = self._required - {"args", "sample", "samples"}
        if missing:
            raise PluginError(
                f"reward {label}: nothing fills its parameter {', '.join(sorted(missing))}; a reward of slime's gets "
                "args, the sample and what reward.kwargs holds"
            )

    def bind(self, config: Any, parts: Any) -> None:
        self._args = extension_function("slime_args")(config, parts)

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        return await (super().score(items) if self._is_batched else self._score_alone(items))

    async def _score_batch(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        samples = [_sample_of(item) for item in items]
        if self._is_batched:
            values = _as_list(await self._call(self._args, samples), len(items))
        else:
            values = [await self._call(self._args, samples[0])]
        return [by_reward_key(value, self._args) for value in values]


def _sample_of(item: RewardInput) -> Any:
    """The trajectory as slime's `Sample`: the last record's."""
    if item.source is not None or item.trajectory is None:
        return item.source
    row = item.data_row
    label, metadata = (None, None) if row is None else (row.label, row.metadata)
    return extension_function("slime_samples")(item.trajectory, item.decode, label=label, metadata=metadata)[-1]


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
        raise InvalidScore(f"returned a dict without {key!r} (reward_key); it has {listing(map(str, value))}")
    return {**value, "score": value[key]}


def _refuse_unfilled(required: set[str], given: Sequence[str], label: str) -> None:
    missing = required - set(given)
    if missing:
        raise PluginError(
            f"reward {label}: nothing fills its parameter {', '.join(sorted(missing))}; a reward gets "
            f"{', '.join(given)} and what reward.kwargs holds"
        )


@reading_scores()
def _as_list(values: Any, count: int) -> Sequence[Any]:
    """What a batched function returned.

    Raises:
        InvalidScore: not one value per item.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple) or len(values) != count:
        got = f"{len(values)} of them" if isinstance(values, list | tuple) else value_text(values, 80)
        raise InvalidScore(f"must return a list of {count} scores, one per item; got {got}")
    return values


class TrainerState:
    """`trainer_state` of ms-swift's rewards, under transformers' names.

    Attributes:
        global_step: optimizer updates before this batch was sampled, 0 in the first step.
        max_steps: of the whole run; 0 where nothing is trained.
        num_train_epochs: `trainer.total_epochs`.
        is_world_process_zero, is_local_process_zero: True: rewards are asked once, in the trainer's process.
    """

    is_world_process_zero = True
    is_local_process_zero = True

    def __init__(self, run: RunState):
        self.global_step = run.step * run.updates_per_step
        self.max_steps = run.total_steps * run.updates_per_step
        self.num_train_epochs = run.total_epochs

    def __getattr__(self, name: str) -> Any:
        known = [*vars(self), "is_world_process_zero", "is_local_process_zero"]
        raise AttributeError(f"trainer_state has no {name!r}; it has {listing(known)}")


def swift_columns(items: Sequence[RewardInput]) -> dict[str, Any]:
    """The keyword arguments of an ms-swift reward for a batch, which all come from one rollout."""
    names = list(dict.fromkeys(name for item in items for name in item.row))
    columns: dict[str, Any] = {
        "solution": [item.ground_truth for item in items],
        "ground_truth": [item.ground_truth for item in items],
    }
    columns.update({name: [item.row.get(name) for item in items] for name in names if name != "completions"})
    messages = [_messages(item) for item in items]
    infos = [dict(item.extra_info.get("rollout_infos") or {}) for item in items]
    ids = [str(item.extra_info.get("trajectory_id", position)) for position, item in enumerate(items)]
    columns["messages"] = messages
    columns["is_truncated"] = [_is_truncated(item) for item in items]
    columns["finish_reason"] = ["length" if cut else "stop" for cut in columns["is_truncated"]]
    columns["rollout_infos"] = infos
    columns["request_id"] = ids
    columns["prompt_id"] = [item.prompt_id for item in items]
    columns["response_token_ids"] = [_response_ids(item) for item in items]
    columns["trainer_state"] = TrainerState(items[0].run if items else RunState())
    columns["trajectory_inputs"] = {
        ids[k]: [
            {**_columns_of(item), "rollout_infos": infos[k], "request_id": ids[k], **record}
            for record in item.extra_info.get("trajectory_inputs") or [{"messages": messages[k]}]
        ]
        for k, item in enumerate(items)
    }
    return columns


def _response_ids(item: RewardInput) -> list[Any]:
    """Copies, like all that a reward may edit."""
    each = [list(ids) for ids in item.message_ids]
    return each if item.several_turns or len(each) > 1 else [i for ids in each for i in ids]


def _columns_of(item: RewardInput) -> dict[str, Any]:
    """The row's columns, with the ground truth where they have none of that name."""
    return {"solution": item.ground_truth, "ground_truth": item.ground_truth, **item.row}


def _messages(item: RewardInput) -> list[dict[str, Any]]:
    """A copy: a reward that edits them must not edit the trajectory."""
    return [dict(message) for message in item.extra_info.get("messages") or []]


def _of_verl(value: Any) -> Any:
    """Of a tuple (score, what led to it), as scorers of code return it, the score."""
    return value[0] if isinstance(value, tuple) and value else value


def _verl_info(item: RewardInput) -> dict[str, Any]:
    """`extra_info` as verl's functions know it: `num_turns` counts the prompt and the answers too. It holds both texts
    that `solution_str` may be."""
    texts = {"model_text": item.solution_str, "response_text": item.response_text}
    info = {**item.extra_info, "messages": _messages(item), **texts}
    return info if item.conversation_turns is None else info | {"num_turns": item.conversation_turns}


def _is_truncated(item: RewardInput) -> bool:
    reason = item.extra_info.get("stop_reason")
    return reason is not None and reason in set(StopReason) and StopReason(reason).status is Status.TRUNCATED


def _documented_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """ms-swift's document writes `def __call__(completions, **kwargs)` without `self`; such a class works too."""
    call = vars(type(function)).get("__call__")
    if inspect.isfunction(call) and next(iter(inspect.signature(call).parameters), None) == "completions":
        return call
    return function


def _names_it(function: Callable[..., Any], name: str) -> bool:
    return any(p.name == name and p.kind is not p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _check_kwargs(function: Callable[..., Any], kwargs: Mapping[str, Any], reserved: Sequence[str], label: str) -> None:
    parameters = _parameters(function, label)
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    unknown = sorted(set(kwargs) - names) if not _takes_any(parameters) else []
    taken = sorted(set(kwargs) & set(reserved))
    if unknown:
        raise ConfigError(
            f"reward.kwargs: {label} takes no {', '.join(unknown)}; its parameters: {', '.join(sorted(names))}"
        )
    if taken:
        raise ConfigError(f"reward.kwargs: {', '.join(taken)} of {label} comes from the rollout; remove it")


def _parameters(function: Callable[..., Any], label: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise PluginError(f"reward {label}: {function!r} is not a function with a readable signature") from error


def _takes_any(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters)
