"""Tool calls: failure classes, limits, deadlines, exact counts, one lifecycle per trajectory and tool."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hostile import EXCEPTIONS, deadline_only_for
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.config.rollout import MultiTurnConfig
from verl_mt.data.conversation import MalformedCall, ToolCall
from verl_mt.errors import DataError, EngineGoneError, ToolCallError
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.calculator import Calculator
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.limits import ConcurrencyLimit
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl_mt.tools.toolset import ToolSet
from verl_mt.user_code import UserCode


class Tool(BaseTool):
    """Does what `behave(parameters)` does and remembers its whole life."""

    def __init__(self, behave=lambda parameters: "ok", name: str = "tool", **own: Any):
        self.behave = behave
        self.life: list[tuple[str, str]] = []
        self.kwargs: dict[str, dict[str, Any]] = {}
        self.create_returns: Any = None
        self.__dict__.update(own)
        function = {"name": name, "parameters": {"type": "object", "properties": {}}}
        super().__init__({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))

    async def create(self, instance_id=None, **kwargs):
        self.life.append(("create", instance_id))
        self.kwargs["create"] = kwargs
        return self.create_returns or instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        self.life.append(("execute", instance_id))
        self.kwargs["execute"] = kwargs
        result = self.behave(parameters)
        return await result if asyncio.iscoroutine(result) else result

    async def calc_reward(self, instance_id, **kwargs):
        self.life.append(("calc_reward", instance_id))
        self.kwargs["calc_reward"] = kwargs
        return 2.0

    async def release(self, instance_id, **kwargs):
        self.life.append(("release", instance_id))
        self.kwargs["release"] = kwargs


def executor(*tools: BaseTool, **limits: Any) -> ToolExecutor:
    return ToolExecutor(ToolSet(tools), ToolLimits(**limits), list)


def calls(*arguments: dict[str, Any], name: str = "tool") -> list[ToolCall]:
    return [ToolCall(name, a, f"c{i}") for i, a in enumerate(arguments)]


def play(tools: ToolExecutor, *turns: list[Any], row: dict | None = None):
    """Run turns in one trajectory; returns (results, rewards, counters without seconds, session)."""

    async def main():
        session = tools.open("t", row)
        await session.start()
        results = [r for i, turn in enumerate(turns) for r in await session.run(turn, turn=i + 1)]
        rewards = await session.close()
        return results, rewards, session

    results, rewards, session = asyncio.run(main())
    counters = {k: v for k, v in session.counters.items() if not k.endswith("latency_s")}
    return results, rewards, counters, session


def test_the_model_s_mistakes_are_told_and_counted_apart_from_the_tool_s():
    def behave(parameters):
        if parameters.get("raise"):
            raise RuntimeError("backend is down")
        if parameters.get("teach"):
            raise ToolCallError("query must not be empty")
        return "fine"

    turn = [
        *calls({}, {"raise": 1}, {"teach": 1}),
        ToolCall("toool", {}, "c3"),
        MalformedCall("{bad", "not valid JSON", name="tool"),
        MalformedCall("???", "no name"),
    ]
    results, rewards, counters, _ = play(executor(Tool(behave)), turn)
    assert [r.failure for r in results] == [None, "tool", "model", "model", "model", "model"]
    assert [r.text for r in results] == [
        "fine",
        "<error>Tool failed: backend is down</error>",
        "<error>query must not be empty</error>",
        "<error>unknown tool 'toool'. Did you mean 'tool'? Available: tool.</error>",
        "<error>not valid JSON</error>",
        "<error>no name</error>",
    ]
    assert [r.call_id for r in results] == ["c0", "c1", "c2", "c3", "", ""]
    assert counters == {
        "tools/tool/calls": 4,
        "tools/tool/errors": 1,
        "tools/tool/model_errors": 2,
        "tools/unknown/calls": 2,
        "tools/unknown/model_errors": 2,
    }
    assert rewards == {"tool": [0.0, 2.0]}


def test_images_and_videos_of_a_tool_never_enter_the_message_of_a_text_model():
    def behave(parameters):
        media = {"image": [object()] * parameters["n"], "video": [object()]}
        return ToolResponse(text=parameters["text"], **media)

    tool = Tool(behave, create_returns=("i", ToolResponse(image=[object()])))
    limited = executor(tool, max_response_tokens=4)
    results, _, counters, _ = play(limited, calls({"n": 1, "text": "here"}), calls({"n": 2, "text": ""}))
    assert [result.to_message()["content"] for result in results] == [
        "here\n[2 images and 1 video cannot be shown: text only]",
        "[2 images and 1 video cannot be shown: text only]",
    ]
    assert counters == {"tools/tool/calls": 2, "tools/tool/media_dropped": 6}


def test_the_numbers_that_execute_returns_as_metrics_are_summed():
    def behave(parameters):
        return "ok", 0.0, parameters

    first = {
        "hits": 2,
        "cached": True,
        "calls": 5,
        "top k/score": 0.5,
        "engine": "bm25",
        "bad": float("nan"),
        "huge": 10**400,
    }
    results, _, counters, _ = play(executor(Tool(behave)), calls(first, {"hits": 1, "zero": 0}))
    assert results[0].metrics["engine"] == "bm25"
    assert counters == {
        "tools/tool/calls": 2,
        "tools/tool/hits": 3,
        "tools/tool/cached": 1,
        "tools/tool/metric_calls": 5,
        "tools/tool/top_k_score": 0.5,
        "tools/tool/zero": 0,
    }


def test_an_engine_that_is_gone_is_nobody_s_fault():
    def behave(parameters):
        raise EngineGoneError("judge engine died")

    results, _, counters, _ = play(executor(Tool(behave), retries=3), calls({}))
    assert results[0].failure == "infrastructure"
    assert counters == {"tools/tool/calls": 1, "tools/tool/errors": 1}


@pytest.mark.cap("C53")
def test_results_come_in_the_order_of_the_calls_and_one_failure_loses_no_other():
    async def behave(parameters):
        i = parameters["i"]
        await ended[i + 1].wait()
        ended[i].set()
        if i == 2:
            raise ValueError("no")
        return str(i), i / 10

    ended = [asyncio.Event() for _ in range(6)]  # the last call ends first
    ended[5].set()
    turn = calls(*({"i": i} for i in range(5)))
    results, rewards, _, _ = play(executor(Tool(behave)), turn)
    assert [r.text for r in results] == ["0", "1", "<error>Tool failed: no</error>", "3", "4"]
    assert rewards == {"tool": [0.0, 0.1, 0.3, 0.4, 2.0]}


@pytest.mark.slow
@pytest.mark.cap("C52")
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_limit_of_two_keeps_two_in_flight_across_trajectories(kind):
    running = peak = 0
    lock, threads, tasks = threading.Lock(), threading.Barrier(2), asyncio.Barrier(2)

    def enter(by):
        nonlocal running, peak
        with lock:
            running += by
            peak = max(peak, running)

    class Sync(Tool):
        def execute(self, instance_id, parameters, **kwargs):
            enter(1)
            threads.wait()  # two are in flight
            time.sleep(0.02)  # a third one would come now
            enter(-1)
            return "ok"

    async def behave(parameters):
        enter(1)
        await tasks.wait()
        await asyncio.sleep(0.02)
        enter(-1)
        return "ok"

    tools = executor(Sync() if kind == "sync" else Tool(behave), concurrency=2)

    async def main():
        sessions = [tools.open(str(i)) for i in range(3)]
        return await asyncio.gather(*(s.run(calls({}, {}), turn=1) for s in sessions))

    for _ in range(2):  # a second event loop has the same limit
        peak = 0
        assert all(r.text == "ok" for results in asyncio.run(main()) for r in results)
        assert peak == 2


def test_a_tool_may_take_its_own_limit_twice_without_a_deadlock():
    limit = ConcurrencyLimit(1)
    inside = 0

    async def behave(parameters):
        nonlocal inside
        async with limit.slot(), limit.slot():
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            inside -= 1
        return "ok"

    results, *_ = play(executor(Tool(behave)), calls({}, {}, {}))
    assert [r.text for r in results] == ["ok"] * 3


def test_a_tool_that_calls_itself_through_the_session_does_not_deadlock_at_limit_one():
    tool = Tool()
    tools = executor(Calculator({}), tool, concurrency=1)

    async def main():
        session = tools.open("t")

        async def behave(parameters):
            if parameters.get("depth"):
                return (await session.run(calls({}), turn=1))[0].text
            return "inner"

        tool.behave = behave
        tool.runs_inline = True
        return await session.run(calls({"depth": 1}), turn=1)

    assert [r.text for r in asyncio.run(main())] == ["inner"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async", "blocking_async"])
def test_a_sleeping_tool_blocks_nobody(kind):
    begun, over = threading.Event(), threading.Event()  # `over` is set by the loop that the tool must not block

    def blocking(parameters):
        begun.set()
        return "slept" if over.wait(60) else "the caller's loop stands still"

    class Sync(Tool):
        def execute(self, instance_id, parameters, **kwargs):
            return blocking(parameters)

    async def asleep(parameters):
        begun.set()
        while not over.is_set():
            await asyncio.sleep(0.001)
        return "slept"

    tool = {"sync": Sync(), "async": Tool(asleep), "blocking_async": Tool(blocking)}[kind]

    async def main():
        work = asyncio.create_task(executor(tool, timeout_s=600.0).open("t").run(calls({}), turn=1))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        over.set()
        return await work

    assert [r.text for r in asyncio.run(main())] == ["slept"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async", "blocking_async"])
def test_a_hanging_tool_is_the_tool_s_failure_and_the_next_call_works(kind, monkeypatch):
    forever = threading.Event()
    deadline_only_for(monkeypatch, lambda *args, **_: args[1:] == ({"hang": 1},))

    class Sync(Tool):
        def execute(self, instance_id, parameters, **kwargs):
            return forever.wait() if parameters.get("hang") else "ok"

    async def asleep(parameters):
        if parameters.get("hang"):
            await asyncio.sleep(1e6)
        return "ok"

    def blocking(parameters):
        return forever.wait() if parameters.get("hang") else "ok"

    tool = {"sync": Sync(), "async": Tool(asleep), "blocking_async": Tool(blocking)}[kind]
    try:
        results, _, counters, session = play(executor(tool, timeout_s=0.1), calls({"hang": 1}), calls({}))
    finally:
        forever.set()
    assert [r.failure for r in results] == ["tool", None]
    assert results[0].text == "<error>Tool failed: timed out after 0.1 s</error>"
    assert counters == {"tools/tool/calls": 2, "tools/tool/errors": 1, "tools/tool/timeouts": 1}
    assert session.counters["tools/tool/latency_s"] >= 0.1
    assert [(s.phase, s.name, s.turn) for s in session.time_spans] == [("tool", "tool", 1), ("tool", "tool", 2)]


@pytest.mark.slow
def test_retries_end_with_the_deadline_and_the_model_s_mistakes_are_not_retried(monkeypatch):
    seen: list[str] = []

    def behave(parameters):
        seen.append(parameters["kind"])
        if parameters["kind"] == "teach":
            raise ToolCallError("no")
        if parameters["kind"] == "down" or len(seen) < 2:
            raise OSError("down")
        return "up"

    results, _, counters, _ = play(executor(Tool(behave), retries=2), calls({"kind": "flaky"}))
    assert results[0].text == "up" and seen == ["flaky", "flaky"] and counters["tools/tool/retries"] == 1
    assert "tools/tool/errors" not in counters

    seen.clear()
    _, _, counters, _ = play(executor(Tool(behave), retries=2), calls({"kind": "teach"}))
    assert seen == ["teach"] and "tools/tool/retries" not in counters

    seen.clear()
    pauses, sleep = [], asyncio.sleep

    async def paused(seconds, *result):
        if seconds >= 0.1:  # shorter ones are of a late call, which asks its loop for an answer
            pauses.append(seconds)
        await sleep(0)

    # Only pauses take time. An attempt that misses its share of the deadline counts as one that raised.
    monkeypatch.setattr("verl_mt.tools.executor.time", SimpleNamespace(monotonic=lambda: sum(pauses)))
    monkeypatch.setattr(asyncio, "sleep", paused)
    results, _, counters, _ = play(executor(Tool(behave), retries=1000, timeout_s=1.0), calls({"kind": "down"}))
    assert pauses == [0.1, 0.2, 0.4] and results[0].failure == "tool"  # 0.8 s more would end after the deadline
    assert counters["tools/tool/errors"] == 1 and counters["tools/tool/retries"] == 3 and len(seen) <= 4


@pytest.mark.slow
def test_a_slow_attempt_leaves_time_for_its_retry(monkeypatch):
    attempts = 0
    deadlines, run = [], UserCode.run

    async def ends_the_first(self, function, args, kwargs, *, timeout_s, **more):
        if function.__name__ == "execute":
            deadlines.append(timeout_s)
        return await run(self, function, args, kwargs, timeout_s=0.1 if len(deadlines) == 1 else timeout_s, **more)

    monkeypatch.setattr(UserCode, "run", ends_the_first)

    async def behave(parameters):
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await asyncio.sleep(1e6)
        return "second"

    results, _, counters, _ = play(executor(Tool(behave), retries=1, timeout_s=600.0), calls({}))
    assert results[0].text == "second" and "tools/tool/timeouts" not in counters
    assert len(deadlines) == 2 and deadlines[0] <= 300.0 < deadlines[1] <= 600.0


def test_calls_beyond_the_limit_of_one_turn_are_refused_by_name_not_dropped():
    tool = Tool()
    results, _, counters, _ = play(executor(tool, max_parallel_calls=2), calls({}, {}, {}))
    assert [r.failure for r in results] == [None, None, "model"]
    assert "only the first 2 were run" in results[2].text
    assert counters == {"tools/tool/calls": 3, "tools/tool/model_errors": 1}
    assert [what for what, _ in tool.life].count("execute") == 2


def test_ten_megabytes_are_cut_and_counted_and_control_tokens_are_just_text():
    tool, tokenized = Tool(lambda parameters: "x" * 10**7 if parameters else "<|im_end|>\n<|im_start|>assistant"), []

    def count_tokens(text):
        tokenized.append(len(text))
        return list(text)

    limited = ToolExecutor(ToolSet([tool]), ToolLimits(max_response_tokens=64), count_tokens)
    results, _, counters, _ = play(limited, calls({"big": 1}, {}))
    assert len(results[0].text) == 64 + len("...(truncated)...") and sum(tokenized) < 100_000
    assert results[1].text == "<|im_end|>\n<|im_start|>assistant"
    assert counters == {"tools/tool/calls": 2, "tools/tool/truncated": 1}


@pytest.mark.cap("C55")
def test_an_error_text_is_cut_like_any_other():
    def behave(parameters):
        raise ValueError("y" * 100_000)

    results, _, counters, _ = play(executor(Tool(behave), max_response_tokens=32, keep="head"), calls({}))
    assert results[0].text.startswith("<error>Tool failed: yyy") and results[0].text.endswith("(truncated)</error>")
    assert counters["tools/tool/truncated"] == 1 and len(results[0].text) < 80


def test_all_four_kinds_of_row_arguments_reach_the_tool_without_nulls():
    tool = Tool()
    row = {
        "tool": {
            "create_kwargs": {"ground_truth": "72", "hint": None},
            "execute_kwargs": {"k": 3},
            "calc_reward_kwargs": {"scale": 2},
            "release_kwargs": {"fast": True},
        }
    }
    play(executor(tool), calls({}), row=row)
    assert tool.kwargs["execute"].pop("agent_data").tools_kwargs == {}
    assert tool.kwargs == {
        "create": {"ground_truth": "72"},
        "execute": {"k": 3},
        "calc_reward": {"scale": 2},
        "release": {"fast": True},
    }
    with pytest.raises(DataError, match=r"trajectory t: .*unknown tool"):
        play(executor(tool), row={"toool": {"create_kwargs": {"a": 1}}})


def test_row_arguments_also_come_nested_where_the_tool_reads_them_so():
    class Nested(Tool):
        async def create(self, instance_id=None, **kwargs):
            self.kwargs["create"] = kwargs
            return instance_id if "truth" in kwargs.get("create_kwargs", {}) else None

    tool = Nested()
    play(executor(tool), calls({}), row={"tool": {"create_kwargs": {"truth": "1"}}})
    assert tool.kwargs["create"] == {"truth": "1", "create_kwargs": {"truth": "1"}}


def test_one_instance_lives_through_all_turns_and_only_tools_that_were_used_have_one():
    used, unused = Tool(), Tool(name="unused")
    _, rewards, _, _ = play(executor(used, unused), calls({}, {}), calls({}))
    assert used.life == [
        ("create", "t/tool"),
        *[("execute", "t/tool")] * 3,
        ("calc_reward", "t/tool"),
        ("release", "t/tool"),
    ]
    assert unused.life == [] and rewards == {"tool": [0.0, 0.0, 0.0, 2.0]}


def test_create_at_the_start_where_the_row_has_arguments_and_its_id_and_response_are_used():
    tool = Tool(create_returns=("my-id", ToolResponse(text="You see a board.")))
    tools = executor(tool)

    async def main():
        session = tools.open("t", {"tool": {"create_kwargs": {"seed": 1}}})
        await session.start()
        assert tool.life == [("create", "t/tool")]
        results = [*await session.run(calls({}), turn=1), *await session.run(calls({}), turn=2)]
        await session.close()
        return results

    assert [r.text for r in asyncio.run(main())] == ["You see a board.\nok", "ok"]
    assert ("execute", "my-id") in tool.life and ("release", "my-id") in tool.life


def test_a_create_that_fails_at_the_start_is_told_at_the_first_call():
    class Fails(Tool):
        async def create(self, instance_id=None, **kwargs):
            raise ValueError("no ground truth")

    results, rewards, counters, _ = play(executor(Fails()), calls({}), row={"tool": {"create_kwargs": {"a": 1}}})
    assert results[0].text == "<error>Tool failed: no ground truth</error>" and rewards == {}
    assert counters == {"tools/tool/calls": 1, "tools/tool/errors": 2}


def test_a_row_s_own_set_of_tools_hides_the_others():
    tools = executor(Tool(), Tool(name="other"))

    async def main():
        session = tools.open("t", None, tools=tools.tools.for_row(tool_selection=["other"]))
        return await session.run(calls({}), turn=1)

    assert "tool 'tool' is not available here. Available: other" in asyncio.run(main())[0].text


def test_a_tool_cannot_change_the_arguments_in_the_messages():
    call = ToolCall("tool", {"list": [1]}, "c")
    play(executor(Tool(lambda parameters: parameters["list"].append(2) or "ok")), [call])
    assert call.arguments == {"list": [1]}


def test_limits_come_from_the_run_s_config():
    keys = {"tool_timeout_s": 3, "tool_retries": 1, "tool_concurrency": 7, "max_tool_response_tokens": 9}
    config = MultiTurnConfig(**keys, max_tool_calls=5)
    limits = ToolLimits.from_config(config)
    assert limits == ToolLimits(3, 1, 7, config.max_parallel_calls, 5, 9, "both")


HANGS: contextvars.ContextVar[bool] = contextvars.ContextVar("hangs", default=False)


def hangs(instance_id, *args, **kwargs):
    """Whether this call of a `Chaos` hangs; the caller's context is the call's."""
    chaos = Chaos.named[instance_id.partition("/")[2]] if args else None
    HANGS.set(chaos is not None and chaos.random.random() < 0.1)
    return HANGS.get()


class Chaos(Tool):
    """Fails at random places, in random ways."""

    named: dict[str, Chaos] = {}

    def __init__(self, seed: int, name: str):
        self.random = random.Random(seed)
        self.named[name] = self
        super().__init__(name=name)

    def _maybe(self, what: str) -> None:
        if self.random.random() < 0.3:
            raise self.random.choice([ValueError(what), SystemExit(1), ToolCallError(what), asyncio.CancelledError()])

    async def create(self, instance_id=None, **kwargs):
        self._maybe("create")
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        await super().execute(instance_id, parameters)
        self._maybe("execute")
        if HANGS.get():
            await asyncio.sleep(1e6)
        return self.random.choice(["ok", {"a": 1}, (), ("x", "bad reward"), None])

    async def calc_reward(self, instance_id, **kwargs):
        await super().calc_reward(instance_id)
        self._maybe("calc_reward")
        return 1.0

    async def release(self, instance_id, **kwargs):
        await super().release(instance_id)
        self._maybe("release")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 4), max_size=3), st.booleans())
def test_every_created_instance_is_scored_and_released_exactly_once_whatever_fails(seed, turns, cancel):
    tools = executor(Chaos(seed, "a"), Chaos(seed + 1, "b"), timeout_s=0.03)
    row = {"a": {"create_kwargs": {"x": 1}}} if seed % 2 else None
    chooser = random.Random(seed)

    async def main():
        session = tools.open("t", row)
        results = 0
        try:
            await session.start()
            for turn, n in enumerate(turns):
                batch = [ToolCall(chooser.choice("ab"), {}) for _ in range(n)]
                work = asyncio.create_task(session.run(batch, turn=turn))
                if cancel and turn == 1:
                    await asyncio.sleep(0)
                    work.cancel()
                results += len(await work)
        except asyncio.CancelledError:
            assert cancel
        finally:
            first, second = await asyncio.gather(session.close(), session.close())
            assert first == second
        counters = session.counters
        if not cancel:
            assert results == sum(turns) == sum(v for k, v in counters.items() if k.endswith("/calls"))
        return first

    with pytest.MonkeyPatch.context() as patch:
        deadline_only_for(patch, hangs)
        rewards = asyncio.run(main())
    for tool in tools.tools:
        assert isinstance(tool, Chaos)
        life = [what for what, _ in tool.life]
        created = life.count("create")
        assert created <= 1 and life.count("calc_reward") == life.count("release") == created
        assert not life or life[-2:] == ["calc_reward", "release"]
        assert (tool.name in rewards) == bool(created)


def test_a_tool_s_own_limits_hold_where_they_are_lower():
    tool = Tool(lambda parameters: asyncio.sleep(1e6), call_timeout_s=0.1, max_concurrency=1)
    limits = ToolLimits(timeout_s=3.0, concurrency=4)
    assert (limits.timeout_of(tool), limits.concurrency_of(tool)) == (0.1, 1)
    assert (ToolLimits(timeout_s=0.05).timeout_of(tool), limits.concurrency_of(Tool(max_concurrency=9))) == (0.05, 4)
    results, *_ = play(executor(tool, timeout_s=3.0), [ToolCall("tool", {}, "c")])
    assert results[0].text == "<error>Tool failed: timed out after 0.1 s</error>"


@pytest.mark.cap("C88")
def test_a_budget_counts_the_calls_of_a_trajectory_in_their_order():
    tool = Tool(lambda parameters: "ok")

    async def main():
        session = executor(tool, max_calls=3).open("t")
        first = await session.run([*calls({}), MalformedCall("broken", "not JSON")], turn=1)
        told = session.budget_spent
        second = await session.run(calls({}, {}, {}), turn=2)
        await session.close()
        return first, told, second, session

    first, told, second, session = asyncio.run(main())
    assert not told and session.budget_spent
    assert [r.failure for r in first + second] == [None, "model", None, "model", "model"]
    assert second[1].text == "<error>not run: all 3 tool calls of this conversation are used up; answer without</error>"
    assert session.counters["tools/tool/calls"] == 4 and session.counters["tools/tool/over_budget"] == 2
    assert session.counters["tools/unknown/model_errors"] == 1 and "tools/tool/model_errors" not in session.counters
    assert [kind for kind, _ in tool.life].count("execute") == 2


def test_every_tool_is_closed_once_when_the_run_is_over_and_a_failure_stops_no_other():
    closed = []

    class Closing(Tool):
        async def close(self):
            closed.append(self.name)
            if self.name == "bad":
                raise ValueError("no")

    asyncio.run(executor(Closing(name="bad"), Closing(name="good"), Tool()).close())
    assert sorted(closed) == ["bad", "good"]


def test_every_call_leaves_a_row_with_whose_fault_a_failure_was():
    def behave(parameters):
        if parameters.get("broken"):
            raise RuntimeError("down")
        return "ok", 0.5

    bad = MalformedCall('{"name": "tool", ', "not valid JSON", "tool")
    began = time.monotonic()
    _, _, _, session = play(executor(Tool(behave)), [*calls({"x": 1}, {"broken": True}), bad], calls({}, name="nobody"))
    all_s = time.monotonic() - began
    rows = session.calls
    assert [(r["turn"], r["name"], r["arguments"], r["failure"], r["step_reward"]) for r in rows] == [
        (1, "tool", {"x": 1}, None, 0.5),
        (1, "tool", {"broken": True}, "tool", 0.0),
        (1, "tool", None, "model", 0.0),
        (2, "nobody", {}, "model", 0.0),
    ]
    assert rows[2]["written"] == bad.text
    assert all(0 <= r["latency_s"] <= all_s for r in rows)


@pytest.mark.parametrize("name", EXCEPTIONS)
@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
def test_whatever_a_tool_raises_is_counted_fed_back_and_logged_once(method, name, caplog):
    async def wrong(*args, **kwargs):
        raise EXCEPTIONS[name]

    tool = Tool()
    setattr(tool, method, wrong)
    results, rewards, counters, _ = play(executor(tool, Tool(name="other")), calls({}), calls({}, name="other"))
    assert results[1].text == "ok" and rewards["other"] == [0.0, 2.0]
    assert counters["tools/tool/errors"] == 1 and "tools/other/errors" not in counters
    told = method in ("create", "execute")
    assert results[0].text == "ok" if not told else results[0].failure == "tool" and name in results[0].text
    assert caplog.text.count("Traceback") >= 1 and "Logging error" not in caplog.text
    if method != "create":
        assert [what for what, _ in tool.life] == [
            m for m in ("create", "execute", "calc_reward", "release") if m != method
        ]


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_whatever_the_close_of_a_tool_raises_stops_no_other(name):
    closed = []

    async def close():
        closed.append("other")

    async def wrong():
        raise EXCEPTIONS[name]

    asyncio.run(executor(Tool(close=wrong), Tool(close=close, name="other")).close())
    assert closed == ["other"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["execute", "release"])
def test_of_nine_calls_of_which_one_blocks_in_async_code_eight_are_counted_as_blocked(method, monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._GRACE_S", 0.1)
    tool, begun, over = Tool(), [], threading.Event()

    async def blocks(instance_id, *args, **kwargs):
        begun.append(instance_id)
        while len(begun) < 9:
            await asyncio.sleep(0.001)
        if instance_id == "2/tool":
            over.wait(60)
        await asyncio.sleep(1e6)

    setattr(tool, method, blocks)
    tools = executor(tool, timeout_s=2.0)

    async def one(number):
        session = tools.open(str(number))
        results = await session.run(calls({}), turn=1)
        await session.close()
        return results[0].text, [
            session.counters.get(f"tools/tool/{e}", 0) for e in ("errors", "timeouts", "loop_blocked")
        ]

    async def main():
        return await asyncio.gather(*map(one, range(9)))

    found = asyncio.run(main())
    over.set()
    if method == "execute":
        assert {text for text, _ in found} == {"<error>Tool failed: timed out after 2 s</error>"}
        assert [counts for _, counts in found] == [[1, 1, 0 if n == 2 else 1] for n in range(9)]
    else:
        assert found == [("ok", [1, 0, 0])] * 9
    assert sorted(begun) == [f"{n}/tool" for n in range(9)], "none is made twice"


@pytest.mark.parametrize("value", [1e39, -1e308, 1e16, float("nan")])
def test_a_reward_that_spoils_sums_of_float32_is_the_tool_s_error(value):
    results, rewards, counters, _ = play(executor(Tool(lambda parameters: ("ok", value, {}))), calls({}))
    assert results[0].failure == "tool" and "finite" in results[0].text
    assert rewards == {"tool": [2.0]} and counters["tools/tool/errors"] == 1


def test_a_turn_that_is_cancelled_before_it_begins_leaves_nothing_unawaited(recwarn):
    async def main():
        session = executor(Tool()).open("t")
        work = asyncio.create_task(session.run(calls({}, {}), turn=1))
        await asyncio.sleep(0)  # `run` has made its tasks, and none of them has begun
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert await session.close() == {}

    asyncio.run(main())
    gc.collect()
    assert not [w for w in recwarn if "never awaited" in str(w.message)]
