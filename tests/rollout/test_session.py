"""The ledger: layouts L1-L7 of the reference numbers, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest
from rollout_support import fixed_session

from verl_mt.data.trajectory import Status, StopReason
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import EngineGoneError, LedgerError
from verl_mt.rollout.context import Limits

USER = [{"role": "user", "content": "more"}]


def run(coroutine):
    return asyncio.run(coroutine)


def response(record):
    start = record.num_prompt_tokens
    return record.token_ids[start:], record.loss_mask[start:], record.rollout_log_probs[start:]


@pytest.mark.cap("L1", "C59", "C83")
def test_a_single_turn_is_recorded_as_sampled():
    session = fixed_session(ScriptedEngine([([10, 11], "a", "stop", [-0.1, -0.2])]))
    run(session.generate())
    assert response(session.record) == ([10, 11], [1, 1], [-0.1, -0.2])


@pytest.mark.cap("L2", "C61", "C19")
def test_a_new_turn_keeps_the_observation_out_of_the_loss_and_sends_exactly_what_was_recorded():
    engine = ScriptedEngine([([10, 11], "a", "stop", [-0.1, -0.2]), ([12], "b", "stop", [-0.3])])
    session = fixed_session(engine, [[50, 51, 52]])

    async def go():
        await session.generate()
        session.extend(USER)
        await session.generate()

    run(go())
    assert response(session.record) == (
        [10, 11, 50, 51, 52, 12],
        [1, 1, 0, 0, 0, 1],
        [-0.1, -0.2, 0, 0, 0, -0.3],
    )
    assert engine.requests[1].input_ids == [1, 2, 3, 10, 11, 50, 51, 52]
    session.record.check()
    assert [t.kind for t in session.record.turns] == ["prompt", "assistant", "observation", "assistant"]


@pytest.mark.cap("L5", "C4", "C58")
def test_a_turn_cut_by_length_ends_the_trajectory():
    session = fixed_session(
        ScriptedEngine([([10, 11], "a", "length", [-0.1, -0.2])]), limits=Limits(response_length=2, max_model_len=100)
    )
    turn = run(session.generate())
    assert turn.finish_reason == "length"
    assert session.trajectory.stop_reason is StopReason.RESPONSE_LENGTH
    assert session.trajectory.status is Status.TRUNCATED


@pytest.mark.parametrize(
    ("limits", "reason", "asked"),
    [
        (Limits(response_length=4, max_model_len=100, max_tokens_per_turn=3), StopReason.MAX_TOKENS_PER_TURN, 3),
        (Limits(response_length=4, max_model_len=100, max_tokens_per_turn=9), StopReason.RESPONSE_LENGTH, 4),
        (Limits(response_length=40, max_model_len=8), StopReason.MAX_MODEL_LEN, 5),
    ],
)
@pytest.mark.cap("C68", "C84")
def test_the_smallest_limit_wins_and_is_named(limits, reason, asked):
    engine = ScriptedEngine([([10], "a", "length", [-0.1])])
    session = fixed_session(engine, limits=limits)
    run(session.generate())
    assert engine.requests[0].sampling.max_new_tokens == asked
    assert session.trajectory.stop_reason is reason


@pytest.mark.cap("L6", "C56")
def test_an_engine_abort_raises_so_that_the_trajectory_is_started_again():
    session = fixed_session(ScriptedEngine([([10], "a", "abort", [-0.1])]))
    with pytest.raises(EngineGoneError):
        run(session.generate())


@pytest.mark.cap("L7")
def test_an_observation_that_does_not_fit_is_in_the_messages_only():
    engine = ScriptedEngine([([10, 11, 12, 13], "a", "stop", [-0.1] * 4)])
    session = fixed_session(engine, [[50, 51, 52, 53, 54]], limits=Limits(response_length=100, max_model_len=10))

    async def go():
        await session.generate()
        session.extend(USER)
        assert await session.generate() is None

    run(go())
    assert response(session.record)[:2] == ([10, 11, 12, 13], [1, 1, 1, 1])
    assert session.trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert session.messages[-1] == USER[0]
    assert len(engine.requests) == 1


def test_an_observation_fits_exactly_when_one_more_token_fits():
    engine = ScriptedEngine([([10], "a", "stop", [-0.1]), ([11], "b", "stop", [-0.1])])
    session = fixed_session(engine, [[50, 51]], limits=Limits(response_length=4, max_model_len=100))

    async def go():
        await session.generate()
        session.extend(USER)
        return await session.generate()

    assert run(go()) is not None
    assert engine.requests[1].sampling.max_new_tokens == 1


@pytest.mark.cap("C62")
def test_log_probs_of_another_length_are_refused_with_both_numbers():
    session = fixed_session(ScriptedEngine([]))
    with pytest.raises(LedgerError, match="2 sampled ids came with 1 log-probs"):
        session.record.append_sampled([10, 11], [-0.1], [0, 0], turn=1)


def test_nothing_is_appended_after_the_end():
    session = fixed_session(ScriptedEngine([]))
    session.end(StopReason.FINISHED)
    with pytest.raises(LedgerError, match="after the end"):
        session.extend(USER)
    with pytest.raises(LedgerError, match="after the end"):
        run(session.generate())


def test_the_first_stop_reason_stands():
    session = fixed_session(ScriptedEngine([]))
    session.end(StopReason.FINISHED)
    session.end(StopReason.ERROR)
    assert session.trajectory.stop_reason is StopReason.FINISHED


def test_seeds_differ_by_turn_and_trajectory_and_repeat_otherwise():
    def seeds(trajectory_id="t", attempt=0):
        engine = ScriptedEngine([([10], "a", "stop", [-0.1]), ([11], "b", "stop", [-0.1])])
        session = fixed_session(engine, [[50]])
        session.trajectory.trajectory_id, session.attempt = trajectory_id, attempt
        run(session.generate())
        session.extend(USER)
        run(session.generate())
        return [request.sampling.seed for request in engine.requests]

    first = seeds()
    assert first == seeds() and first[0] != first[1]
    assert not set(first) & set(seeds("u"))
    assert first == seeds(attempt=1), "whoever has to begin again would draw until it is short enough"
