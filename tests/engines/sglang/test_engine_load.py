"""How many requests a replica gets at once, and how long one may go without a token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_models import request
from fake_client import FakeClient, FakeEngine, answer, until

from verl_mt.errors import EngineGoneError
from verl_mt.extensions.cluster.replicas.load import Seats
from verl_mt.extensions.cluster.sglang import engine as engine_module
from verl_mt.extensions.cluster.sglang.options import SGLangOptions


@pytest.fixture(autouse=True)
def no_sglang_needed(monkeypatch):
    monkeypatch.setattr(engine_module, "require_sglang", lambda: None)


class Held(FakeClient):
    """Answers when it is told to, and says how many tokens it has sampled."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked: list[list[int]] = []
        self.go, self.tokens, self.looks = asyncio.Semaphore(0), 0, 0

    async def generate(self, body):
        if body["sampling_params"]["max_new_tokens"] == 0:  # the prompt of the first, ahead of all
            return answer([], "length")
        self.asked.append(body["input_ids"])
        go, aborted = asyncio.ensure_future(self.go.acquire()), self.aborts.setdefault(body["rid"], asyncio.Event())
        ended = asyncio.ensure_future(aborted.wait())
        await asyncio.wait({go, ended}, return_when=asyncio.FIRST_COMPLETED)
        cut = not go.done()
        for task in (go, ended):
            task.cancel()
        return answer([7], "abort") if cut else answer([3], "stop", matched=3)

    async def progress(self):
        self.looks += 1
        return self.tokens


def held_engine(num_replicas: int = 1) -> FakeEngine:
    options = SGLangOptions("verl_mt://tiny", 100, end_token_ids=frozenset({3}), timeout_s=600.0, max_num_seqs=4)
    return FakeEngine(lambda body: None, options=options, make=Held, num_replicas=num_replicas)


def test_a_replica_gets_a_quarter_more_than_it_decodes_and_turns_of_begun_conversations_come_first(run_async):
    async def go():
        engine = held_engine()
        await engine.start()
        (client,) = engine.lives
        for k in range(8):
            engine.open_session(f"new{k}", k)
        # Prompts that differ: none waits for the other's prefill.
        tasks = [asyncio.ensure_future(engine.generate(request([10 + k], f"new{k}"))) for k in range(8)]
        await until(lambda: len(client.asked) == 5)
        await asyncio.sleep(0.05)
        assert len(client.asked) == 5
        begun = asyncio.ensure_future(engine.generate(request([99], "begun")))
        await asyncio.sleep(0)
        client.go.release()
        await until(lambda: len(client.asked) == 6)
        assert client.asked[-1] == [99]
        for _ in range(8):
            client.go.release()
        outputs = await asyncio.gather(*tasks, begun)
        assert len(client.asked) == 9 and all(output.finish_reason == "stop" for output in outputs)
        # The time without a seat is told as time in the queue.
        assert outputs[7].timings.queue_s >= 0.04 > outputs[0].timings.queue_s
        await engine.close()

    run_async(go())


def test_one_that_waits_for_a_seat_ends_at_its_deadline_at_an_abort_and_when_the_engine_closes(run_async):
    async def go():
        engine = held_engine()
        await engine.start()
        (client,) = engine.lives
        running = [asyncio.ensure_future(engine.generate(request([10 + k], f"r{k}"))) for k in range(5)]
        await until(lambda: len(client.asked) == 5)
        late = await engine.generate(request([50], "late", deadline_s=0.05))
        assert (late.finish_reason, late.token_ids) == ("abort", [])
        aborted = asyncio.ensure_future(engine.generate(ask := request([51], "aborted")))
        await asyncio.sleep(0.01)
        await engine.abort(ask.request_id)
        assert (await aborted).finish_reason == "abort"
        waits = asyncio.ensure_future(engine.generate(request([52], "waits")))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineGoneError, match="closed"):
            await waits
        assert len(client.asked) == 5
        for task in running:
            task.cancel()

    run_async(go())


def test_a_cancelled_request_gives_its_seat_back(run_async):
    async def go():
        seats = Seats(4)
        assert seats.number == 5
        taken = [seats.one(begins=False) for _ in range(5)]
        for seat in taken:
            assert seat.__enter__().done()
        with seats.one(begins=True) as first, seats.one(begins=False) as second:
            assert not first.done() and not second.done() and seats.num_waiting == 2
            taken[0].__exit__(None, None, None)
            assert second.done() and not first.done()
        with seats.one(begins=True) as third:
            assert third.done() and seats.num_waiting == 0

    run_async(go())


def patient(limit_s: float = float("inf"), patience_s: float = 0.2):
    return replace(request([5]), deadline_s=patience_s, limit_s=limit_s)


@pytest.mark.slow
def test_a_request_goes_on_as_long_as_its_engine_samples_and_ends_when_it_does_not(run_async):
    async def go():
        engine = held_engine()
        await engine.start()
        (client,) = engine.lives
        long = asyncio.ensure_future(engine.generate(patient()))
        begun = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - begun < 1.0:
            await asyncio.sleep(0.02)
            client.tokens += 1
        assert not long.done() and client.looks >= 4
        output = await long
        assert (output.finish_reason, output.token_ids) == ("abort", [7])
        await engine.close()

    run_async(go())


@pytest.mark.slow
def test_answers_to_others_are_progress_too_and_the_limit_of_the_conversation_stands(run_async):
    async def go():
        engine = held_engine()
        await engine.start()
        (client,) = engine.lives
        long = asyncio.ensure_future(engine.generate(patient()))
        limited = asyncio.ensure_future(engine.generate(patient(limit_s=0.5)))
        await until(lambda: len(client.asked) == 2)
        for number in range(14):
            await asyncio.sleep(0.05)
            engine._replicas[0].progress.made()
            assert (not long.done() and limited.done() == (number >= 10)) or number in (8, 9, 10, 11)
        assert limited.done() and (await limited).finish_reason == "abort"
        client.go.release()
        assert (await long).finish_reason == "stop"
        await engine.close()

    run_async(go())


def test_an_engine_that_is_slow_to_tell_of_its_progress_keeps_nobody_from_an_answer(run_async):
    class Slow(Held):
        async def progress(self):
            self.looks += 1
            await asyncio.sleep(60.0)

    async def go():
        options = SGLangOptions("verl_mt://tiny", 100, end_token_ids=frozenset({3}), timeout_s=600.0)
        engine = FakeEngine(lambda body: None, options=options, make=Slow)
        await engine.start()
        (client,) = engine.lives
        one = asyncio.ensure_future(engine.generate(patient()))
        await until(lambda: client.looks)
        client.go.release()
        assert (await asyncio.wait_for(one, 5.0)).finish_reason == "stop"
        await engine.close()

    run_async(go())


@pytest.mark.slow
def test_an_abort_of_the_engines_own_is_no_deadline_however_long_the_turn_was(run_async):
    async def go():
        engine = held_engine()
        await engine.start()
        (client,) = engine.lives
        long = asyncio.ensure_future(engine.generate(patient()))
        for _ in range(15):
            await asyncio.sleep(0.02)
            client.tokens += 1
        (stopped,) = client.aborts.values()
        stopped.set()  # as an engine does that is shut down by somebody
        with pytest.raises(EngineGoneError, match="aborted request"):
            await long
        await engine.close()

    run_async(go())


@pytest.mark.slow
def test_without_a_limit_a_deadline_counts_from_the_request(run_async):
    async def go():
        engine = held_engine()
        await engine.start()
        (client,) = engine.lives
        one = asyncio.ensure_future(engine.generate(request([5], deadline_s=0.2)))
        begun = asyncio.get_running_loop().time()
        while not one.done():
            await asyncio.sleep(0.02)
            client.tokens += 1
        assert one.result().finish_reason == "abort" and asyncio.get_running_loop().time() - begun < 5
        await engine.close()

    run_async(go())
