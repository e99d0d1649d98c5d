"""The scripted engine replays, records and fails as told."""

from __future__ import annotations

import asyncio

import pytest
from engine_models import request

from verl_mt.data.requests import VersionSpan
from verl_mt.engines.base import Disk, InPlace
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.errors import EngineError, EngineGoneError


def test_turns_are_replayed_in_order_and_requests_recorded(run_virtually):
    async def go():
        engine = ScriptedEngine([([1, 2], "ab", "stop", [-0.5, -0.25]), ScriptedTurn([3], "c", "length")])
        first = await engine.generate(request([9, 8], "s"))
        second = await engine.generate(request([9, 8, 1, 2, 7], "s"))
        assert (first.token_ids, first.log_probs, first.text) == ([1, 2], [-0.5, -0.25], "ab")
        assert (second.token_ids, second.log_probs, second.finish_reason) == ([3], [0.0], "length")
        assert (first.cached_tokens, second.cached_tokens) == (0, 4)
        assert [r.input_ids for r in engine.requests] == [[9, 8], [9, 8, 1, 2, 7]]
        with pytest.raises(EngineError, match=r"ran out: it has 2 turn\(s\), and request 3"):
            await engine.generate(request([9], "s"))

    run_virtually(go())


def test_scripts_by_session_by_prompt_and_by_function(run_virtually):
    async def go():
        engine = ScriptedEngine({"a": [([1],), ([2],)], (7, 7): [([3],), ([4],)]})
        asks = [request([0], "a"), request([7, 7], "x"), request([0, 1, 5], "a"), request([7, 7, 3, 5], "x")]
        assert [(await engine.generate(a)).token_ids for a in asks] == [[1], [3], [2], [4]]
        with pytest.raises(EngineError, match=r"no turns for session 'b' nor for its prompt \(0,\)"):
            await engine.generate(request([0], "b"))
        echo = ScriptedEngine(lambda asked: (asked.input_ids[::-1],))
        assert (await echo.generate(request([1, 2]))).token_ids == [2, 1]

    run_virtually(go())


def test_text_only_mode_withholds_ids(run_virtually):
    async def go():
        engine = ScriptedEngine([([1], "hello"), (None, "again"), ([1],)], returns_token_ids=False)
        assert not engine.capabilities.returns_token_ids
        for text in ("hello", "again"):
            output = await engine.generate(request([0]))
            assert (output.token_ids, output.log_probs, output.text) == (None, None, text)
        with pytest.raises(EngineError, match="no text"):
            await engine.generate(request([0]))

    run_virtually(go())


def test_limits_cut_a_scripted_turn_as_they_would_cut_a_sampled_one(run_virtually):
    async def go():
        engine = ScriptedEngine(
            lambda asked: ([1, 2, 3, 4], "1234", "stop", [-1.0] * 4), decode=lambda i: "".join(map(str, i))
        )
        short = await engine.generate(request([0], max_new_tokens=2))
        assert (short.token_ids, short.text, short.finish_reason, len(short.log_probs)) == ([1, 2], "12", "length", 2)
        by_id = await engine.generate(request([0], stop_token_ids=(3,)))
        by_text = await engine.generate(request([0], stop=("23",)))
        assert by_id.token_ids == by_text.token_ids == [1, 2, 3]
        assert (await engine.generate(request([0], max_new_tokens=4))).finish_reason == "stop"

    run_virtually(go())


@pytest.mark.slow
@pytest.mark.cap("C14")
def test_each_turn_takes_its_own_time(run_virtually):
    async def go():
        engine = ScriptedEngine(
            [ScriptedTurn([1], latency_s=2.0), ScriptedTurn([2]), ScriptedTurn([3])], latency_s=0.01
        )
        start = asyncio.get_running_loop().time()
        slow = asyncio.ensure_future(engine.generate(request([0])))
        await asyncio.sleep(0)
        await asyncio.gather(engine.generate(request([0])), engine.generate(request([0])))
        assert asyncio.get_running_loop().time() - start == pytest.approx(0.01) and not slow.done()
        assert (await slow).token_ids == [1]
        assert asyncio.get_running_loop().time() - start == pytest.approx(2.01)

    run_virtually(go())


@pytest.mark.slow
@pytest.mark.cap("C56")
def test_abort_and_deadline_keep_the_share_that_was_sampled(run_virtually):
    async def go():
        engine = ScriptedEngine(lambda asked: ScriptedTurn(list(range(10)), latency_s=0.4))
        late = await engine.generate(request([0], max_new_tokens=10, deadline_s=0.22))
        ask = request([0], max_new_tokens=10)
        task = asyncio.ensure_future(engine.generate(ask))
        await asyncio.sleep(0.22)
        await engine.abort(ask.request_id)
        await engine.abort("unknown")
        aborted = await task
        for output in (late, aborted):
            assert output.finish_reason == "abort"
            assert len(output.token_ids) == len(output.log_probs) == 5
            assert output.version_spans == [VersionSpan(0, len(output.token_ids))]

    run_virtually(go())


def test_pause_holds_turns_back_until_resume(run_virtually):
    async def go():
        engine = ScriptedEngine([([1],), ([2],)])
        await engine.pause()
        task = asyncio.ensure_future(engine.generate(request([0])))
        await asyncio.sleep(0.02)
        assert not task.done()
        await engine.resume()
        assert (await task).finish_reason == "stop"
        await engine.pause()
        task = asyncio.ensure_future(engine.generate(request([0])))
        await asyncio.sleep(0)
        await engine.pause("abort")
        assert (await task).finish_reason == "abort"

    run_virtually(go())


def test_failures_are_injected_and_use_up_no_turn(run_virtually):
    async def go():
        engine = ScriptedEngine([([1],), ([2],)], fail_at={2})
        assert (await engine.generate(request([0]))).token_ids == [1]
        with pytest.raises(EngineGoneError, match="request 2"):
            await engine.generate(request([0]))
        assert (await engine.generate(request([0]))).token_ids == [2]

    run_virtually(go())


def test_versions_sessions_and_close(run_virtually):
    async def go():
        spans = [VersionSpan(3, 1), VersionSpan(4, 1)]
        engine = ScriptedEngine([([1, 2],), ScriptedTurn([1, 2], version_spans=spans), ([1],)], version=3)
        assert (await engine.generate(request([0]))).version_spans == [VersionSpan(3, 2)]
        assert (await engine.generate(request([0]))).version_spans == spans
        for update in (InPlace(4), Disk(5, "folder")):
            await engine.apply(update)
        assert engine.version == 5 and len(engine.updates) == 2
        engine.open_session("s", 0)
        engine.close_session("s")
        assert (engine.opened, engine.closed) == (["s"], ["s"])
        await engine.pause()
        task = asyncio.ensure_future(engine.generate(request([0])))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineGoneError, match="closed"):
            await task
        with pytest.raises(EngineGoneError, match="closed"):
            await engine.generate(request([0]))

    run_virtually(go())


def test_a_turn_that_does_not_fit_together_is_refused(run_virtually):
    async def go():
        engine = ScriptedEngine([([1, 2], "x", "stop", [-1.0]), (None, "x"), ([1],)])
        with pytest.raises(EngineError, match="2 token_ids and 1 log_probs"):
            await engine.generate(request([0]))
        with pytest.raises(EngineError, match="no token_ids"):
            await engine.generate(request([0]))
        with pytest.raises(EngineError, match=r"ScriptedEngine\(decode="):
            await engine.generate(request([0], stop=("x",)))

    run_virtually(go())
