"""Runs the tool calls of trajectories: deadlines, retries, limits, and whose fault a failure is.

- The *model's* (unknown tool, broken or wrong arguments, `ToolCallError`): fed back as text it can learn from.
- The *tool's* (it raised, or timed out): fed back, counted, never the model's fault.
- The *infrastructure's* (`EngineError`): the trajectory cannot go on; the caller aborts and retries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_mt.data.conversation import MalformedCall, ToolCall
from verl_mt.data.media import load_image, load_video
from verl_mt.data.trajectory import TimeSpan
from verl_mt.errors import DataError, EngineError, ToolCallError, UserCodeError, error_text, value_text
from verl_mt.plugins import listing
from verl_mt.tools.agent_data import AgentData, takes_agent_data
from verl_mt.tools.base_tool import BaseTool, reads_nested_kwargs
from verl_mt.tools.limits import ConcurrencyLimit, ToolLimits
from verl_mt.tools.results import (
    CountTokens,
    Failure,
    ToolResult,
    as_reward,
    clean_text,
    media_note,
    normalize,
    numeric_metrics,
    split_media,
    timed_call,
)
from verl_mt.tools.schemas import ToolResponse
from verl_mt.tools.toolset import RowKwargs, ToolSet, parse_row_kwargs
from verl_mt.user_code import CallTimeout, LoopBlocked, closing_task, fair_turn, user_code_of

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""Counts calls of tools that do not exist: what a model invents must not become a metric's name."""

_FIRST_BACKOFF_S = 0.1


class ToolExecutor:
    """One per process. Its limits are shared by all trajectories.

    Args:
        tools: the tools of the run.
        limits: see `ToolLimits`.
        count_tokens: text -> token ids, of the policy's tokenizer.
        media: what the model sees beside text: `images`, `videos`.
    """

    def __init__(
        self, tools: ToolSet, limits: ToolLimits, count_tokens: CountTokens, *, media: frozenset[str] = frozenset()
    ):
        self.tools, self.limits, self.count_tokens, self.media = tools, limits, count_tokens, media
        self._slots: dict[int, ConcurrencyLimit] = {}
        """`id` of a tool -> its slots: tools of two environments may have one name."""
        self._said: set[tuple[str, str]] = set()

    def open(
        self,
        trajectory_id: str,
        tools_kwargs: Mapping[str, Any] | None = None,
        *,
        tools: ToolSet | None = None,
        agent_data: AgentData | None = None,
    ) -> ToolSession:
        """Begin a trajectory.

        Args:
            trajectory_id: for instance ids and the log.
            tools_kwargs: the row's `extra_info.tools_kwargs`.
            tools: the tools this row may use (`ToolSet.for_row`). None = all.
            agent_data: the trajectory as tools see it. None = there is none to see.

        Raises:
            DataError: `tools_kwargs` names an unknown tool or has another shape.
        """
        try:
            allowed = self.tools if tools is None else tools
            row_kwargs = parse_row_kwargs(tools_kwargs, [*self.tools.names, *allowed.names])
        except DataError as error:
            raise DataError(f"trajectory {trajectory_id}: {error}") from error
        return ToolSession(self, trajectory_id, row_kwargs, allowed, agent_data or AgentData())

    def slot(self, tool: BaseTool) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold one of the tool's slots."""
        return self._slots.setdefault(id(tool), ConcurrencyLimit(self.limits.concurrency_of(tool))).slot()

    async def close(self) -> None:
        """The run is over: every tool's own `close`, once. Never raises: what fails is logged."""

        async def close_one(tool: BaseTool) -> None:
            try:
                code = user_code_of(tool, BaseTool, f"tool {tool.name}")
                await code.call("close", (), {}, timeout_s=self.limits.timeout_s)
            except Exception as error:
                logger.warning("tool %r failed at the end of the run: %s", tool.name, error_text(error))

        await asyncio.gather(*(close_one(tool) for tool in self.tools))

    def first_time(self, name: str, error: Exception) -> bool:
        """Whether this tool fails with this kind of error for the first time in this process."""
        before = len(self._said)
        self._said.add((name, type(error).__name__))
        return len(self._said) > before


@dataclass
class _Instance:
    instance_id: str
    opening: ToolResponse | None
    """A non-empty response of `create` that the model has not seen yet."""
    rewards: list[float] = field(default_factory=list)


@dataclass
class _Answer:
    """A result before its text is cut."""

    text: str
    failure: Failure | None = None
    step_reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)


class ToolSession:
    """The tools of one trajectory: `start`, `run` once per assistant turn, `close` in a `finally`."""

    def __init__(
        self, executor: ToolExecutor, trajectory_id: str, row_kwargs: RowKwargs, tools: ToolSet, agent_data: AgentData
    ):
        self.trajectory_id = trajectory_id
        self.agent_data = agent_data
        """What `execute` gets as `agent_data`, where it takes that."""
        self.counters: dict[str, float] = {}
        """`tools/<name>/calls|errors|timeouts|loop_blocked|model_errors|over_budget|truncated|retries|media_dropped`,
        `.../latency_s`, `.../converted_arguments`, and the numbers that `execute` returned as metrics, summed
        (`numeric_metrics` says under which names).

        `calls` counts every call the model wrote; `errors`, `model_errors` and `over_budget` never overlap; `timeouts`
        are among the first, or among the second where a tool ran what the model wrote and that did not end;
        `loop_blocked` are the `timeouts` of calls whose event loop another call of the tool blocked;
        `media_dropped` counts images and videos that the model cannot see: it gets a note in their place."""
        self.time_spans: list[TimeSpan] = []
        self.calls: list[dict[str, Any]] = []
        """What becomes `Trajectory.tool_calls`."""
        self.budget_spent = False
        """Whether the model was told that no calls are left (`max_calls`)."""
        self.reward_turns: dict[str, list[int]] = {}
        """tool -> the turn of each of its step rewards."""
        self._num_calls = 0
        self._executor, self._limits, self._tools = executor, executor.limits, tools
        self._row_kwargs = row_kwargs
        self._instances: dict[str, _Instance] = {}
        self._creating: dict[str, asyncio.Lock] = {}
        self._closing: asyncio.Task[dict[str, list[float]]] | None = None

    async def start(self) -> None:
        """Create the instances that the row has `create_kwargs` for.

        Never raises: a `create` that fails is logged and counted, and tried again at the tool's first call. What
        `create` answers is shown with the result of that call.
        """
        names = [n for n, kinds in self._row_kwargs.items() if n in self._tools and kinds.get("create_kwargs")]
        await asyncio.gather(*(self._create_early(name) for name in names))

    async def run(self, calls: Sequence[ToolCall | MalformedCall], *, turn: int) -> list[ToolResult]:
        """Run the calls of one assistant turn, concurrently, but for those of tools that are `in_order`.

        Returns:
            One result per call, in the order of the calls. Failures are results, never exceptions.
        """
        before, self._num_calls = self._num_calls, self._num_calls + len(calls)
        results: dict[int, tuple[ToolResult, float]] = {}

        async def one_after_the_other(places: Sequence[int]) -> None:
            for k in places:
                results[k] = await timed_call(self._one, k, before + k, calls[k], turn)

        ordered = [
            k
            for k, call in enumerate(calls)
            if call.name and call.name in self._tools and self._tools[call.name].in_order
        ]
        alone = [[k] for k in range(len(calls)) if k not in ordered]
        await asyncio.gather(*map(one_after_the_other, [ordered, *alone] if ordered else alone))
        timed = [results[k] for k in range(len(calls))]
        for call, (result, latency_s) in zip(calls, timed):
            self.calls.append(result.to_row(call, turn=turn, latency_s=latency_s))
            self.agent_data.tool_rewards.append(result.step_reward)
            if result.failure is None:
                self._instances[result.name].rewards.append(result.step_reward)
                self.reward_turns.setdefault(result.name, []).append(turn)
        return [result for result, _ in timed]

    async def close(self) -> dict[str, list[float]]:
        """`calc_reward` and `release` of every created instance, exactly once, however often this is called.

        Never raises: what fails is logged and counted. Goes on in the background if its caller is cancelled.

        Returns:
            tool -> the step rewards of its calls in order, then its `calc_reward` (0 where that failed).
        """
        if self._closing is None:
            self._closing = closing_task(self._close())
        return await asyncio.shield(self._closing)

    async def _one(self, index: int, rank: int, call: ToolCall | MalformedCall, turn: int) -> ToolResult:
        """Call `index` of its turn and `rank` of its trajectory."""
        name, call_id = call.name or "", call.id if isinstance(call, ToolCall) else ""
        metric = name if name in self._tools else UNKNOWN
        self._count(metric, "calls")
        if self._limits.max_calls is not None and rank >= self._limits.max_calls:
            return self._refuse_over_budget(name, call_id, metric)
        try:
            if index >= self._limits.max_parallel_calls:
                raise ToolCallError(
                    f"too many calls in one turn: only the first {self._limits.max_parallel_calls} were run; "
                    "make this call in the next turn"
                )
            if isinstance(call, MalformedCall):
                raise ToolCallError(call.error)
            if name not in self._tools and name in self._executor.tools:
                raise ToolCallError(f"tool {name!r} is not available here. Available: {listing(self._tools.names)}")
            arguments = self._arguments(name, metric, call.arguments)
            self._tools.check_call(name, arguments)
            answer = await self._execute(name, arguments, turn)
            await fair_turn()
        except ToolCallError as error:
            answer = _Answer(error_text(error, whole=True), failure="model")
            self._count(metric, "timeouts", float(error.timed_out))
        except EngineError as error:
            answer = _Answer(f"Tool failed: {error_text(error)}", failure="infrastructure")
            self._log(name, turn, error)
        except Exception as error:
            late = isinstance(error, CallTimeout)
            # The deadline as configured, not what was left of it: the text must not depend on the clock.
            limit_s = self._limits.timeout_of(self._tools[name])
            reason = f"timed out after {limit_s:g} s" if late else error_text(error, whole=True)
            answer = _Answer(f"Tool failed: {reason}", failure="tool")
            self._count(metric, "timeouts", float(late))
            self._count(metric, "loop_blocked", float(isinstance(error, LoopBlocked)))
            self._log(name, turn, error)
        if answer.failure is not None:
            self._count(metric, "model_errors" if answer.failure == "model" else "errors")
        for own, value in numeric_metrics(answer.metrics).items():
            key = f"tools/{metric}/{own}"
            self.counters[key] = self.counters.get(key, 0.0) + value
        return self._finish(name, call_id, metric, answer)

    def _arguments(self, name: str, metric: str, given: Any) -> Any:
        """What the tool gets: as the model wrote them, or with simple types converted."""
        if not self._limits.convert_arguments:
            return given
        arguments, count = self._tools.converted(name, given)
        self._count(metric, "converted_arguments", float(count))
        return arguments

    def _refuse_over_budget(self, name: str, call_id: str, metric: str) -> ToolResult:
        self.budget_spent = True
        self._count(metric, "over_budget")
        text = f"not run: all {self._limits.max_calls} tool calls of this conversation are used up; answer without"
        return ToolResult(name, call_id, f"<error>{text}</error>", failure="model")

    async def _execute(self, name: str, arguments: dict[str, Any], turn: int) -> _Answer:
        async with self._executor.slot(self._tools[name]):
            started = time.monotonic()
            try:
                return await self._attempts(name, arguments, turn)
            finally:
                ended = time.monotonic()
                self._count(name, "latency_s", ended - started)
                self.time_spans.append(TimeSpan("tool", started, ended, turn, name))

    async def _attempts(self, name: str, arguments: dict[str, Any], turn: int) -> _Answer:
        deadline = time.monotonic() + self._limits.timeout_of(self._tools[name])
        retries = self._limits.retries if getattr(self._tools[name], "repeatable", True) else 0
        for left in range(retries, -1, -1):
            share_s = max((deadline - time.monotonic()) / (left + 1), 1e-3)
            try:
                return await self._attempt(name, arguments, share_s)
            except (ToolCallError, EngineError):
                raise
            except Exception as error:
                backoff_s = _FIRST_BACKOFF_S * 2 ** (retries - left)
                if left == 0 or time.monotonic() + backoff_s >= deadline:
                    raise
                self._log(name, turn, error)
            self._count(name, "retries")
            await asyncio.sleep(backoff_s)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, name: str, arguments: dict[str, Any], timeout_s: float) -> _Answer:
        ends = time.monotonic() + timeout_s
        instance = await self._instance(name, timeout_s)
        # The arguments are also in the messages: a tool that changes its own must not change those.
        args = (instance.instance_id, copy.deepcopy(arguments))
        left_s = max(ends - time.monotonic(), 1e-3)
        response, reward, metrics = normalize(await self._call(name, "execute", args, left_s))
        answer = _from_response(response, reward, metrics)
        if instance.opening is not None:
            opening, instance.opening = _from_response(instance.opening), None
            answer.text = "\n".join(t for t in (opening.text, answer.text) if t)
            answer.images, answer.videos = opening.images + answer.images, opening.videos + answer.videos
        if "images" in self._executor.media:
            answer.images = [load_image(image) for image in answer.images]
        if "videos" in self._executor.media:
            answer.videos = [load_video(video) for video in answer.videos]
        return answer

    async def _instance(self, name: str, timeout_s: float) -> _Instance:
        ends = time.monotonic() + timeout_s
        async with self._creating.setdefault(name, asyncio.Lock()):
            if name not in self._instances:
                proposed = f"{self.trajectory_id}/{name}"
                left_s = max(ends - time.monotonic(), 1e-3)
                created = await self._call(name, "create", (proposed,), left_s)
                self._instances[name] = _as_instance(created, proposed)
            return self._instances[name]

    async def _create_early(self, name: str) -> None:
        try:
            await self._instance(name, self._limits.timeout_s)
        except Exception as error:
            self._count(name, "errors")
            self._count(name, "timeouts", float(isinstance(error, CallTimeout)))
            self._log(name, 0, error)

    async def _close(self) -> dict[str, list[float]]:
        rewards = await asyncio.gather(*(self._close_one(name, inst) for name, inst in self._instances.items()))
        return dict(zip(self._instances, rewards))

    async def _close_one(self, name: str, instance: _Instance) -> list[float]:
        final = 0.0
        try:
            final = as_reward(await self._call(name, "calc_reward", (instance.instance_id,), self._limits.timeout_s))
        except Exception as error:
            self._count(name, "errors")
            self._log(name, None, error)
        try:
            await self._call(name, "release", (instance.instance_id,), self._limits.timeout_s)
        except Exception as error:
            self._count(name, "errors")
            self._log(name, None, error)
        return [*instance.rewards, final]

    async def _call(self, name: str, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        tool = self._tools[name]
        kwargs = copy.deepcopy(self._row_kwargs.get(name, {}).get(f"{method}_kwargs", {}))
        if method == "create" and reads_nested_kwargs(type(tool)):
            kwargs = {**kwargs, "create_kwargs": dict(kwargs)}
        if method == "execute" and takes_agent_data(tool.execute):
            kwargs = {"agent_data": self.agent_data, **kwargs}
        code = user_code_of(tool, BaseTool, f"tool {name}")
        return await code.call(method, args, kwargs, timeout_s=timeout_s)

    def _finish(self, name: str, call_id: str, metric: str, answer: _Answer) -> ToolResult:
        limits, count_tokens = self._limits, self._executor.count_tokens
        text, cut = clean_text(answer.text, limits.max_response_tokens, limits.keep, count_tokens)
        if cut:
            self._count(metric, "truncated")
        media, dropped = split_media(answer.images, answer.videos, self._executor.media)
        self._count(metric, "media_dropped", sum(dropped))
        text = "\n".join(t for t in (text, media_note(*dropped)) if t)
        return ToolResult(
            name,
            call_id,
            f"<error>{text}</error>" if answer.failure else text,
            failure=answer.failure,
            step_reward=answer.step_reward,
            metrics=answer.metrics,
            media=media,
        )

    def _count(self, name: str, event: str, amount: float = 1.0) -> None:
        if amount:
            key = f"tools/{name}/{event}"
            self.counters[key] = self.counters.get(key, 0.0) + amount

    def _log(self, name: str, turn: int | None, error: Exception) -> None:
        when = "at its end" if turn is None else f"turn {turn}"
        wrapped = UserCodeError(f"tool {name!r} failed in trajectory {self.trajectory_id}, {when}: {error_text(error)}")
        wrapped.__cause__ = error
        # With its traceback once per tool and kind of error: a tool that is down fails thousands of times.
        first = self._executor.first_time(name, error)
        logger.log(logging.WARNING if first else logging.DEBUG, "%s", wrapped, exc_info=wrapped if first else None)


def _from_response(response: ToolResponse, reward: float = 0.0, metrics: dict[str, Any] | None = None) -> _Answer:
    return _Answer(
        response.text or "",
        step_reward=reward,
        metrics=metrics or {},
        images=list(response.image or []),
        videos=list(response.video or []),
    )


def _as_instance(created: Any, proposed: str) -> _Instance:
    opening = None
    if isinstance(created, tuple):
        if len(created) != 2 or not isinstance(created[1], ToolResponse | None):
            raise TypeError(f"create must return an id or (id, ToolResponse), got {value_text(created)}")
        created, opening = created
    if created is not None and not isinstance(created, str):
        raise TypeError(f"create must return a str id, got {value_text(created)}")
    return _Instance(created or proposed, None if opening is None or opening.is_empty() else opening)
