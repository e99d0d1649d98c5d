"""The end of a rollout worker: what conversations hold is freed first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from verl_mt.extensions.cluster.rollout_workers.worker import Worker, _Run
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import _drain, _ended


def test_an_end_right_behind_a_cancel_does_not_break_into_what_frees():
    freed, said = [], []

    async def group() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            freed.append("environment")

    async def nothing() -> None:
        return

    async def life() -> None:
        worker = Worker.__new__(Worker)
        worker._send, worker._tasks, plan = said.append, set(), RolloutPlan([], 1, "p")
        worker._runner = SimpleNamespace(tools=None, context=SimpleNamespace(engine=SimpleNamespace(close=nothing)))
        task = worker._in_background(group())
        worker._plans = {"p": _Run(plan, {task})}
        await asyncio.sleep(0)
        worker.hear(("cancel", "p"))
        await asyncio.sleep(0.01)  # the group is in its `finally`, and somebody waits for it
        await worker.close()

    asyncio.run(life())
    assert freed == ["environment"]


def test_a_drain_while_a_plan_is_waited_for_does_not_break_into_what_frees():
    freed = []

    async def produce() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            freed.append("environment")

    async def life() -> None:
        task = asyncio.create_task(produce())
        await asyncio.sleep(0)
        task.cancel()
        waiting = asyncio.create_task(_ended([SimpleNamespace(task=task)]))
        await asyncio.sleep(0.01)
        await _drain()
        assert waiting.cancelled()

    asyncio.run(life())
    assert freed == ["environment"]
