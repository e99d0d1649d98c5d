"""The ledger: layouts L1-L7 of the reference numbers, and what it refuses."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rollout_support import Engine, Recorder, Texts, fixed_session, output, with_texts

from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.data.conversation import ParsedTurn, ToolCall
from verl_mt.data.requests import GenerationOutput, SamplingParams, Timings, VersionSpan
from verl_mt.data.trajectory import Status, StopReason, TimeSpan
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import DeadlineError, EngineGoneError, LedgerError
from verl_mt.rollout import session as module
from verl_mt.rollout.context import Limits
from verl_mt.rollout.session import RolloutSession
from verl_mt.rollout.turn_log import first_tag

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


def test_the_session_of_the_core_has_two_verbs():
    public = {name for name, member in vars(RolloutSession).items() if callable(member) and not name.startswith("_")}
    assert public - {"start", "end", "finish", "count"} == {"generate", "extend"}


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


class Clock:
    """Of the session; an engine turns it on."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_a_request_names_the_turn_and_says_all_limits(clock):
    engine = Engine(output(cached_tokens=2, replica="r1"), output((12, 13, 14)), output())
    sampling = SamplingParams(1, temperature=0.5, stop=("a", "b"))
    limits = Limits(response_length=50, max_model_len=30, max_seconds=40.0, request_timeout_s=25.0)
    session = with_texts(engine, deltas=[[50, 51]], sampling=sampling, limits=limits, seed=3)
    session.attempt, session._started_s = 2, clock.now_s
    run(session.generate(max_tokens=27, stop=["b", "c"]))
    clock.now_s += 30.0
    session.extend(USER)
    run(session.generate(max_tokens=5))
    first, second = engine.requests
    assert (first.input_ids, second.input_ids) == ([1, 2, 3], [1, 2, 3, 10, 11, 50, 51])
    assert (first.request_id, second.request_id) == ("t/2/1", "t/2/2")
    assert (first.session_id, second.session_id) == ("t", "t") and first.media == second.media == {}
    assert (first.deadline_s, second.deadline_s) == (25.0, 10.0)
    assert (first.limit_s, second.limit_s) == (40.0, 10.0)
    digests = [hashlib.blake2b(f"3/t/{turn}/0".encode(), digest_size=8).digest() for turn in (1, 2)]
    seeds = [int.from_bytes(digest, "big") // 2 for digest in digests]
    assert first.sampling == replace(sampling, max_new_tokens=27, seed=seeds[0], stop=("a", "b", "c"))
    assert second.sampling == replace(sampling, max_new_tokens=5, seed=seeds[1])
    trajectory = session.trajectory
    assert trajectory.counters == {
        "cached_tokens": 2, "cached_tokens/1": 2, "input_tokens": 10, "input_tokens/1": 3, "input_tokens/2": 7,
    }  # fmt: skip
    assert (trajectory.num_turns, trajectory.replicas, trajectory.turn_texts) == (2, ["r1"], ["10 11", "12 13 14"])
    assert session.record.policy_versions == [-1, -1, -1, 5, 6, -1, -1, 5, 6, 6]
    assert [(span.kind, span.turn) for span in session.record.turns] == [
        ("prompt", 0), ("assistant", 1), ("observation", 1), ("assistant", 2),
    ]  # fmt: skip
    assert not session.ended


@pytest.mark.parametrize(
    ("asked", "reason"), [(3, "MAX_TOKENS_PER_TURN"), (4, "RESPONSE_LENGTH"), (9, "RESPONSE_LENGTH")]
)
def test_a_turn_that_is_cut_where_its_caller_said_is_cut_by_the_turns_limit(asked, reason):
    engine = Engine(output(finish_reason="length"))
    session = with_texts(engine, limits=Limits(response_length=4, max_model_len=100))
    run(session.generate(max_tokens=asked))
    assert engine.requests[0].sampling.max_new_tokens == min(asked, 4)
    assert session.trajectory.stop_reason is StopReason[reason]


def test_no_turn_begins_when_all_are_used():
    engine = Engine(output(), output())
    session = with_texts(engine, limits=Limits(response_length=50, max_model_len=100, max_assistant_turns=2))
    assert session.turns_left == 2
    run(session.generate())
    run(session.generate())
    assert session.turns_left == 0 and not session.ended
    assert run(session.generate()) is None and session.trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert fixed_session(engine).turns_left is None


@pytest.mark.parametrize(("passed", "asked"), [(39.5, 1), (40.0, 0), (41.0, 0)])
def test_no_turn_begins_when_the_time_is_over(clock, passed, asked):
    engine = Engine(output())
    session = with_texts(engine, limits=Limits(50, 100, max_seconds=40.0))
    session._started_s = clock.now_s - passed
    turn = run(session.generate())
    assert (turn is not None, len(engine.requests)) == (bool(asked), asked)
    assert session.trajectory.stop_reason is (None if asked else StopReason.TIME_LIMIT)
    if asked:
        assert engine.requests[0].deadline_s == 0.5


def test_no_deadline_may_fire_in_a_deterministic_run(clock):
    session = with_texts(Engine(), limits=Limits(50, 100, max_seconds=40.0), deterministic=True)
    session._started_s = clock.now_s - 40.0
    with pytest.raises(DeadlineError, match=r"turn 0\): rollout\.max_seconds=40\.0 was over"):
        run(session.generate())
    engine = Engine(output(finish_reason="abort"), clock=clock, seconds=8.0)
    session = with_texts(engine, limits=Limits(50, 100, request_timeout_s=8.0), deterministic=True)
    with pytest.raises(DeadlineError, match=r"the request's deadline of 8\.0 s was over"):
        run(session.generate())


@pytest.mark.parametrize(("limits", "warned"), [({"request_timeout_s": 8.0}, [8.0]), ({"max_seconds": 8.0}, [])])
def test_a_turn_that_the_deadline_cuts_is_kept_and_counted(clock, monkeypatch, limits, warned):
    said = []
    monkeypatch.setattr(module, "warn_of_deadline", said.append)
    engine = Engine(output(finish_reason="abort"), clock=clock, seconds=7.96)
    session = with_texts(engine, limits=Limits(50, 100, **limits))
    session._started_s = clock.now_s
    assert run(session.generate()).finish_reason == "abort"
    assert session.trajectory.stop_reason is StopReason.TIME_LIMIT
    assert session.trajectory.counters["deadlines"] == 1 and said == warned
    assert session.record.sampled == [0, 0, 0, 1, 1]


def test_an_abort_before_the_deadline_is_the_engines_own(clock):
    engine = Engine(output(finish_reason="abort"), clock=clock, seconds=7.9)
    session = with_texts(engine, limits=Limits(50, 100, request_timeout_s=8.0))
    session._started_s = clock.now_s
    with pytest.raises(EngineGoneError, match="t/0/1: the engine aborted the request"):
        run(session.generate())
    assert session.trajectory.num_turns == 0 and "deadlines" not in session.trajectory.counters


@pytest.mark.parametrize(
    ("timings", "spans"),
    [
        (Timings(1.0, 2.0, 4.0), [("queue", 0.0, 4.0), ("prefill", 4.0, 6.0), ("decode", 6.0, 10.0)]),
        (Timings(), [("queue", 0.0, 10.0)]),
        (Timings(0.0, 6.0, 6.0), [("prefill", 0.0, 6.0), ("decode", 6.0, 12.0)]),
        (Timings(0.0, 10.0, 0.0), [("prefill", 0.0, 10.0)]),
        (Timings(0.0, 0.5, 9.0), [("queue", 0.0, 0.5), ("prefill", 0.5, 1.0), ("decode", 1.0, 10.0)]),
    ],
)
def test_a_turns_time_is_split_by_its_phases(clock, timings, spans):
    engine = Engine(output(timings=timings), clock=clock, seconds=10.0)
    session = with_texts(engine)
    run(session.generate())
    assert session.trajectory.time_spans == [TimeSpan(phase, 100.0 + a, 100.0 + b, 1) for phase, a, b in spans]


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("<search>x</search>", "search"),
        ("<think>a</think><answer>b</answer><search>c</search>", "answer"),
        ("</b><a>x</a>", "a"),
        ("</a><a>", None),
        ("<think>x</think>", None),
        ("", None),
    ],
)
def test_the_first_tag_is_one_that_is_opened_and_closed(text, tag):
    assert first_tag(text) == tag


def test_each_turn_is_one_log_line_with_its_numbers(caplog):
    engine = Engine(output(), output((12,), "length"))
    session = with_texts(engine, deltas=[[50]])
    run(session.generate())
    assert not caplog.records
    session.extend(USER)
    session.record.clear_mask([3])
    with caplog.at_level(logging.DEBUG, "verl_mt.turns"):
        run(session.generate())
    (line,) = [record for record in caplog.records if record.name == "verl_mt.turns"]
    numbers = {
        "trajectory_id": "t", "turn": 2, "action": None, "finish_reason": "length", "sampled_tokens": 1,
        "response_tokens": 4, "mask_tokens": 4, "trained_tokens": 2,
    }  # fmt: skip
    assert {name: getattr(line, name) for name in numbers} == numbers


class Parser:
    """Reads what it is told to read."""

    calls_in_content = False
    reasoning_key = "reasoning_content"

    def __init__(self, parsed, **changed):
        self.parsed, self.asked = parsed, []
        vars(self).update(changed)

    def parse(self, text, tools, *, in_reasoning):
        self.asked.append((text, tools, in_reasoning))
        return self.parsed


CALLS = [ToolCall("f", {"x": 1}), ToolCall("g", {}, id="own")]
SHOWN = [
    {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    {"id": "own", "type": "function", "function": {"name": "g", "arguments": {}}},
]
THOUGHT = ParsedTurn("c", "why")
BOTH = ParsedTurn("c", "why", CALLS)


@pytest.mark.parametrize(
    ("parsed", "parser", "can", "message"),
    [
        (ParsedTurn("c"), {}, {}, {"content": "c"}),
        (THOUGHT, {}, {}, {"content": "10 11"}),
        (BOTH, {}, {}, {"content": "c", "tool_calls": SHOWN}),
        (BOTH, {"calls_in_content": True}, {}, {"content": "c"}),
        (THOUGHT, {"reasoning_key": "thinking"}, {}, {"content": "c", "thinking": "why"}),
        (THOUGHT, {}, {"reasoning_content": "kept", "reasoning_key": "r"}, {"content": "c", "r": "why"}),
        (ParsedTurn("c"), {"reasoning_key": "thinking"}, {}, {"content": "c"}),
    ],
)  # fmt: skip
def test_a_message_holds_what_the_parser_read(parsed, parser, can, message):
    tool = {"name": "f"}
    made = Parser(parsed, **parser)
    session = with_texts(Engine(output()), parser=made, tools=[tool])
    session.context.chat.prefilled_reasoning = True
    session.context.chat.capabilities = SimpleNamespace(**{"reasoning_content": "ignored", **can})
    turn = run(session.generate())
    assert turn.message == session.messages[-1] == {"role": "assistant", **message}
    assert (turn.text, turn.parsed.actions) == (
        "10 11",
        [replace(call, id=call.id or "call_1_0") for call in parsed.calls],
    )
    assert made.asked == [("10 11", [tool], True)]


def test_the_key_of_reasoning_is_the_templates_else_the_parsers():
    session = with_texts(Engine())
    assert session.reasoning_key is None
    session = with_texts(Engine(), parser=Parser(None))
    assert session.reasoning_key is None
    session = with_texts(Engine(), parser=Parser(None, reasoning_key="thinking"))
    assert session.reasoning_key == "thinking"
    session.context.chat.capabilities = SimpleNamespace(reasoning_content="kept", reasoning_key="r")
    assert session.reasoning_key == "r"


def test_a_placeholder_that_the_model_sampled_is_refused():
    session = with_texts(Engine(output((10, 65))))
    session.context.chat.placeholder_ids = frozenset({65, 66})
    with pytest.raises(LedgerError, match="t: the model sampled 'A', which stands for an image"):
        run(session.generate())
    assert session.record.token_ids == [1, 2, 3]


def test_the_engines_text_becomes_ids_of_its_version(monkeypatch):
    asked = []
    monkeypatch.setattr(
        module, "turn_ids", lambda chat, history, message, **keys: asked.append((history, message, keys)) or [8, 8]
    )
    texts = [GenerationOutput(None, None, reason, spans, text=text) for reason, spans, text in (
        ("stop", [VersionSpan(7, 1), VersionSpan(8, 1)], "one"), ("stop", [], "two#"), ("length", [], "three"),
    )]  # fmt: skip
    session = with_texts(Engine(*texts), sampling=SamplingParams(1, stop=("#", "!")), tools=[{"name": "f"}])
    for _ in range(3):
        run(session.generate())
    question, tools = {"role": "user", "content": "q"}, [{"name": "f"}]
    said = [{"role": "assistant", "content": text} for text in ("one", "two#", "three")]
    assert asked == [
        ([question, *said[:k]], said[k], {"tools": tools, "complete": complete})
        for k, complete in enumerate([True, False, False])
    ]
    record = session.record
    assert (record.token_ids[3:], record.policy_versions[3:], record.has_log_probs) == (
        [8] * 6,
        [7, 7, 4, 4, 4, 4],
        False,
    )
    assert session.trajectory.turn_texts == ["one", "two#", "three"]


TOOL = {"name": "f"}


def test_images_of_the_first_prompt_are_recorded_at_their_places():
    image = {"role": "user", "content": [{"type": "image", "image": "i"}]}
    session = with_texts(Engine())
    session.start([1, 9, 2], [image], [TOOL])
    assert [made.start for made in session.record.media] == [1]
    assert session.trajectory.messages == [image] and session.trajectory.messages[0] is not image
    assert session.trajectory.records is session.ledger.records and session.trajectory.tools == [TOOL]


def test_a_count_of_nothing_is_no_counter():
    session = with_texts(Engine())
    session.count("a", 0)
    session.count("b", 2)
    session.count("b", 3)
    assert session.trajectory.counters == {"b": 5}


def test_what_the_model_never_read_is_counted_at_the_end():
    session = with_texts(Engine(output()))
    run(session.generate())
    session.extend([*USER, *USER])
    session.end(StopReason.FINISHED)
    run(session.finish())
    assert session.trajectory.counters["unread_messages"] == 2
    assert session.trajectory.sanity is None
    session = with_texts(Engine(output()))
    run(session.generate())
    session.record.sampled[0] = 1
    session.record.loss_mask.pop()
    with pytest.raises(LedgerError, match="columns of one record differ"):
        run(session.finish())


@pytest.mark.parametrize("reason", [None, StopReason.FINISHED])
def test_a_record_that_ended_itself_is_not_checked_as_cut(monkeypatch, reason):
    recorder = Recorder(monkeypatch)
    session = with_texts(Engine(output()))
    run(session.generate())
    session.trajectory.stop_reason = reason
    session._checked()
    assert [keys["stop_length"] for keys in recorder.asked] == [False]


@pytest.mark.parametrize(
    ("train", "truncated", "scaled", "turns", "called"),
    [
        (True, False, True, 1, ["prompt", "scale"]), (True, True, False, 1, []),
        (False, False, True, 0, []), (False, False, False, 1, []),
        (False, True, True, 1, ["scale"]),
    ],
)  # fmt: skip
def test_masks_are_changed_where_the_run_asks_for_it(monkeypatch, train, truncated, scaled, turns, called):
    found = []
    told = {}
    monkeypatch.setattr(
        module, "train_prompt_assistants", lambda *words: told.update(p=words) or found.append("prompt") or 3
    )
    monkeypatch.setattr(module, "apply_loss_scale", lambda *words: told.update(s=words) or found.append("scale"))
    session = with_texts(
        Engine(output()), train_prompt_assistants=train, loss_scale=object() if scaled else None, deterministic=True
    )
    session.prompt_truncated = truncated
    if turns:
        run(session.generate())
    run(session.finish())
    assert found == called
    assert session.trajectory.counters.get("trained_given_tokens", 0) == 3 * ("prompt" in called)
    context, trajectory = session.context, session.trajectory
    if "prompt" in called:
        assert told["p"] == (context.chat, trajectory.records[0], [{"role": "user", "content": "q"}], None)
    if "scale" in called:
        assert told["s"] == (context.loss_scale, context.chat, trajectory)


class Production(Texts):
    """Renders users' messages in brackets and the model's in parentheses; `changes` is what production does to them."""

    changes = staticmethod(lambda text: text)

    def full_text(self, messages, tools=None, *, add_generation_prompt=False):
        assert add_generation_prompt, "some templates render a history in another way where nothing follows"
        pairs = {"user": "[{}]", "assistant": "({})"}
        text = "".join(pairs[message["role"]].format(message["content"]) for message in messages)
        return self.changes(text) + "("

    def turn_text(self, ids):
        return self.decode(ids).removesuffix(")")


def numbers(text):
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("changes", "forks"),
    [
        (lambda text: text, False),
        (lambda text: text.replace("(A)", "(B)"), True),
        (lambda text: text.replace("[q]", "[r]"), False),
        (lambda text: text.replace("[q]", "[r]") if "A" in text else text, True),
    ],
    ids=["same", "another turn", "another prompt in both", "another prompt behind a turn"],
)
def test_a_record_is_forked_where_production_shows_another_text(changes, forks):
    session = with_texts(Engine(output(numbers("A)")), output()), tools=[TOOL], use_inference_chat_template=True)
    chat = Production([[50]])
    chat.changes = changes
    session = RolloutSession(replace(session.context, chat=chat), session.trajectory)
    session.start(numbers("[q]("), [{"role": "user", "content": "q"}], [TOOL])
    run(session.generate())
    old, seen = session.record, list(session.messages)
    session.extend(USER)
    run(session.generate())
    assert len(session.trajectory.records) == 1 + forks
    assert old.messages == (seen if forks else []) and session._prompt_messages == (3 if forks else 1)
    if forks:
        assert chat.mixed == (seen[:1], [seen[1], *USER], [TOOL]) and session.record.token_ids[:3] == [7, 7, 7]


def test_a_record_is_never_forked_unless_the_run_asks_for_it():
    session = with_texts(Engine(output(), output()), deltas=[[50]])
    session._production_differs = None
    run(session.generate())
    session.extend(USER)
    run(session.generate())
    assert len(session.trajectory.records) == 1


@pytest.mark.parametrize(
    ("mode", "deterministic", "beside"),
    [(SanityMode.OFF, False, False), (SanityMode.STRICT, True, False), (SanityMode.STRICT, False, True)],
)
def test_only_a_check_of_a_run_that_a_clock_may_decide_has_a_thread_of_its_own(
    monkeypatch, mode, deterministic, beside
):
    threads = []
    monkeypatch.setattr(module, "check", lambda *_, **__: threads.append(threading.get_ident()))
    session = with_texts(Engine(output()), sanity=SanityMonitor(mode), deterministic=deterministic)
    run(session.generate())
    run(session.finish())
    assert [thread != threading.get_ident() for thread in threads] == [beside]


def test_a_delta_is_rendered_behind_what_the_record_holds():
    session = with_texts(Engine(output(), output(), output()), tools=[TOOL])
    asked = []

    def delta_ids(messages, **keys):
        asked.append((messages, keys))
        return SimpleNamespace(ids=[50], inserted_end=2)

    session.context.chat.delta_ids = delta_ids
    run(session.generate())
    seen = list(session.messages)
    session.extend(USER)
    run(session.generate())
    assert asked == [(USER, {"history": seen, "tools": [TOOL], "last_ids": [11]})]
    seen, session.trajectory.tools = list(session.messages), []
    session.extend(USER)
    run(session.generate())
    assert asked[1] == (USER, {"history": seen, "tools": None, "last_ids": [11]})
    assert session.trajectory.counters["inserted_end_tokens"] == 4


def test_the_log_line_of_a_turn_names_its_calls_or_its_first_tag(caplog):
    session = with_texts(Engine(output(), output((60, 97, 62, 60, 47, 97, 62))), parser=Parser(BOTH))
    with caplog.at_level(logging.DEBUG, "verl_mt.turns"):
        run(session.generate())
        session.context.parser.parsed = ParsedTurn("c")
        session.context.chat.turn_text = session.context.chat.decode
        run(session.generate())
    assert [record.action for record in caplog.records if record.name == "verl_mt.turns"] == ["f, g", "a"]
