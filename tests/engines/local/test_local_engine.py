"""The local engine as its callers see it."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import Callable

import pytest
import torch
from engine_models import PROMPT, assert_exact, engine_of, make_model, plain_log_probs, random_ids, request

from verl_mt.data.requests import VersionSpan
from verl_mt.engines.base import Disk, InPlace, TensorBuckets
from verl_mt.engines.local import LocalEngine, LocalOptions
from verl_mt.engines.local.model_runner import KVCache
from verl_mt.errors import DeadlineError, EngineError
from verl_mt.modeling.weights import named_weights


def steps_only_in_company(engine: LocalEngine) -> Callable[[], None]:
    """From now on a sequence that is alone waits; returns what ends this.

    So a long turn cannot end while the event loop is slow to ask for short ones.
    """
    batcher, free = engine._batcher, threading.Event()
    step = batcher.step

    def in_company() -> None:
        if free.is_set() or len(batcher._live) > 1:
            step()
        else:
            free.wait(0.001)

    batcher.step = in_company  # type: ignore[method-assign]
    return free.set


def decode(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2", "Llama"])
@pytest.mark.parametrize("lengths", [[20] * 5, [3, 40, 17, 1, 29]], ids=["equal", "ragged"])
def test_greedy_equals_transformers_generate_token_for_token(architecture, lengths, run_async):
    model = make_model(architecture)
    prompts = [random_ids(length, seed) for seed, length in enumerate(lengths)]

    async def go():
        async with engine_of(model, max_prefill_tokens=33) as engine:
            return await asyncio.gather(*[engine.generate(request(p, max_new_tokens=20)) for p in prompts])

    outputs = run_async(go())
    for prompt, output in zip(prompts, outputs):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert output.token_ids == expected[0, len(prompt) :].tolist()
        assert output.finish_reason == "length"
        assert_exact(model, prompt, output)


def test_a_tool_answer_costs_only_its_own_tokens_and_log_probs_stay_exact(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            stream, session, computed = random_ids(30, 1), "conversation", 0
            for turn in range(4):
                output = await engine.generate(request(stream, session, temperature=0.7, seed=turn))
                # All but the last sampled token, which was never fed to the model.
                assert output.cached_tokens == computed
                assert_exact(qwen3, stream, output, temperature=0.7)
                computed = len(stream) + len(output.token_ids) - 1
                stream = stream + output.token_ids + random_ids(5 + turn, turn)

    run_async(go())


def test_a_rewritten_history_is_recomputed_from_where_it_differs(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            first = await engine.generate(request(PROMPT * 3, "s"))
            changed = PROMPT * 2 + [1, 2, 3]
            second = await engine.generate(request(changed, "s"))
            assert second.cached_tokens == len(PROMPT) * 2
            assert_exact(qwen3, changed, second)
            again = await engine.generate(request(PROMPT * 3, "s"))
            assert again.token_ids == first.token_ids

    run_async(go())


@pytest.mark.slow
@pytest.mark.cap("C14")
def test_a_waiting_session_holds_no_one_up_and_sequences_join_a_running_batch(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            await engine.generate(request(PROMPT, "waits for its tool"))
            let_go = steps_only_in_company(engine)
            long = asyncio.ensure_future(engine.generate(request(PROMPT[::-1], max_new_tokens=200)))
            short = [await engine.generate(request(random_ids(9, i), max_new_tokens=2)) for i in range(5)]
            assert all(len(output.token_ids) == 2 for output in short)
            assert not long.done()
            let_go()
            assert_exact(qwen3, PROMPT[::-1], await long)

    run_async(go())


@pytest.mark.cap("C56")
def test_abort_keeps_what_was_sampled(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            ask = request(PROMPT, max_new_tokens=240)
            steps_only_in_company(engine)
            task = asyncio.ensure_future(engine.generate(ask))
            await engine.generate(request(PROMPT[1:], max_new_tokens=10))
            await engine.abort(ask.request_id)
            await engine.abort("unknown")
            output = await task
            assert output.finish_reason == "abort"
            assert 5 < len(output.token_ids) < 240
            assert_exact(qwen3, PROMPT, output)

    run_async(go())


def test_a_cancelled_caller_ends_its_request(qwen3, run_async):
    async def go():
        async with engine_of(qwen3, max_num_seqs=1) as engine:
            await engine.pause()
            task = asyncio.ensure_future(engine.generate(request(PROMPT, max_new_tokens=240)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.resume()
            assert not engine._batcher._live

    run_async(go())


def test_the_policys_module_is_the_trainers_when_no_step_runs_in_it_any_more(qwen3, run_async):
    """Conversations that were given up (`data.over_sample`) leave a step behind in the engine's thread."""
    running, stepped, over = [], [], threading.Event()

    async def go():
        async with engine_of(qwen3) as engine:
            step = engine._batcher.step

            def slow_step():
                running.append(True)
                over.wait()
                step()
                running.pop()
                stepped.append(True)

            engine._batcher.step = slow_step
            turn = asyncio.ensure_future(engine.generate(request(PROMPT, max_new_tokens=100)))
            while not running:
                await asyncio.sleep(0.01)
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            assert running, "whoever was cancelled does not wait for the step"
            holding = asyncio.ensure_future(engine.hold_updates())
            await asyncio.sleep(0.05)
            assert running and not holding.done()
            over.set()
            await holding
            assert not running and len(stepped) == 1 and not engine._batcher.runnable()

    run_async(go())


def test_the_caches_memory_is_the_updates_when_the_policy_is_trained(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            first = await engine.generate(request(PROMPT, max_new_tokens=4))
            assert engine._batcher.slots.cache.num_bytes > 0
            await engine.hold_updates()
            assert engine._batcher.slots.cache.num_bytes == 0
            again = await engine.generate(request(PROMPT, max_new_tokens=4))
            assert (again.token_ids, again.cached_tokens) == (first.token_ids, 0)

    run_async(go())


def test_a_deadline_returns_what_is_there(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            await engine.pause()
            output = await engine.generate(request(PROMPT, deadline_s=0.05))
            assert (output.finish_reason, output.token_ids, output.version_spans) == ("abort", [], [])

    run_async(go())


def test_a_deadline_in_deterministic_mode_is_an_error(qwen3, run_async):
    async def go():
        async with engine_of(qwen3, deterministic=True) as engine:
            engine.open_session("a", 0)
            engine.open_session("its tool never answers", 1)
            with pytest.raises(DeadlineError, match=r"deadline_s=0\.05.*deterministic"):
                await engine.generate(request(PROMPT, "a", deadline_s=0.05))

    run_async(go())


def test_new_weights_drop_the_caches(run_async):
    model = make_model(seed=1)

    async def go():
        async with engine_of(model) as engine:
            before = await engine.generate(request(PROMPT, "s"))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            await engine.apply(InPlace(7))
            stream = PROMPT + before.token_ids + [4, 5]
            after = await engine.generate(request(stream, "s"))
            assert (engine.version, after.cached_tokens, after.version_spans) == (7, 0, [VersionSpan(7, 8)])
            assert_exact(model, stream, after)

    run_async(go())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_weights_that_change_in_the_middle_of_a_turn_are_told_token_by_token(mode, run_async):
    model = make_model(seed=2)

    async def go():
        async with engine_of(model) as engine:
            let_go = steps_only_in_company(engine)
            task = asyncio.ensure_future(engine.generate(request(PROMPT, max_new_tokens=150, temperature=1.0, seed=3)))
            await engine.generate(request(PROMPT[2:]))
            await engine.pause(mode)
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)
            await engine.apply(InPlace(1))
            await engine.resume()
            let_go()
            output = await task
            old, new = output.version_spans
            assert (old.version, new.version) == (0, 1)
            assert old.num_tokens + new.num_tokens == 150 == len(output.log_probs)
            expected = plain_log_probs(model, PROMPT, output.token_ids)[old.num_tokens :]
            torch.testing.assert_close(torch.tensor(output.log_probs[old.num_tokens :]), expected, atol=1e-5, rtol=1e-5)

    run_async(go())


@pytest.mark.slow
def test_a_module_of_its_own_takes_tensors_in_the_middle_of_a_turn(run_async):
    """`trainer.max_staleness`: the policy is trained meanwhile, and no token is by half an update."""
    policy = make_model(seed=2)
    own = copy.deepcopy(policy)

    async def go():
        engine = LocalEngine(own, end_token_ids=(), max_model_len=256, owns_module=True)
        try:
            let_go = steps_only_in_company(engine)
            task = asyncio.ensure_future(engine.generate(request(PROMPT, max_new_tokens=150, temperature=1.0, seed=3)))
            await engine.generate(request(PROMPT[2:]))
            before = copy.deepcopy(policy)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.1)
            # Some more tokens: the policy is another one, the engine's is not.
            await engine.generate(request(PROMPT[3:]))
            await engine.apply(TensorBuckets(1, named_weights(policy)))
            let_go()
            output = await task
            with pytest.raises(EngineError, match="TensorBuckets updates, got InPlace"):
                await engine.apply(InPlace(2))
        finally:
            await engine.close()
        return before, output

    before, output = run_async(go())
    old, new = output.version_spans
    assert (old.version, new.version, old.num_tokens + new.num_tokens) == (0, 1, 150)
    log_probs, cut = torch.tensor(output.log_probs), old.num_tokens
    for model, part in ((before, slice(0, cut)), (policy, slice(cut, None))):
        expected = plain_log_probs(model, PROMPT, output.token_ids)
        torch.testing.assert_close(log_probs[part], expected[part], atol=1e-5, rtol=1e-5)
    assert engine_can(own) == (True, False) and engine_can(policy, owns=False) == (False, False)


def test_an_update_that_does_not_fit_ends_the_engine_and_leaves_nobody_waiting(run_async):
    async def go():
        engine = LocalEngine(make_model(), end_token_ids=(), max_model_len=256, owns_module=True)
        turn = asyncio.ensure_future(engine.generate(request(PROMPT, max_new_tokens=200)))
        applied = asyncio.ensure_future(engine.apply(TensorBuckets(1, [("no.such.weight", torch.zeros(1))])))
        later = asyncio.ensure_future(engine.pause())
        found = await asyncio.gather(turn, applied, later, return_exceptions=True)
        await engine.close()
        return found

    found = run_async(go())
    assert [type(error).__name__ for error in found] == ["EngineGoneError"] * 3
    assert "no.such.weight" in str(found[1])


def engine_can(model, owns=True):
    """Whether it overlaps training, by itself and where it is to be deterministic."""
    found = []
    for deterministic in (False, True):
        options = LocalOptions(deterministic=deterministic)
        engine = LocalEngine(model, end_token_ids=(), max_model_len=256, options=options, owns_module=owns)
        found.append(engine.capabilities.overlaps_training)
        asyncio.run(engine.close())
    return tuple(found)


def test_only_updates_in_place_are_taken(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            with pytest.raises(EngineError, match="InPlace updates, got Disk"):
                await engine.apply(Disk(1, "somewhere"))

    run_async(go())


def test_pause_stops_sampling_and_abort_mode_ends_all_turns(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            await engine.pause()
            task = asyncio.ensure_future(engine.generate(request(PROMPT)))
            await asyncio.sleep(0.05)
            assert not task.done()
            await engine.pause("abort")
            assert (await task).finish_reason == "abort"
            await engine.resume()
            assert (await engine.generate(request(PROMPT))).finish_reason == "length"
            with pytest.raises(EngineError, match="unknown mode"):
                await engine.pause("later")

    run_async(go())


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_alone_and_in_company(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            ask = {"temperature": 1.0, "seed": 11, "max_new_tokens": 100}
            alone = await engine.generate(request(PROMPT, **ask))
            many = [engine.generate(request(random_ids(3 * i + 1, i), temperature=1.0)) for i in range(6)]
            together, other, *_ = await asyncio.gather(
                engine.generate(request(PROMPT, **ask)), engine.generate(request(PROMPT, **{**ask, "seed": 12})), *many
            )
            assert together.token_ids == alone.token_ids != other.token_ids

    run_async(go())


def test_requests_without_a_seed_differ_within_an_engine_and_repeat_across_engines(qwen3, run_async):
    async def go(seed):
        async with engine_of(qwen3, seed=seed) as engine:
            return [(await engine.generate(request(PROMPT, temperature=1.0))).token_ids for _ in range(2)]

    first, again, other = run_async(go(0)), run_async(go(0)), run_async(go(1))
    assert first[0] != first[1]
    assert first == again != other


@pytest.mark.slow
def test_deterministic_mode_gives_the_same_bits_whatever_the_timing(qwen3, run_async):
    async def conversation(engine, number, rng):
        name, stream, outputs = f"s{number}", random_ids(12, 100) + random_ids(number, number), []
        for turn in range(3):
            await asyncio.sleep(rng.random() * 0.01)
            ask = request(stream, name, temperature=1.0, max_new_tokens=1 + (5 * number + 3 * turn) % 11)
            output = await engine.generate(ask)
            outputs.append((output.token_ids, output.log_probs, output.cached_tokens))
            stream = stream + output.token_ids + random_ids(turn + 2, turn)
        await asyncio.sleep(rng.random() * 0.01)
        engine.close_session(name)
        return outputs

    async def go(seed):
        rng, numbers, rounds = random.Random(seed), list(range(7)), []
        async with engine_of(qwen3, deterministic=True, max_num_seqs=5, max_prefill_tokens=16) as engine:
            for _ in range(2):
                rng.shuffle(numbers)
                for number in numbers:
                    engine.open_session(f"s{number}", number)
                done = dict(zip(numbers, await asyncio.gather(*[conversation(engine, n, rng) for n in numbers])))
                rounds.append([done[n] for n in range(7)])
        # What was sampled before leaves no trace once all sessions are closed.
        assert rounds[0] == rounds[1]
        return rounds[0]

    assert run_async(go(1)) == run_async(go(2)) == run_async(go(3))


def test_deterministic_mode_wants_sessions_opened(qwen3, run_async):
    async def go():
        async with engine_of(qwen3, deterministic=True) as engine:
            with pytest.raises(EngineError, match="open_session first"):
                await engine.generate(request(PROMPT))

    run_async(go())


def test_end_tokens_stop_ids_and_stop_strings_end_a_turn_and_are_kept(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            ids = (await engine.generate(request(PROMPT, max_new_tokens=30))).token_ids
        cut = next(i for i in range(5, 30) if ids[i] not in ids[:i])
        half = f"{ids[cut - 1]}><{ids[cut]}"
        async with engine_of(qwen3, end_token_ids=[ids[cut]], decode=decode) as engine:
            by_end = await engine.generate(request(PROMPT, max_new_tokens=30))
        async with engine_of(qwen3, decode=decode) as engine:
            by_id = await engine.generate(request(PROMPT, max_new_tokens=30, stop_token_ids=(ids[cut],)))
            by_text = await engine.generate(request(PROMPT, max_new_tokens=30, stop=("never", half)))
            at_limit = await engine.generate(request(PROMPT, max_new_tokens=cut + 1, stop=(half,)))
        for output in (by_end, by_id, by_text, at_limit):
            assert output.token_ids == ids[: cut + 1]
            assert output.finish_reason == "stop"

    run_async(go())


def test_a_turn_ends_at_the_longest_sequence_the_engine_allows(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            output = await engine.generate(request(random_ids(250, 0), max_new_tokens=100))
            assert (len(output.token_ids), output.finish_reason) == (6, "length")

    run_async(go())


def test_the_memory_of_a_small_cache_is_kept_and_zeroed(monkeypatch):
    cache, kv = KVCache(16, 64), (torch.ones(1, 2, 8), torch.full((1, 2, 8), float("nan")))
    at = torch.tensor([0])

    def life() -> list[torch.Tensor]:
        cache.reserve(16, 64)
        cache.write(0, torch.empty(0, dtype=torch.int64), at[:0], (kv[0][:0], kv[1][:0]))
        stored = list(cache.of_layer(0))
        assert all(not part.any() for part in stored)  # a NaN of the last life would spoil what is masked
        cache.write(0, at, at, kv)
        cache.release()
        assert cache.num_bytes == 0
        return stored

    first, second = life(), life()
    assert {part.data_ptr() for part in first} == {part.data_ptr() for part in second}
    monkeypatch.setattr("verl_mt.engines.local.model_runner._KEPT_BYTES", 0)
    life()  # used once more, not kept
    assert {part.data_ptr() for part in life()}.isdisjoint(part.data_ptr() for part in first)


def test_a_small_cache_that_was_released_has_its_size_at_once(monkeypatch):
    cache, kv = KVCache(64, 1024), (torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    at = torch.tensor([0])

    def life(*sizes: tuple[int, int]) -> tuple[int, int]:
        for rows, length in sizes:
            cache.reserve(rows, length)
            cache.write(0, at, at, kv)
        size = cache.num_rows, cache.length
        cache.release()
        return size

    assert life((4, 60), (40, 100)) == (48, 128)
    assert life((4, 60)) == (48, 128)
    # Longer than before, or more of them: what was is not kept for it.
    assert life((4, 500)) == (16, 512)
    assert life((60, 60)) == (64, 64) and life((4, 500)) == (16, 512)
    monkeypatch.setattr("verl_mt.engines.local.model_runner._RETURNING_BYTES", 0)
    assert life((4, 60)) == (16, 512) and life((4, 60)) == (16, 64)
