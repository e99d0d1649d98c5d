"""Conversations that are ready together share the event loop: a bounded piece of work in each of its passes."""

from __future__ import annotations

import asyncio
import time

import pytest

from verl_mt.extensions.cluster.loop_lag import LoopLag, p99_ms
from verl_mt.user_code import fair_turn

PIECE_S = 0.003


def work(seconds: float = PIECE_S) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


def test_the_loop_is_free_after_each_piece_of_work_and_turns_are_taken_in_order():
    order, passes = [], []

    async def conversation(number: int) -> None:
        await ready.wait()
        await fair_turn()
        order.append(number)
        passes.append(counted[0])

    async def count_passes() -> None:
        while True:
            counted[0] += 1
            await asyncio.sleep(0)

    async def go() -> None:
        conversations = [asyncio.ensure_future(conversation(k)) for k in range(50)]
        counter = asyncio.ensure_future(count_passes())
        await asyncio.sleep(0)
        ready.set()
        await asyncio.gather(*conversations)
        counter.cancel()

    counted, ready = [0], asyncio.Event()
    asyncio.run(go())
    assert order == list(range(50)) and len(set(passes)) == 50


def test_one_who_is_cancelled_or_fails_holds_nobody_up():
    done = []

    async def conversation(number: int) -> None:
        await fair_turn()
        done.append(number)
        if number == 1:
            raise ValueError

    async def go() -> None:
        tasks = [asyncio.ensure_future(conversation(k)) for k in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(conversation(7), 30)

    asyncio.run(go())
    assert done == [0, 1, 3, 4, 7]


def test_each_loop_has_turns_of_its_own():
    for _ in range(3):
        asyncio.run(fair_turn())


def lag_of(turns: bool) -> list[float]:
    """Lags while 100 conversations get their tools' results in the same moment."""

    async def conversation() -> None:
        await ready.wait()
        if turns:
            await fair_turn()
        work()

    async def go() -> list[float]:
        lag = LoopLag(lambda: True)
        watching = asyncio.ensure_future(lag.watch())
        conversations = [asyncio.ensure_future(conversation()) for _ in range(100)]
        await asyncio.sleep(0)
        ready.set()
        await asyncio.gather(*conversations)
        await asyncio.sleep(0.12)
        watching.cancel()
        return lag.take()

    ready = asyncio.Event()
    return asyncio.run(go())


@pytest.mark.slow
def test_the_lag_is_that_of_one_piece_and_not_of_all_of_them():
    # Wall clock: a busy machine may hold one of the two up. The work alone takes 0.3 s without turns.
    assert max(lag_of(turns=False)) > 80 * PIECE_S - 0.05
    assert min(max(lag_of(turns=True)) for _ in range(5)) < 30 * PIECE_S


@pytest.mark.slow
def test_a_loop_that_is_held_counts_as_late_for_all_of_that_time():
    async def go() -> tuple[list[float], list[float]]:
        busy = [False]
        lag = LoopLag(lambda: busy[0])
        watching = asyncio.ensure_future(lag.watch())
        await asyncio.sleep(0.12)
        idle = lag.take()
        busy[0] = True
        await asyncio.sleep(0.01)
        work(0.6)
        await asyncio.sleep(0.01)
        watching.cancel()
        return idle, lag.take()

    idle, held = asyncio.run(go())
    assert not idle and len(held) >= 8 and max(held) >= 0.5
    assert sorted(held)[len(held) // 2] == pytest.approx(max(held) / 2, abs=0.1)
    assert p99_ms([0.001] * 98 + [1.0] * 2) == 1000.0 and p99_ms([0.5]) == 500.0
