"""`RolloutStream`: plans that run beside their caller, and how their groups, errors and ends come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from verl_mt.data.dataset import DataRow
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream


def plan(name: str, size: int = 2) -> RolloutPlan:
    return RolloutPlan([Prompt(DataRow([], "d", index=k), [], [], [k]) for k in range(size)], 1, name)


def group(name: str) -> TrajectoryGroup:
    return TrajectoryGroup(name, name, [])


class Runner:
    """Finishes groups in the reverse order; what `wait` names stays until it is cancelled, what `fail` names raises."""

    tools = None
    progress = "own"

    def __init__(self):
        self.wait, self.fail, self.ran, self.ended = set(), {}, [], []
        self.begun = threading.Event()

    async def run(self, plan):
        self.ran.append((plan.name, plan.prompt_ids))
        try:
            for name in reversed(plan.prompt_ids):
                if name in self.fail:
                    raise self.fail[name]
                if name in self.wait:
                    self.begun.set()
                    await asyncio.sleep(1e6)
                yield group(name)
        finally:
            try:
                await asyncio.sleep(0)  # as an end that has something to wait for
            finally:
                self.ended.append(plan.name)


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def stream(runner) -> Iterator[RolloutStream]:
    made = RolloutStream(runner)
    yield made
    made.close()
    assert not made._thread.is_alive() and made._loop.is_closed()


def ids(groups) -> list[str]:
    return [found.prompt_id for found in groups]


def test_groups_of_a_plan_come_in_the_order_of_its_prompts(stream, runner):
    arrived, kept = [], []
    stream.arrived = lambda found: arrived.append(found.prompt_id)
    stream.keep = lambda of, found: kept.append((of.name, found.prompt_id, threading.current_thread().name))
    for name in ("a", "b"):
        stream.start(plan(name, 3))
        assert stream.started(name)
    assert ids(stream.collect("a")) == ["a.00000", "a.00001", "a.00002"]
    assert not stream.started("a") and stream.started("b")
    assert ids(stream.collect("b")) == ["b.00000", "b.00001", "b.00002"]
    assert [name for name in arrived if name[0] == "b"] == ["b.00002", "b.00001", "b.00000"] and len(arrived) == 6
    assert sorted(name for _, name, _ in kept) == sorted(arrived)
    assert {of for of, _, _ in kept} == {"a", "b"} and "rollout" not in {thread for _, _, thread in kept}


def test_groups_that_were_finished_before_are_not_rolled_out_again(stream, runner):
    before = [group("a.00001"), group("a.00000")]
    stream.start(plan("a", 3), before[:1])
    assert ids(stream.collect("a")) == ["a.00000", "a.00001", "a.00002"]
    stream.start(plan("a"), before)
    assert stream.collect("a") == before[::-1]
    stream.start(plan("none", 0))
    assert stream.collect("none") == []
    assert runner.ran == [("a", ["a.00000", "a.00002"])]


def test_what_is_chosen_of_all_plans_is_handed_over_and_the_rest_stays(stream, runner):
    runner.wait = {"b.00000"}
    stream.start(plan("a"))
    stream.start(plan("b"))
    waited = []

    def choose(finished):
        return [found for found in finished if found.prompt_id[-1] == "1"] if len(finished) == 3 else None

    assert ids(stream.collect_some(choose, lambda: waited.append(1))) == ["a.00001", "b.00001"]
    assert waited and stream.started("a") and stream.started("b")
    assert ids(stream.collect_some(lambda finished: list(finished))) == ["a.00000"] and not stream.started("a")
    assert stream.collect_some(lambda finished: [] if not finished else None) == []
    assert runner.begun.wait(60)
    stream.stop()
    assert runner.ended == ["a", "b"] and not stream.started("b")


def test_what_a_rollout_raises_is_raised_by_who_waits_for_it(stream, runner):
    runner.fail = {"bad.00000": RuntimeError("lost")}
    runner.wait = {"good.00000"}
    stream.start(plan("bad"))
    with pytest.raises(RuntimeError, match="lost"):
        stream.collect("bad")
    assert not stream.started("bad") and stream._finished == []
    stream.start(plan("bad"))
    stream.start(plan("good"))
    assert ids(
        stream.collect_some(lambda found: [g for g in found if g.prompt_id == "good.00001"] or None, of=("good",))
    )
    with pytest.raises(RuntimeError, match="lost"):
        stream.collect_some(lambda finished: None)


def test_what_waiting_raises_ends_the_plan(stream, runner):
    runner.wait = {"a.00000"}
    stream.start(plan("a"))
    assert runner.begun.wait(60)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.collect("a", interrupt)
    assert not stream.started("a")
    stream.call(asyncio.sleep(0))
    assert runner.ended == ["a"]


def test_groups_of_a_plan_that_was_given_up_are_nobodys(stream, runner):
    arrived = []
    stream.arrived = lambda found: arrived.append(found.prompt_id)
    stream.start(plan("a"))
    stream._running["a"].future.result()
    stream.stop()
    stream.start(plan("a", 1))
    assert ids(stream.collect("a")) == ["a.00000"] and arrived == ["a.00000"]
    assert runner.ran == [("a", ["a.00000", "a.00001"]), ("a", ["a.00000"])]


def test_a_call_returns_what_its_coroutine_returns_or_raises(stream):
    async def answer(value):
        await asyncio.sleep(0)
        if isinstance(value, BaseException):
            raise value
        return value, threading.current_thread().name

    waited = []
    assert stream.call(answer(3), lambda: waited.append(1)) == (3, "rollout") and waited
    for error in (ValueError("no"), TimeoutError("its own")):
        with pytest.raises(type(error), match=str(error)):
            stream.call(answer(error))


@pytest.mark.slow
def test_what_waiting_for_a_call_raises_cancels_it(stream):
    ended = []

    async def endless():
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("cancelled")

    turns = iter([None, None])

    def interrupt():
        if next(turns, "over") == "over":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.call(endless(), interrupt)
    stream.call(asyncio.sleep(0))
    assert ended == ["cancelled"]


def test_workers_take_the_runners_place(stream, runner):
    assert (stream.progress, stream.metrics()) == ("own", {})
    other, closed = Runner(), []

    async def close():
        closed.append("workers")

    other.progress, other.metrics, other.close = "workers", lambda: {"lost": 1.0}, close
    stream.pool = other
    assert (stream.progress, stream.metrics()) == ("workers", {"lost": 1.0})
    stream.start(plan("a", 1))
    assert ids(stream.collect("a")) == ["a.00000"]
    assert (other.ran, runner.ran) == ([("a", ["a.00000"])], [])
    stream.close()
    assert closed == ["workers"]


def test_closing_ends_plans_then_workers_then_tools_then_the_engine(runner):
    told = []

    def closes(name):
        async def close():
            told.append(name)

        return close

    stream = RolloutStream(runner)
    runner.tools, runner.wait = SimpleNamespace(close=closes("tools")), {"a.00001"}
    stream.start(plan("a"))
    assert runner.begun.wait(60)
    stream.pool = SimpleNamespace(close=closes("workers"))
    runner.ended = told
    stream.close(closes("engine"))
    assert told == ["a", "workers", "tools", "engine"] and not stream.started("a")
    assert not stream._thread.is_alive() and stream._loop.is_closed()
    stream.close(closes("engine"))
    assert len(told) == 4


def test_a_group_that_is_being_kept_is_kept_before_its_plan_ends(stream, runner):
    """The plan is given up while its first group is written; nothing is written after that."""
    begun, gate, kept = threading.Event(), threading.Event(), []

    def keep(of, found):
        begun.set()
        assert gate.wait(60)
        kept.append(found.prompt_id)

    stream.keep = keep
    stream.start(plan("a"))
    assert begun.wait(60)
    threading.Timer(0.05, gate.set).start()
    stream.stop()
    assert kept == ["a.00001"] and runner.ended == ["a"]


def test_an_error_behind_the_last_group_is_raised_too(stream, runner):
    gate = threading.Event()

    async def run(plan):
        for name in plan.prompt_ids:
            yield group(name)
        await asyncio.to_thread(gate.wait, 60)
        raise RuntimeError("at the end")

    runner.run = run
    stream.start(plan("a"))
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(RuntimeError, match="at the end"):
        stream.collect("a")
    assert not stream.started("a")


def test_waits_are_short_so_that_a_signal_is_handled(stream):
    waits = []

    class Waiting:
        def result(self, timeout):
            waits.append(timeout)
            return "made"

        def get(self, timeout):
            waits.append(timeout)
            return None, group("x")

        def empty(self):
            return True

    assert stream._wait(Waiting()) == "made"
    stream._arrivals, stream._running = Waiting(), {}
    with pytest.raises(AttributeError):
        stream._take_arrivals()
    assert waits == [0.2, 0.1] and stream._thread.daemon
