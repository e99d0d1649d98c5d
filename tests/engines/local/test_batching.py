"""What is computed, what is shared, who gets a row. No thread, no event loop."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import VOCAB, assert_exact, make_model, plain_log_probs, request
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.engines.local import shared_prefix
from verl_mt.engines.local.batching import Batcher, LocalOptions
from verl_mt.engines.local.model_runner import PackedForward, StepAttention, StepTokens, check_architecture
from verl_mt.engines.local.slots import Sequence
from verl_mt.errors import ConfigError, EngineError


class Driver:
    """Submits requests, runs steps, counts tokens."""

    def __init__(self, model: Any, **options: Any):
        self.batcher = Batcher(PackedForward(model, 256), (), 256, LocalOptions(**options))
        self.num_computed = 0
        forward, compute = self.batcher.forward, self.batcher.forward.compute

        def counting(work: StepTokens, *rest: Any) -> torch.Tensor:
            self.num_computed += len(work.tokens)
            return compute(work, *rest)

        forward.compute = counting  # type: ignore[method-assign]

    def submit(self, ask: Any) -> Any:
        limit = len(ask.input_ids) + ask.sampling.max_new_tokens
        self.batcher.submit(Sequence(request=ask, limit=limit, submitted=time.monotonic()))
        return ask

    def run(self, steps: int = 1000) -> dict[str, Any]:
        with torch.inference_mode():
            while steps and self.batcher.runnable():
                self.batcher.step()
                steps -= 1
        results = {sequence.request.request_id: result for sequence, result in self.batcher.finished}
        self.batcher.finished = []
        return results


def ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def test_the_samples_of_a_group_prefill_their_prompt_once(qwen3):
    driver, prompt = Driver(qwen3), ids(60, 0)
    asks = [driver.submit(request(prompt, temperature=1.0, seed=i, max_new_tokens=3)) for i in range(8)]
    results = driver.run()
    assert driver.num_computed == 60 + 8 * 2
    assert sorted(results[a.request_id].cached_tokens for a in asks) == [0] + [60] * 7
    for ask in asks:
        assert_exact(qwen3, prompt, results[ask.request_id], temperature=1.0)


def test_different_prompts_with_the_same_beginning_compute_it_once(qwen3):
    driver, system = Driver(qwen3), ids(50, 1)
    asks = [driver.submit(request(system + ids(10, 2 + i), max_new_tokens=1)) for i in range(5)]
    results = driver.run()
    assert driver.num_computed == 50 + 5 * 10
    for ask in asks:
        assert_exact(qwen3, ask.input_ids, results[ask.request_id])


def test_a_prefix_of_a_closed_session_is_used_again(qwen3):
    driver = Driver(qwen3)
    first = driver.submit(request([*ids(50, 1), 1, 2], "a"))
    driver.run()
    driver.batcher.close("a")
    ask = driver.submit(request([*ids(50, 1), 3, 4], "b"))
    result = driver.run()[ask.request_id]
    assert result.cached_tokens == 50
    assert first.session_id not in driver.batcher.sessions
    assert_exact(qwen3, ask.input_ids, result)


def test_followers_of_an_aborted_prompt_are_computed_themselves(qwen3):
    driver, prompt = Driver(qwen3, max_prefill_tokens=16), ids(40, 3)
    leader, follower, other = (driver.submit(request(prompt)) for _ in range(3))
    driver.run(steps=1)
    driver.batcher.abort(other.request_id)
    driver.batcher.abort(leader.request_id)
    results = driver.run()
    assert results[leader.request_id].token_ids == results[other.request_id].token_ids == []
    assert_exact(qwen3, prompt, results[follower.request_id])


def test_the_least_recently_used_waiting_session_loses_its_row(qwen3):
    driver = Driver(qwen3, max_num_seqs=2)
    for name in "abc":
        driver.submit(request(ids(20, ord(name)), name))
        driver.run()
    assert {name: s.row >= 0 for name, s in driver.batcher.sessions.items()} == {"a": False, "b": True, "c": True}
    ask = driver.submit(request(ids(20, ord("a")), "a"))
    result = driver.run()[ask.request_id]
    assert result.cached_tokens == 0
    assert_exact(qwen3, ask.input_ids, result)


def test_conversations_that_have_begun_come_before_those_that_have_not(qwen3):
    """Behind them, each would wait for everybody in every turn, and compute its history again."""
    driver, names = Driver(qwen3, max_num_seqs=2), "abcdefgh"
    said = {name: ids(20, ord(name)) for name in names}
    turn_of = {driver.submit(request(said[name], name)).request_id: name for name in names}
    ended: list[str] = []
    while turn_of:
        for request_id, output in driver.run(steps=1).items():
            name = turn_of.pop(request_id)
            ended.append(name)
            if ended.count(name) < 3:  # the tool's answer, and the next turn
                said[name] = [*said[name], *output.token_ids, *ids(5, len(ended))]
                turn_of[driver.submit(request(said[name], name)).request_id] = name
    assert [ended.index(name) // 6 for name in names] == [0, 0, 1, 1, 2, 2, 3, 3]  # two at a time, three turns each
    # Of 20 + 2 x 5 tokens given and 3 x 8 sampled none is computed twice, and the last one not at all.
    assert driver.num_computed == len(names) * (20 + 2 * 5 + 3 * 8 - 1)


def test_a_long_prompt_is_prefilled_in_chunks_with_the_same_result(qwen3):
    driver, prompt = Driver(qwen3, max_prefill_tokens=7), ids(100, 5)
    ask = driver.submit(request(prompt))
    assert driver.run(steps=14) == {}
    assert_exact(qwen3, prompt, driver.run()[ask.request_id])


def test_the_cache_grows_in_chunks_with_what_is_needed(qwen3):
    driver = Driver(qwen3, max_num_seqs=64)
    driver.submit(request(ids(5, 0)))
    driver.run()
    cache = driver.batcher.slots.cache
    assert (cache.num_rows, cache.length) == (16, 64)
    driver.submit(request(ids(63, 0), max_new_tokens=100))
    driver.run()
    assert cache.length == 192


def test_turns_of_sessions_that_have_a_row_make_no_new_rows(qwen3):
    driver = Driver(qwen3, max_num_seqs=256)
    streams = {f"s{i}": ids(10, i) for i in range(40)}
    for _ in range(3):
        asks = [driver.submit(request(stream, name, max_new_tokens=3)) for name, stream in streams.items()]
        results = driver.run()
        streams = {a.session_id: a.input_ids + results[a.request_id].token_ids + [1, 2] for a in asks}
    assert driver.batcher.slots.cache.num_rows == 48, "40, in chunks of 16"


def test_rows_that_run_between_waiting_sessions_are_computed_alone(qwen3):
    driver = Driver(qwen3, max_num_seqs=40)
    first = {
        f"s{i}": driver.submit(request(ids(10 + i, i), f"s{i}", max_new_tokens=3 if i % 8 else 30)) for i in range(40)
    }
    results = driver.run(steps=10)
    assert [s.row for s in driver.batcher._running] == [0, 8, 16, 24, 32]
    seconds = {}
    for name, ask in first.items():
        if ask.request_id in results:
            stream = ask.input_ids + results[ask.request_id].token_ids + [1, 2]
            seconds[name] = driver.submit(request(stream, name, max_new_tokens=4))
    results |= driver.run()
    for name, ask in {**first, **{f"{name}'": ask for name, ask in seconds.items()}}.items():
        assert_exact(qwen3, ask.input_ids, results[ask.request_id])
        assert results[ask.request_id].cached_tokens == (len(ask.input_ids) - 3 if name.endswith("'") else 0)


def test_rows_of_very_different_lengths_are_decoded_in_blocks(qwen3):
    driver = Driver(qwen3)
    asks = [driver.submit(request(ids(200 if i < 2 else 5, i), max_new_tokens=4)) for i in range(70)]
    driver.run(steps=1)
    rows = np.arange(70)
    step = StepAttention(driver.batcher.slots.cache, rows, driver.batcher.slots.computed[rows], 70, torch.device("cpu"))
    read = [tuple(g.mask.shape[::3]) for g in step._decode]
    assert read == [(16, 208), (16, 16), (32, 16), (6, 16)]
    results = driver.run()
    for ask in asks[::9]:
        assert_exact(qwen3, ask.input_ids, results[ask.request_id])


def test_a_request_id_in_use_is_refused(qwen3):
    driver = Driver(qwen3)
    ask = driver.submit(request([1, 2, 3]))
    driver.submit(ask)
    (_, error), *_ = driver.batcher.finished
    assert isinstance(error, EngineError) and "already being sampled" in str(error)


mixes = given(
    seed=st.integers(0, 10**6),
    max_num_seqs=st.sampled_from([1, 3, 20]),
    max_slots=st.sampled_from([None, 40]),
    budget=st.sampled_from([5, 64, 2048]),
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@mixes
def test_any_mix_of_turns_tools_aborts_and_updates_keeps_log_probs_exact(qwen3, seed, max_num_seqs, max_slots, budget):
    any_mix(qwen3, seed, max_num_seqs, max_slots, budget)


@pytest.mark.release
@settings(max_examples=30, deadline=None)
@mixes
def test_many_mixes_keep_log_probs_exact(qwen3, seed, max_num_seqs, max_slots, budget):
    any_mix(qwen3, seed, max_num_seqs, max_slots, budget)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@mixes
def test_nor_does_reading_common_beginnings_once_change_them(qwen3, seed, max_num_seqs, max_slots, budget):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "WORTH_SHARING", 0)
        any_mix(qwen3, seed, max_num_seqs, max_slots, budget)


def any_mix(qwen3, seed, max_num_seqs, max_slots, budget):
    """Conversations that come and go; every turn's log-probs are compared with a plain forward pass over all turns."""
    driver = Driver(qwen3, max_num_seqs=max_num_seqs, max_slots=max_slots, max_prefill_tokens=budget)
    rng, system = random.Random(seed), ids(rng_length := 40, seed)
    streams = {f"s{i}": system[: rng.choice([0, 33, rng_length])] + ids(rng.randint(1, 20), i % 3) for i in range(12)}
    asked: dict[str, Any] = {}
    sampled: dict[str, list[tuple[int, Any]]] = {name: [] for name in streams}
    for _ in range(25):
        for name, stream in streams.items():
            idle = all(a.session_id != name for a in asked.values())
            if idle and len(stream) < 150 and rng.random() < 0.4:
                ask = request(stream, name, temperature=0.8, seed=rng.randint(0, 99), max_new_tokens=rng.randint(1, 12))
                asked[driver.submit(ask).request_id] = ask
        if rng.random() < 0.1 and asked:
            driver.batcher.abort(rng.choice(list(asked)))
        if rng.random() < 0.05:
            driver.batcher.set_version(driver.batcher.version + 1)
        if rng.random() < 0.1:
            driver.batcher.close(
                rng.choice([n for n in streams if all(a.session_id != n for a in asked.values())] or [""])
            )
        for request_id, output in driver.run(steps=rng.randint(1, 6)).items():
            ask = asked.pop(request_id)
            assert sum(span.num_tokens for span in output.version_spans) == len(output.token_ids)
            sampled[ask.session_id].append((len(ask.input_ids), output))
            streams[ask.session_id] = ask.input_ids + output.token_ids + ids(rng.randint(1, 9), seed)
    assert set(driver.run()) == set(asked)
    for name, stream in streams.items():
        expected = plain_log_probs(qwen3, stream[:1], stream[1:], 0.8)
        for begin, output in sampled[name]:
            here = expected[begin - 1 : begin - 1 + len(output.token_ids)]
            torch.testing.assert_close(torch.tensor(output.log_probs), here, atol=1e-5, rtol=1e-5)


def test_models_whose_cache_has_no_plain_rows_are_refused():
    windowed = make_model("Mistral", sliding_window=64)
    with pytest.raises(ConfigError, match=r"MistralForCausalLM has a sliding window of 64 tokens.*another engine"):
        check_architecture(windowed, 65)
    check_architecture(windowed, 64)
    mixed = make_model(use_sliding_window=True, sliding_window=64, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ConfigError, match="a sliding window of 64 tokens"):
        check_architecture(mixed, 256)
    with pytest.raises(ConfigError, match="causal language model, got Linear"):
        check_architecture(torch.nn.Linear(2, 2), 256)


def test_a_model_with_its_own_kind_of_attention_is_refused_when_it_runs():
    gemma = make_model("Gemma2", head_dim=16, layer_types=["full_attention"] * 2, sliding_window=None)
    driver = Driver(gemma)
    driver.submit(request([1, 2, 3]))
    with pytest.raises(EngineError, match="softcap"):
        driver.run()
