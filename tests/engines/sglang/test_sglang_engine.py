"""The engine's logic over clients on paper: limits, pauses, deaths, updates."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_models import request
from fake_client import FakeClient, FakeEngine, answer, until

from verl_mt.engines.base import Disk, InPlace, TensorBuckets
from verl_mt.errors import ConfigError, EngineError, EngineGoneError
from verl_mt.extensions.cluster.replicas import engine as replicated
from verl_mt.extensions.cluster.replicas import replica as replica_module
from verl_mt.extensions.cluster.replicas.model_shape import ModelShape, model_shape
from verl_mt.extensions.cluster.sglang import engine as engine_module
from verl_mt.modeling.load import load_causal_lm
from verl_mt.modeling.weights import named_weights
from verl_mt.workers.weight_sync import weight_update_for

pytestmark = pytest.mark.slow  # published templates, commands, many configurations


@pytest.fixture(autouse=True)
def no_sglang_needed(monkeypatch):
    monkeypatch.setattr(engine_module, "require_sglang", lambda: None)


@pytest.fixture(scope="module")
def tiny():
    return load_causal_lm("verl_mt://tiny")


def stop_at_once(body):
    return answer([3], "stop", matched=3)


def never(body):
    return None


def test_one_request_one_answer(run_async):
    async def go():
        engine = FakeEngine(stop_at_once)
        output = await engine.generate(request([5, 6]))
        await engine.close()
        assert (output.token_ids, output.finish_reason, output.log_probs) == ([3], "stop", [-0.25])
        assert engine.names() == ["start", "generate"]

    run_async(go())


def test_abort_and_deadline_keep_what_was_sampled(run_async):
    async def go():
        engine = FakeEngine(never)
        ask = request([5])
        task = asyncio.ensure_future(engine.generate(ask))
        await until(lambda: engine.names().count("generate") == 1)
        await engine.abort(ask.request_id)
        await engine.abort("unknown")
        outputs = [await task, await engine.generate(request([5], deadline_s=0.3))]
        assert [(o.finish_reason, o.token_ids) for o in outputs] == [("abort", [7, 8])] * 2
        await engine.close()

    run_async(go())


def test_in_a_pause_nothing_is_asked_a_deadline_still_ends_a_request_and_resume_lets_all_go(run_async):
    async def go():
        engine = FakeEngine(stop_at_once)
        await engine.pause("in_place")
        late = asyncio.ensure_future(engine.generate(request([5])))
        short = await engine.generate(request([6], deadline_s=0.05))
        assert (short.finish_reason, short.token_ids, short.version_spans) == ("abort", [], [])
        assert "generate" not in engine.names() and not late.done()
        await engine.resume()
        assert (await late).finish_reason == "stop"
        with pytest.raises(EngineError, match="unknown mode 'later'"):
            await engine.pause("later")
        await engine.close()

    run_async(go())


def test_pause_abort_ends_all_turns(run_async):
    async def go():
        engine = FakeEngine(never)
        tasks = [asyncio.ensure_future(engine.generate(request([5 + i]))) for i in range(3)]
        await until(lambda: engine.names().count("generate") == 3)
        await engine.pause("abort")
        assert [(await t).finish_reason for t in tasks] == ["abort"] * 3
        await engine.close()

    run_async(go())


def test_a_cancelled_caller_ends_its_request(run_async):
    async def go():
        engine = FakeEngine(never)
        task = asyncio.ensure_future(engine.generate(request([5])))
        await until(lambda: "generate" in engine.names())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: engine.names()[-1] == "abort_request")
        await engine.close()

    run_async(go())


def test_close_ends_waiting_requests_and_is_idempotent(run_async):
    async def go():
        engine = FakeEngine(never)
        running = asyncio.ensure_future(engine.generate(request([5])))
        await until(lambda: "generate" in engine.names())
        await engine.pause()
        held = asyncio.ensure_future(engine.generate(request([6])))
        await until(lambda: len(engine._live) == 2)
        await engine.close()
        await engine.close()
        for task in (running, held):
            with pytest.raises(EngineGoneError):
                await task
        with pytest.raises(EngineGoneError, match="closed"):
            await engine.generate(request([7]))

    run_async(go())


def test_a_request_id_that_is_in_use_is_refused(run_async):
    async def go():
        engine = FakeEngine(never)
        ask = request([5])
        first = asyncio.ensure_future(engine.generate(ask))
        await until(lambda: "generate" in engine.names())
        with pytest.raises(EngineError, match="must be unique"):
            await engine.generate(ask)
        await engine.abort(ask.request_id)
        assert (await first).finish_reason == "abort"
        await engine.close()

    run_async(go())


def test_an_update_is_one_sequence_of_calls_and_every_weight_travels_once(run_async, tiny):
    async def go():
        engine = FakeEngine(stop_at_once)
        await engine.apply(weight_update_for(engine.capabilities, tiny, 7))
        assert engine.names() == [
            "start",
            "pause_generation",
            "begin_weight_update",
            "update_weights_from_tensor",
            "end_weight_update",
            "continue_generation",
        ]
        body = engine.calls[3][1]
        assert (body["weight_version"], body["flush_cache"], body["load_format"]) == ("7", True, "flattened_bucket")
        assert engine.version == 7
        await engine.close()

    run_async(go())


def test_only_the_last_of_many_buckets_flushes_the_cache_and_names_the_version(run_async, tiny):
    async def go():
        engine = FakeEngine(stop_at_once)
        await engine.apply(TensorBuckets(2, named_weights(tiny), bucket_bytes=1_000_000))
        bodies = [body for name, body in engine.calls if name == "update_weights_from_tensor"]
        assert len(bodies) > 2
        assert [b["flush_cache"] for b in bodies] == [False] * (len(bodies) - 1) + [True]
        assert ["weight_version" in b for b in bodies] == [False] * (len(bodies) - 1) + [True]
        await engine.close()

    run_async(go())


def test_an_update_in_a_pause_stays_paused(run_async, tiny):
    async def go():
        engine = FakeEngine(stop_at_once)
        await engine.pause("in_place")
        await engine.apply(weight_update_for(engine.capabilities, tiny, 1))
        assert "continue_generation" not in engine.names()
        await engine.resume()
        assert engine.names()[-1] == "continue_generation"
        await engine.close()

    run_async(go())


def test_tied_embeddings_travel_once_and_the_expected_names_are_those_of_the_checkpoint(tiny):
    names = [name for name, _ in named_weights(tiny)]
    assert len(names) == len(set(names)) and "lm_head.weight" not in names
    shape = model_shape("verl_mt://tiny")
    assert set(names) == set(shape.weights) and shape.vocab_size == tiny.config.vocab_size


def test_wrong_weights_are_refused_before_anything_is_called(run_async, tiny):
    async def go():
        engine = FakeEngine(stop_at_once)
        good = dict(named_weights(tiny))
        name = next(iter(good))
        wrong = [
            {**good, name: torch.zeros(3)},
            {**good, "model.unknown": torch.zeros(3)},
            {n: t for n, t in good.items() if n != name},
        ]
        for weights in wrong:
            with pytest.raises(EngineError, match="weight update"):
                await engine.apply(TensorBuckets(1, weights.items()))
        with pytest.raises(EngineError, match="takes FromRanks, TensorBuckets and Disk updates, got InPlace"):
            await engine.apply(InPlace(1))
        assert (engine.version, engine.names()) == (0, ["start"])
        await engine.close()

    run_async(go())


def test_a_streamed_update_is_looked_at_once_and_one_that_breaks_off_leaves_no_engine_with_half_of_it(run_async, tiny):
    async def go():
        engine = FakeEngine(stop_at_once)
        good = dict(named_weights(tiny))
        await engine.apply(TensorBuckets(1, good.items()))
        passes = []

        class Stream:
            def __init__(self, weights):
                self.weights = weights

            def __iter__(self):
                passes.append(1)
                return iter(self.weights.items())

        await engine.apply(TensorBuckets(2, Stream(good), streamed=True))
        assert len(passes) == 1 and engine.version == 2
        del engine.calls[:]
        last = list(good)[-1]
        with pytest.raises(EngineError, match="has shape"):
            await engine.apply(TensorBuckets(3, Stream({**good, last: torch.zeros(3)}), 1_000_000, streamed=True))
        await engine.generate(request([5]))
        sent = [body["weight_version"] for name, body in engine.calls if "weight_version" in body]
        assert len(engine.lives) == 2 and sent == ["2"] and engine.version == 2
        await engine.close()

    run_async(go())


def test_an_engine_that_dies_comes_back_with_the_current_weights_and_its_requests_are_told(run_async, tiny):
    async def go():
        engine = FakeEngine(lambda body: None if body["input_ids"] == [5] else answer([3], "stop", matched=3))
        await engine.apply(weight_update_for(engine.capabilities, tiny, 4))
        await engine.generate(request([6]))
        lost = asyncio.ensure_future(engine.generate(request([5])))
        await until(lambda: engine.names().count("generate") == 2)
        del engine.calls[:]
        engine.lives[0].give_up("killed by signal 9")
        # Who tries again in the very moment waits for the next life.
        again = asyncio.ensure_future(engine.generate(request([6])))
        with pytest.raises(EngineGoneError, match="signal 9"):
            await lost
        assert (await again).token_ids == [3]
        assert (await engine.generate(request([6]))).token_ids == [3]
        assert engine.names()[:2] == ["start", "pause_generation"] and engine.names()[-1] == "generate"
        bodies = [body for name, body in engine.calls if name == "update_weights_from_tensor"]
        assert [body["weight_version"] for body in bodies] == ["4"]
        assert engine.metrics()["engine/restarts"] == 1 and len(engine.lives) == 2
        await engine.close()

    run_async(go())


def test_an_engine_that_dies_in_the_middle_of_an_update_still_ends_up_with_it(run_async, tiny):
    class DiesOnce(FakeClient):
        async def call(self, name, body, timeout_s):
            if name == "end_weight_update" and not any(n == "end_weight_update" for n, _ in self.calls):
                self.calls.append((name, body))
                self.give_up("killed")
            await super().call(name, body, timeout_s)

    async def go():
        engine = FakeEngine(stop_at_once, make=DiesOnce)
        await engine.apply(weight_update_for(engine.capabilities, tiny, 1))
        assert engine.version == 1 and len(engine.lives) == 2
        assert engine.names().count("end_weight_update") == 2
        await engine.close()

    run_async(go())


def test_an_engine_that_is_lost_while_the_policy_is_trained_waits_for_its_next_weights(run_async, tiny):
    """What the last update was given changes meanwhile: nobody samples by half an update."""

    async def go():
        engine = FakeEngine(stop_at_once)
        await engine.apply(TensorBuckets(1, list(named_weights(tiny))))
        await engine.hold_updates()
        before = len(engine.calls)
        engine.lives[0].give_up("killed")
        await until(lambda: len(engine.lives) == 2 and ("start", {}) in engine.calls[before:])
        await asyncio.sleep(0.05)
        waited = [name for name, _ in engine.calls[before:]]
        asked = asyncio.ensure_future(engine.generate(request([1, 2], max_new_tokens=4)))
        await asyncio.sleep(0.05)
        assert not asked.done() and waited == ["start"], "it has no weights yet, and is asked for nothing"
        await engine.apply(TensorBuckets(2, list(named_weights(tiny))))
        output = await asked
        versions = [body.get("weight_version") for name, body in engine.calls[before:] if "update_weights" in name]
        await engine.close()
        return output, versions

    output, versions = run_async(go())
    assert output.token_ids and {v for v in versions if v is not None} == {"2"}


def test_what_a_new_life_is_taking_when_the_policy_begins_to_change_it_takes_to_the_end_before(run_async, tiny):
    class Slow(FakeClient):
        async def call(self, name, body, timeout_s):
            await super().call(name, body, timeout_s)
            if name == "update_weights_from_tensor" and self.script is slow:
                await asyncio.sleep(0.2)

    slow = stop_at_once

    async def go():
        engine = FakeEngine(slow, make=Slow)
        await engine.apply(TensorBuckets(1, list(named_weights(tiny))))
        engine.lives[0].give_up("killed")
        before = len(engine.calls)
        await until(lambda: "begin_weight_update" in [name for name, _ in engine.calls[before:]])
        await engine.hold_updates()
        done = [name for name, _ in engine.calls[before:]]
        assert "end_weight_update" in done, "from here on nothing reads the policy"
        await engine.close()

    run_async(go())


def test_an_engine_that_never_serves_is_given_up_with_its_last_reason(run_async, monkeypatch):
    async def go():
        engine = FakeEngine(stop_at_once)
        await engine.start()
        for _ in range(3):
            count = len(engine.lives)
            engine.lives[-1].give_up("out of memory")
            replica = engine._replicas[0]
            await until(lambda: replica._failure is not None or (len(engine.lives) > count and replica.is_ready))  # noqa: B023
        with pytest.raises(EngineGoneError, match=r"ended 3 times without finishing a request; last: out of memory"):
            await engine.generate(request([5]))
        await engine.close()

    run_async(go())


def test_an_error_that_nobody_thought_of_hangs_nobody(run_async):
    class BreaksInItsSecondLife(FakeClient):
        async def start(self, timeout_s):
            await super().start(timeout_s)
            if self.calls.count(("start", {})) == 2:
                raise RuntimeError("unthought of")

    async def go():
        engine = FakeEngine(stop_at_once, make=BreaksInItsSecondLife)
        await engine.start()
        engine.lives[0].give_up("killed")
        with pytest.raises(EngineGoneError, match=r"could not be started anew: RuntimeError\('unthought of'"):
            await engine.generate(request([5]))
        await engine.close()

    run_async(go())


def test_a_server_of_somebody_else_is_not_left_in_our_pause(run_async):
    async def go():
        engine = FakeEngine(stop_at_once, ours=False)
        await engine.pause()
        await engine.close()
        assert engine.names()[-1] == "continue_generation"

    run_async(go())


def test_an_engine_that_cannot_start_is_one_clear_error_and_is_cleaned_up(run_async):
    async def go():
        engine = FakeEngine(
            stop_at_once, make=lambda s, log: FakeClient(s, log, start_error=ConfigError("no such model"))
        )
        for _ in range(2):
            with pytest.raises(ConfigError, match="no such model"):
                await engine.start()
        assert all(life.gone.is_set() for life in engine.lives)
        await engine.close()

    run_async(go())


def test_a_mixture_of_experts_is_warned_of_at_the_start(run_async, monkeypatch, caplog):
    shape = model_shape("verl_mt://tiny")
    experts = ModelShape(shape.vocab_size, {**shape.weights, "model.layers.0.mlp.experts.0.up_proj.weight": (4, 4)})

    async def go(found):
        monkeypatch.setattr(replicated, "model_shape", lambda *args, **more: found)
        engine = FakeEngine(stop_at_once)
        await engine.start()
        await engine.close()

    run_async(go(shape))
    assert "mixture of experts" not in caplog.text
    run_async(go(experts))
    assert "verl_mt://tiny is a mixture of experts: the trainer chooses experts again" in caplog.text


def fails(*numbers):
    """Clients of which these, counted in the order of their making, cannot start."""
    made = []

    def make(script, log):
        made.append(None)
        error = ConfigError(f"port taken, try {len(made)}") if len(made) in numbers else None
        return FakeClient(script, log, start_error=error)

    return make


def test_one_of_several_engines_that_cannot_start_is_tried_again_while_the_others_sample(run_async, tiny, caplog):
    async def go():
        engine = FakeEngine(stop_at_once, num_replicas=3, make=fails(2))
        await engine.start()
        assert (await engine.generate(request([5]))).finish_reason == "stop"
        await engine.apply(Disk(1, "somewhere"))
        assert engine.metrics() == {"engine/restarts": 0, "rollout/replicas": 3}
        assert all(replica.holds.version == 1 for replica in engine._replicas)
        await engine.close()

    run_async(go())
    assert "engine 1 did not start, and 2 of 3 engines sample without it; it is started again: port" in caplog.text


def test_an_engine_that_never_starts_is_given_up_and_the_others_go_on(run_async, tiny, caplog, monkeypatch):
    monkeypatch.setattr(replica_module, "_RETRY_S", 0.01)

    async def go():
        engine = FakeEngine(stop_at_once, num_replicas=2, make=fails(2, *range(3, 9)))
        await engine.start()
        await engine.apply(Disk(1, "somewhere"))
        assert engine.metrics() == {"engine/restarts": 0, "rollout/replicas": 1}
        outputs = await asyncio.gather(*(engine.generate(request([5 + n])) for n in range(4)))
        assert {output.replica for output in outputs} == {"engine 0"}
        # The last one that is left comes back, and is waited for.
        engine.make_client = FakeClient
        engine.lives[0].give_up("killed")
        assert (await engine.generate(request([5]))).replica == "engine 0"
        assert engine.metrics() == {"engine/restarts": 1, "rollout/replicas": 1}
        await engine.close()

    run_async(go())
    assert "engine 1 is given up: the SGLang engine ended 3 times" in caplog.text


def test_a_session_stays_on_its_server_sessions_spread_and_move_when_their_server_is_away(run_async):
    async def go():
        engine = FakeEngine(stop_at_once, num_replicas=2, ours=False)
        await engine.start()
        for number in range(6):
            engine.open_session(f"s{number}", number)
        # All at once, each with a prompt of its own: whoever has the least to do takes the next.
        found = await asyncio.gather(*(engine.generate(request([5 + n], f"s{n}")) for n in range(6)))
        homes = [output.replica for output in found]
        assert [homes.count(replica.name) for replica in engine._replicas] == [3, 3]
        again = [await engine.generate(request([5], "s0")) for _ in range(3)]
        assert {output.replica for output in again} == {homes[0]}
        monitor = next(replica for replica in engine._replicas if replica.name == homes[0])
        monitor._make = lambda: FakeClient(stop_at_once, engine.calls, start_error=ConfigError("does not answer"))
        monitor._client.give_up("connection refused")
        await until(lambda: not monitor.is_ready)
        moved = await engine.generate(request([5], "s0"))
        assert moved.finish_reason == "stop" and moved.replica != homes[0]
        engine.close_session("s0")
        engine.close_session("never opened")
        await engine.close()

    run_async(go())


def test_a_server_with_weights_of_somebody_elses_run_is_set_back_to_the_models_files(run_async):
    async def go():
        engine = FakeEngine(stop_at_once, make=lambda s, log: FakeClient(s, log, pristine=False), ours=False)
        await engine.start()
        body = dict(engine.calls)["update_weights_from_disk"]
        assert body["weight_version"] == "0" and body["model_path"] == engine._options.model_path
        await engine.close()

    run_async(go())


def test_an_engine_that_ignores_an_abort_is_taken_for_dead(run_async, monkeypatch):
    monkeypatch.setattr(replicated, "_ABORT_AGAIN_S", 0.01)
    monkeypatch.setattr(replicated, "_NUM_ABORTS", 3)

    class Deaf(FakeClient):
        async def call(self, name, body, timeout_s):
            if name != "abort_request":
                await super().call(name, body, timeout_s)

    async def go():
        engine = FakeEngine(never, make=Deaf)
        with pytest.raises(EngineGoneError, match="did not end within 0 s of its abort"):
            await engine.generate(request([5], deadline_s=0.02))
        await engine.close()

    run_async(go())


def test_files_are_an_update_too(run_async):
    async def go():
        engine = FakeEngine(stop_at_once)
        await engine.apply(Disk(3, "some/folder"))
        assert dict(engine.calls)["update_weights_from_disk"] == {"model_path": "some/folder", "weight_version": "3"}
        await engine.close()

    run_async(go())
