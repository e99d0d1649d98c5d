"""Which replica a conversation begins at, what a group computes once, and whose the device's memory is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_models import request
from fake_client import FakeEngine, answer, until

from verl_mt.engines.base import Disk
from verl_mt.errors import EngineError
from verl_mt.extensions.cluster.sglang import engine as engine_module

pytestmark = pytest.mark.slow  # event loops, deadlines


@pytest.fixture(autouse=True)
def no_sglang_needed(monkeypatch):
    monkeypatch.setattr(engine_module, "require_sglang", lambda: None)


def stops(body):
    return answer([3], "stop", matched=3, cached=2)


class Owner:
    """Which replica each request went to, by its prompt."""

    def __init__(self, num_replicas):
        self.engine = FakeEngine(stops, num_replicas=num_replicas)

    async def roll_out(self, prompts):
        for number in range(len(prompts)):
            self.engine.open_session(f"s{number}", number)
        outputs = await asyncio.gather(
            *(self.engine.generate(request(prompt, f"s{n}")) for n, prompt in enumerate(prompts))
        )
        for number in range(len(prompts)):
            self.engine.close_session(f"s{number}")
        return outputs


def test_samples_of_a_prompt_begin_at_one_replica_and_prompts_spread(run_async):
    async def go():
        owner = Owner(4)
        outputs = await owner.roll_out([[5, 6, 7 + k // 8] for k in range(64)])
        homes = [{o.replica for o in outputs[8 * k : 8 * k + 8]} for k in range(8)]
        assert all(len(home) == 1 for home in homes)
        assert sorted(home for (home,) in homes) == sorted(2 * [f"engine {n}" for n in range(4)])
        assert owner.engine.metrics() == owner.engine.metrics() == {"engine/restarts": 0, "rollout/replicas": 4}
        await owner.engine.close()

    run_async(go())


def test_a_group_that_is_too_large_for_one_replica_is_split(run_async):
    async def go():
        owner = Owner(2)
        outputs = await owner.roll_out([[5, 6]] * 64)
        homes = [output.replica for output in outputs]
        assert 24 <= homes.count("engine 0") <= 40
        await owner.engine.close()

    run_async(go())


def test_the_prompt_of_a_group_is_computed_once_and_counted_once(run_async):
    async def go():
        owner = Owner(1)
        # The first prompt brings what all begin with, one of its own needs no more than that.
        alone = await owner.roll_out([[9, 9], [9, 8], [9, 7]])
        asked = [body["sampling_params"]["max_new_tokens"] for _, body in owner.engine.calls[1:]]
        assert asked[0] == 0 and len(asked) == 4 and min(asked[1:]) > 0
        owner.engine.calls.clear()
        outputs = await owner.roll_out([[5, 6]] * 8)
        asked = [body["sampling_params"]["max_new_tokens"] for _, body in owner.engine.calls]
        assert asked[0] == 0 and len(asked) == 9 and min(asked[1:]) > 0
        assert {o.cached_tokens for o in (*alone, *outputs)} == {2}
        # The next group with this prompt finds it in the cache, until new weights empty that.
        owner.engine.calls.clear()
        await owner.roll_out([[5, 6]] * 8)
        assert len(owner.engine.calls) == 8
        await owner.engine.apply(Disk(1, "anywhere"))
        owner.engine.calls.clear()
        await owner.roll_out([[5, 6]] * 8)
        assert len(owner.engine.calls) == 9
        await owner.engine.close()

    run_async(go())


def test_one_who_is_to_end_does_not_wait_for_the_prompt_of_the_others(run_async):
    async def go():
        engine = FakeEngine(lambda body: None if body["sampling_params"]["max_new_tokens"] == 0 else stops(body))
        tasks = []
        for number in range(2):
            engine.open_session(f"s{number}", number)
            tasks.append(asyncio.ensure_future(engine.generate(request([5], f"s{number}", deadline_s=0.2))))
        outputs = await asyncio.gather(*tasks)
        assert [(output.finish_reason, output.token_ids) for output in outputs] == [("abort", [])] * 2
        await engine.close()

    run_async(go())


def test_a_prompt_that_could_not_be_computed_ahead_is_asked_for_without(run_async):
    async def go():
        owner = Owner(1)
        refusals = iter([EngineError("busy")])

        def refuses_once(body):
            if body["sampling_params"]["max_new_tokens"] == 0 and (error := next(refusals, None)):
                raise error
            return stops(body)

        owner.engine.script = refuses_once
        for expected in (8 + 1, 8 + 1):  # the second time it is tried again
            owner.engine.calls.clear()
            outputs = await owner.roll_out([[5, 6]] * 8)
            assert {output.finish_reason for output in outputs} == {"stop"}
            assert owner.engine.names().count("generate") == expected
        await owner.engine.close()

    run_async(go())


def with_memory(**more) -> FakeEngine:
    engine = FakeEngine(stops, **more)
    engine.capabilities = replace(engine.capabilities, frees_memory=True)
    return engine


def memory_calls(engine):
    kept = ("flush_cache", "release_memory_occupation", "resume_memory_occupation", "update_weights_from_disk")
    return [(name, body.get("tags")) for name, body in engine.calls if name in kept]


def test_memory_is_taken_back_only_where_it_was_given_away_and_the_cache_behind_the_weights(run_async):
    async def go():
        engine = with_memory()
        await engine.start()
        # A run that is resumed, or rolled back, has new weights without a rollout before.
        await engine.resume_memory()
        await engine.apply(Disk(1, "a"))
        assert memory_calls(engine) == [("update_weights_from_disk", None)]
        engine.calls.clear()
        for _ in range(2):
            await engine.release_memory()
        await engine.resume_memory()
        await engine.apply(Disk(2, "b"))
        assert memory_calls(engine) == [
            ("flush_cache", None),
            ("release_memory_occupation", ["kv_cache", "weights"]),
            ("resume_memory_occupation", ["weights"]),
            ("update_weights_from_disk", None),
            ("resume_memory_occupation", ["kv_cache"]),
        ]
        await engine.close()

    run_async(go())


def test_memory_is_given_away_only_when_no_request_is_left(run_async):
    async def go():
        engine = with_memory()
        await engine.start()
        engine.lives[0].refuse["flush_cache"] = EngineError("requests are running")
        task = asyncio.ensure_future(engine.release_memory())
        await until(lambda: engine.names().count("flush_cache") == 3)
        assert "release_memory_occupation" not in engine.names()
        engine.lives[0].refuse.clear()
        await task
        assert "release_memory_occupation" in engine.names()
        await engine.close()

    run_async(go())


def test_an_engine_that_is_lost_while_training_has_the_memory_starts_anew_only_afterwards(run_async):
    async def go():
        engine = with_memory()
        await engine.start()
        await engine.release_memory()
        engine.lives[0].give_up("killed")
        await until(lambda: not engine._replicas[0].is_ready)
        await asyncio.sleep(0.05)
        assert len(engine.lives) == 1
        await engine.resume_memory()
        await engine.apply(Disk(1, "a"))
        assert len(engine.lives) == 2 and engine._replicas[0].holds is not None
        # The new life has all of its memory.
        assert "resume_memory_occupation" not in engine.names()
        await engine.close()

    run_async(go())
