"""`rollout.on_update=finish_turn`: weights wait for turns, and turns for weights."""

from __future__ import annotations

import asyncio

from engine_models import PROMPT, request

from verl_mt.engines.base import InPlace
from verl_mt.engines.lock_step import WholeTurnsEngine
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn


def test_an_update_waits_for_turns_that_run_and_turns_that_are_asked_for_wait_for_it(run_async):
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

    run_async(go())


def test_a_turn_that_is_cancelled_or_fails_holds_nobody_up(run_async):
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

    run_async(go())
