"""`rollout.on_update=finish_turn`: weights wait for turns, and turns for weights; `restart`: nobody waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_models import PROMPT, request

from verl_mt.engines.base import InPlace
from verl_mt.engines.lock_step import OneVersionEngine, WholeTurnsEngine
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.errors import WeightsReplacedError


def test_an_update_waits_for_turns_that_run_and_turns_that_are_asked_for_wait_for_it(run_virtually):
    async def go():
        scripted = ScriptedEngine([ScriptedTurn([1, 2], latency_s=0.2), ScriptedTurn([3]), ScriptedTurn([4])])
        engine = WholeTurnsEngine(scripted)
        running = asyncio.ensure_future(engine.generate(request(PROMPT)))
        await asyncio.sleep(0.02)
        update = asyncio.ensure_future(engine.apply(InPlace(1)))
        await asyncio.sleep(0.02)
        asked = asyncio.ensure_future(engine.generate(request(PROMPT)))
        await asyncio.sleep(0.02)
        assert not scripted.updates and len(scripted.requests) == 1, "the turn runs; both others wait"
        outputs = [await running, await asked]
        await update
        assert [[span.version for span in output.version_spans] for output in outputs] == [[0], [1]]
        assert engine.version == 1 and engine.capabilities is scripted.capabilities

    run_virtually(go())


def test_an_engine_that_waits_for_weights_itself_may_have_them_before_its_turns_are_over(run_virtually):
    """As SGLang's that was lost while the policy was trained: without, turn and update would wait for each other."""

    class Lost(ScriptedEngine):
        def __init__(self):
            super().__init__([ScriptedTurn([1])])
            self.has_weights = asyncio.Event()

        async def generate(self, request):
            await self.has_weights.wait()
            return await super().generate(request)

        async def expect(self, update):
            self.has_weights.set()

    async def go():
        engine = WholeTurnsEngine(Lost())
        turn = asyncio.ensure_future(engine.generate(request(PROMPT)))
        await asyncio.sleep(0.02)
        await asyncio.wait_for(engine.apply(InPlace(1)), 5)
        return await turn

    assert run_virtually(go()).token_ids == [1]


def test_a_turn_that_is_cancelled_or_fails_holds_nobody_up(run_virtually):
    async def go():
        engine = WholeTurnsEngine(ScriptedEngine([ScriptedTurn([1], latency_s=60.0)], fail_at={2}))
        cancelled = asyncio.ensure_future(engine.generate(request(PROMPT)))
        await asyncio.sleep(0.02)
        update = asyncio.ensure_future(engine.apply(InPlace(1)))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        await asyncio.wait_for(update, 5)
        failed = await asyncio.gather(engine.generate(request(PROMPT)), return_exceptions=True)
        assert "scripted to fail" in str(failed[0])
        await asyncio.wait_for(engine.apply(InPlace(2)), 5)

    run_virtually(go())


def test_an_update_ends_the_turns_that_run_and_the_next_turn_of_whoever_has_sampled(run_virtually):
    async def go():
        turns = [ScriptedTurn([1]), ScriptedTurn([2], latency_s=60.0), ScriptedTurn([3]), ScriptedTurn([4])]
        engine = OneVersionEngine(ScriptedEngine(turns))
        of_a, of_b = (replace(request(PROMPT), session_id=name, request_id=f"{name}/0/1") for name in "ab")
        assert (await engine.generate(of_a)).token_ids == [1]
        running = asyncio.ensure_future(engine.generate(of_b))
        await asyncio.sleep(0.02)
        await asyncio.wait_for(engine.apply(InPlace(1)), 5)
        for turn in (running, engine.generate(of_a)):
            with pytest.raises(WeightsReplacedError, match="update 1 came"):
                await turn
        with pytest.raises(WeightsReplacedError):
            await engine.generate(of_a)  # whoever asks again all the same
        again = [replace(r, request_id=f"{r.session_id}/1/1") for r in (of_a, of_b)]
        assert [(await engine.generate(r)).token_ids for r in again] == [[3], [4]], "both begin again"

    run_virtually(go())


def test_whoever_is_cancelled_while_weights_come_is_cancelled(run_virtually):
    async def go():
        engine = OneVersionEngine(ScriptedEngine([ScriptedTurn([1], latency_s=60.0)]))
        running = asyncio.ensure_future(engine.generate(request(PROMPT)))
        await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait_for(engine.apply(InPlace(1)), 5)
        with pytest.raises(asyncio.CancelledError):
            await running

    run_virtually(go())
