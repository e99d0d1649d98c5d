"""What a driver may edit in a conversation, and how it enters the record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from rollout_support import Engine, Recorder, output
from rollout_support import with_texts as any_with_texts

from verl_mt.data.conversation import ParsedTurn
from verl_mt.data.requests import GenerationOutput
from verl_mt.data.trajectory import StopReason
from verl_mt.errors import LedgerError
from verl_mt.extensions.toolbox.editing.session import EditableSession, _Edits
from verl_mt.rollout import session as module
from verl_mt.rollout.context import Limits

USER = [{"role": "user", "content": "more"}]
TOOL = {"name": "f"}
run = asyncio.run
with_texts = partial(any_with_texts, kind=EditableSession)


def test_a_text_that_goes_on_inside_a_message_is_rendered_behind_the_others(monkeypatch):
    asked = []
    monkeypatch.setattr(
        module, "turn_ids", lambda chat, history, message, **keys: asked.append((history, keys["tools"])) or [8]
    )
    session = with_texts(Engine(GenerationOutput(None, None, "stop", text="b")))
    session.rewrite([{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}], [])
    run(session.generate())
    assert asked == [([{"role": "user", "content": "p"}], None)]
    assert session.messages[-1] == {"role": "assistant", "content": "ab"}


def test_what_is_queued_is_recorded_with_the_next_turn_in_order():
    session = with_texts(Engine(output(), output()), deltas=[[50, 9]])
    session.verbatim = True
    run(session.generate())
    session.extend_ids([40, 41], {"role": "tool", "content": "x"})
    session.extend_ids((42,), {"role": "tool", "content": "y"})
    image = {"role": "user", "content": [{"type": "image", "image": "i"}]}
    session.extend([image])
    with pytest.raises(LedgerError, match=r"t: extend_ids\(\) behind messages"):
        session.extend_ids([43], {"role": "tool", "content": "z"})
    session.prefill("AB")
    assert session.record.token_ids == [1, 2, 3, 10, 11] and session._seen == session.messages[:4]
    run(session.generate())
    assert session.record.token_ids == [1, 2, 3, 10, 11, 40, 41, 42, 50, 9, 65, 66, 10, 11]
    assert [made.start for made in session.record.media] == [9]
    assert session.messages[-1] == {"role": "assistant", "content": "AB10 11"} and session.message_prefix == "AB"
    assert (session.message_start, session.trajectory.rounds) == (12, [0, 1])
    assert session.record.turns[2].turn == 1 and (session._queue, session._edits) == ((), _Edits())


def test_what_does_not_fit_is_not_recorded_and_ends_the_conversation():
    limits = Limits(response_length=6, max_model_len=100)
    for extra, fits in (([40, 41, 42], True), ([40, 41, 42, 43], False)):
        session = with_texts(Engine(output(), output()), limits=limits)
        run(session.generate())
        session.extend_ids(extra, {"role": "tool", "content": "x"})
        turn = run(session.generate())
        assert (turn is not None, len(session.record.token_ids)) == (fits, 10 if fits else 5)
        assert session.trajectory.stop_reason is (None if fits else StopReason.CONTEXT_FULL)


def reopened(keep, ids=(), content="new"):
    session = with_texts(Engine(output((10, 11, 12)), output((13,)), output((14,))))
    run(session.generate())
    session.reopen("first", keep=6, ids=[20])
    run(session.generate())
    session.reopen(content, keep=keep, ids=list(ids))
    return session


@pytest.mark.parametrize(
    ("keep", "texts", "cut"),
    [(8, ["10 11 12", "13"], 0), (7, ["10 11 12", ""], 1), (4, ["10", ""], 3), (3, ["", ""], 4)],
)
def test_a_message_is_reopened_where_its_caller_says(keep, texts, cut):
    """The message is [3, 8): three tokens of turn 1, one that was given, one of turn 2."""
    session = reopened(keep, [30, 31])
    assert session.record.token_ids == [1, 2, 3, 10, 11, 12, 20, 13][:keep]
    assert session.trajectory.turn_texts == texts
    assert session.trajectory.counters.get("cut_tokens", 0) == cut
    assert session.messages[-1] == {"role": "assistant", "content": "new"}
    run(session.generate())
    assert session.record.token_ids == [*[1, 2, 3, 10, 11, 12, 20, 13][:keep], 30, 31, 14]
    assert session.messages[-1] == {"role": "assistant", "content": "new14"} and len(session.messages) == 2
    assert (session.trajectory.rounds, session.message_rounds) == ([0, 0, 0], {1: 0})


def test_texts_of_turns_that_lose_nothing_stay_as_the_engine_gave_them():
    session = reopened(8)
    session.trajectory.turn_texts = ["one", "two"]
    session.reopen("b", keep=8, ids=[])
    assert session.trajectory.turn_texts == ["one", "two"]
    session.reopen("c", keep=6, ids=[])
    assert session.trajectory.turn_texts == ["one", ""]
    session.reopen("d", keep=5, ids=[])
    assert session.trajectory.turn_texts == ["10 11", ""]


def test_the_turn_behind_one_that_went_on_is_a_message_of_its_own():
    session = with_texts(Engine(output(), output(), output()))
    run(session.generate())
    session.reopen("a", keep=5, ids=[])
    run(session.generate())
    run(session.generate())
    assert [message["content"] for message in session.messages] == ["q", "a10 11", "10 11"]
    assert (session.trajectory.rounds, session.message_rounds) == ([0, 0, 1], {1: 0, 2: 1})


@pytest.mark.parametrize("keep", [2, 9])
def test_what_is_not_in_the_last_message_cannot_be_kept(keep):
    with pytest.raises(LedgerError, match=rf"t: cannot keep {keep} tokens: the last assistant message is \[3, 8\)"):
        reopened(keep)


def test_a_record_without_a_turn_has_no_message():
    session = with_texts(Engine(output()))
    assert session.message_start == 3
    session.reopen("x", keep=3, ids=[40])
    run(session.generate())
    assert (session.trajectory.rounds, session.messages[-1]["content"]) == ([0], "x10 11")


def test_a_rewritten_history_is_read_from_a_record_of_its_own():
    session = with_texts(Engine(output(), output()), tools=[TOOL])
    run(session.generate())
    old = session.record
    session.extend(USER)
    messages = [{"role": "user", "content": "q"}, {"role": "user", "content": "p"}]
    session.rewrite(messages, [])
    assert old.messages == [messages[0], {"role": "assistant", "content": "10 11"}] and old.tools == [TOOL]
    assert session.context.chat.mixed == ([messages[0]], [messages[1]], None)
    assert (session.messages, session.trajectory.tools, session.message_rounds) == (messages, [], {})
    run(session.generate())
    assert session.trajectory.records == [old, session.record] and session.trajectory.counters["forks"] == 1
    assert session.record.token_ids == [7, 7, 7, 10, 11] and session.record.turns[0].turn == 1
    assert session.trajectory.rounds == [0, 1] and session.message_rounds == {2: 1} and session.message_prefix == ""


def test_a_record_of_which_nothing_was_sampled_is_replaced():
    session = with_texts(Engine(output()), tools=[TOOL])
    old = session.record
    messages = [{"role": "user", "content": "p"}, *USER, {"role": "assistant", "content": "A"}]
    session.rewrite(messages, [TOOL])
    session.prefill("B")
    assert not old.messages and old.tools is None and session.message_prefix == "A"
    assert session.context.chat.mixed == ([], messages[:2], [TOOL])
    run(session.generate())
    assert session.trajectory.records == [session.record] and "forks" not in session.trajectory.counters
    assert session.record.token_ids == [7, 7, 7, 65, 66, 10, 11]
    assert session.messages[-1] == {"role": "assistant", "content": "A10 11"}


def test_a_rewritten_history_with_the_same_tools_keeps_none_beside_the_record():
    session = with_texts(Engine(output()), tools=[TOOL])
    run(session.generate())
    old = session.record
    session.rewrite([{"role": "user", "content": "p"}], [dict(TOOL)])
    assert old.tools is None and len(old.messages) == 2


@pytest.mark.parametrize(("length", "fits"), [(8, True), (7, False)])
def test_a_rewritten_history_must_leave_room_for_a_token(length, fits):
    """5 tokens are there, 7 are read: three of the prompt, and four that the message begins with."""
    session = with_texts(Engine(output(), output()), limits=Limits(response_length=100, max_model_len=length))
    run(session.generate())
    session.rewrite([{"role": "user", "content": "p"}, {"role": "assistant", "content": "ABCD"}], [])
    assert (run(session.generate()) is not None) is fits
    assert len(session.trajectory.records) == 1 + fits


def test_images_of_a_rewritten_history_are_those_of_the_new_record():
    image = {"role": "user", "content": [{"type": "image", "image": "i"}]}
    session = with_texts(Engine(output(), output()), messages=[image])
    assert session.record.media == []
    session.context.chat.mixed_prompt_ids = lambda trusted, plain, tools: [7, 9, 9]
    run(session.generate())
    session.rewrite([image], [])
    run(session.generate())
    assert [made.start for made in session.record.media] == [1, 2] and not session.trajectory.records[0].media
    assert session.context.engine.requests[1].media == {"inputs": session.record.media}
    assert session.context.engine.requests[0].media == {}


def refused(session, queue):
    with pytest.raises(KeyError), session.unless_refused():
        queue()
        raise KeyError


def test_what_is_queued_before_an_error_is_taken_back():
    session = with_texts(Engine(output(), output()), tools=[TOOL], deltas=[[50]])
    run(session.generate())
    told, tools = list(session.messages), session.trajectory.tools
    queued = (session._queue, session._edits)

    def rewrite():
        session.rewrite([{"role": "user", "content": "q"}, {"role": "assistant", "content": "A"}], [])

    for queue in (lambda: session.extend(USER), lambda: session.prefill("A"), rewrite):
        refused(session, queue)
        assert (session.messages, session.trajectory.tools) == (told, tools)
        assert (session._queue, session._edits) == queued
        assert (session.message_rounds, session.message_prefix, session._num_given) == ({1: 0}, "", 1)
        assert session.record.messages == [] and session.record.tools is None
    with session.unless_refused():
        session.extend(USER)
    assert session.messages == [*told, *USER]


def test_what_was_recorded_before_an_error_stays():
    session = with_texts(Engine(output(), output()), deltas=[[50]])
    run(session.generate())

    def go_on():
        session.extend(USER)
        run(session.generate())

    refused(session, go_on)
    assert len(session.messages) == 4 and session.record.token_ids == [1, 2, 3, 10, 11, 50, 10, 11]

    def replaced():
        session.rewrite([{"role": "user", "content": "p"}], [])
        session.ledger.records[-1] = replace(session.record)

    refused(session, replaced)
    assert session.messages == [{"role": "user", "content": "p"}]


@pytest.mark.parametrize("verb", ["extend", "extend_ids", "reopen", "prefill", "rewrite"])
def test_nothing_is_queued_after_the_end(verb):
    session = with_texts(Engine())
    session.end(StopReason.FINISHED)
    arguments = {"extend": (USER,), "extend_ids": ([1], USER[0]), "reopen": ("x",), "prefill": ("x",)}
    with pytest.raises(LedgerError, match=rf"t: {verb}\(\) after the end \(finished\)"):
        getattr(session, verb)(*arguments.get(verb, (USER, [])), **({"keep": 3, "ids": []} if verb == "reopen" else {}))


def test_each_record_is_checked_with_what_it_has_seen(monkeypatch):
    recorder = Recorder(monkeypatch)
    session = with_texts(Engine(output(), output(finish_reason="length")), tools=[TOOL], deterministic=True)
    session.prompt_truncated = True
    session.trajectory.prompt_id = "s1.00003"
    monkeypatch.setattr(session.context.sanity, "observe", lambda *words: recorder.seen.append(words))
    run(session.generate())
    first = list(session.messages)
    session.rewrite([{"role": "user", "content": "p"}], [])
    run(session.generate())
    session.trajectory.stop_reason = None
    session.extend(USER)
    session.trajectory.stop_reason = StopReason.RESPONSE_LENGTH
    run(session.finish())
    one, two = recorder.asked
    assert (one["messages"], one["tools"], one["stop_length"], one["prompt_truncated"]) == (first, [TOOL], False, True)
    assert (two["messages"], two["tools"], two["stop_length"], two["prompt_truncated"]) == (
        session.messages[:-1], None, True, False,
    )  # fmt: skip
    assert (one["token_ids"], two["sampled"]) == ([1, 2, 3, 10, 11], [0, 0, 0, 1, 1])
    assert recorder.seen == [(recorder.finding, "s1")] and session.trajectory.sanity == {"cause": "x"}


def test_a_verbatim_turn_that_is_cut_does_not_end_the_trajectory():
    engine = Engine(output(finish_reason="length"), output(finish_reason="stop"))
    session = with_texts(engine, limits=Limits(response_length=4, max_model_len=100))
    session.verbatim = True
    run(session.generate(max_tokens=3))
    assert session.cut_reason is StopReason.MAX_TOKENS_PER_TURN and not session.ended
    run(session.generate())
    assert session.cut_reason is None and not session.ended, "the last turn ended itself"
    session.cut_reason = StopReason.MAX_TOKENS_PER_TURN
    assert run(session.generate()) is None and session.trajectory.stop_reason is session.cut_reason


@pytest.mark.parametrize("verbatim", [False, True])
def test_a_turn_that_the_deadline_cuts_ends_the_trajectory(verbatim):
    session = with_texts(Engine(output(finish_reason="abort")), limits=Limits(50, 100, request_timeout_s=0.0))
    session.verbatim = verbatim
    run(session.generate())
    assert session.trajectory.stop_reason is StopReason.TIME_LIMIT and session.cut_reason is None


def test_a_cut_turn_ends_the_trajectory_unless_the_loop_reads_turns_itself():
    session = with_texts(Engine(output(finish_reason="length")), limits=Limits(response_length=2, max_model_len=100))
    run(session.generate())
    assert session.cut_reason is session.trajectory.stop_reason is StopReason.RESPONSE_LENGTH


def test_verbatim_messages_hold_the_text_as_written():
    class Parser:
        def parse(self, text, tools, *, in_reasoning):
            return ParsedTurn("parsed")

    session = with_texts(Engine(output(), output()), parser=Parser())
    assert run(session.generate()).message == {"role": "assistant", "content": "parsed"}
    session.verbatim = True
    turn = run(session.generate())
    assert turn.message == {"role": "assistant", "content": "10 11"} and turn.parsed.content == "parsed"


def test_the_engine_may_know_the_conversation_by_another_name():
    engine = Engine(output(), output())
    session = with_texts(engine)
    run(session.generate())
    session.engine_session = "e"
    run(session.generate())
    assert [request.session_id for request in engine.requests] == ["t", "e"]


def test_a_loop_that_decides_its_mask_makes_the_loss_scale_ineffective(monkeypatch):
    scaled = []
    monkeypatch.setattr(module, "apply_loss_scale", lambda *words: scaled.append(words))
    session = with_texts(Engine(output()), loss_scale=object())
    run(session.generate())
    session.ignore_loss_scale()
    run(session.finish())
    assert scaled == []


def test_a_delta_is_rendered_behind_ids_that_are_queued():
    session = with_texts(Engine(output(), output()))
    asked = []

    def delta_ids(messages, **keys):
        asked.append((messages, keys["history"], keys["last_ids"]))
        return SimpleNamespace(ids=[50], inserted_end=2)

    session.context.chat.delta_ids = delta_ids
    run(session.generate())
    session.extend_ids([40, 41], {"role": "tool", "content": "x"})
    seen = list(session.messages)
    session.extend(USER)
    run(session.generate())
    assert asked == [(USER, seen, [41])] and session.trajectory.counters["inserted_end_tokens"] == 2


def test_two_turns_may_write_two_messages():
    session = with_texts(Engine(output(), output()), deltas=[[50]])
    run(session.generate())
    session.extend(USER)
    run(session.generate())
    assert (session.trajectory.rounds, session.message_rounds) == ([0, 1], {1: 0, 3: 1})
