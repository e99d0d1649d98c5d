"""Agents that talk to an OpenAI-compatible URL, through the real client and real HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from generate_support import CHAT, EOS, one, roll_out, rows, spelled, turn

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.config.checks import check
from verl_mt.config.compose import compose
from verl_mt.data.requests import SamplingParams
from verl_mt.data.run_files import row_to_trajectory, trajectory_to_row
from verl_mt.data.trajectory import StopReason
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import ConfigError, DeadlineError
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.drivers import ToolLoopDriver
from verl_mt.rollout.runner import RolloutRunner
from verl_mt.rollout.session import SessionContext
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.registry import ToolSet
from verl_mt.user_code import CallTimeout, UserCode

agents = pytest.importorskip("agent_functions", reason="openai is not installed", exc_type=ImportError)
from verl_mt.extensions.toolbox.agent.driver import AgentDriver  # noqa: E402

pytestmark = pytest.mark.slow  # commands, servers, many configurations

FILE = Path(__file__).with_name("agent_functions.py")


@pytest.fixture(autouse=True)
def forget():
    agents.SEEN.clear()


def runner_of(driver, script, *, limits=None, engine=None, parser=None, **keys) -> RolloutRunner:
    return RolloutRunner(
        context=SessionContext(
            chat=CHAT,
            engine=engine or ScriptedEngine(script, decode=CHAT.decode),
            limits=limits or Limits(response_length=3000, max_model_len=4000),
            parser=parser,
            sampling=SamplingParams(max_new_tokens=1),
            sanity=SanityMonitor(SanityMode.STRICT),
        ),
        reward=load_reward(f"{one.__module__}.one", timeout_s=600.0),
        driver=driver,
        **keys,
    )


def driver_of(name: str) -> AgentDriver:
    return AgentDriver(f"agent_functions.{name}", get_parser("hermes"))


def through(name: str, script, *, question="q", columns=None, **keys):
    runner = runner_of(driver_of(name), script, **keys)
    (group,) = roll_out(runner, rows(question, **(columns or {})))
    return group.trajectories[0], runner.context.engine


def call(key: str) -> str:
    return f'<tool_call>{{"name": "lookup", "arguments": {json.dumps({"key": key})}}}</tool_call>'


def trained(record) -> list[int]:
    return [i for i, m in zip(record.token_ids, record.loss_mask) if m]


def test_what_was_sampled_is_what_is_recorded_and_read_again():
    """`ll` and `ar` were sampled letter by letter, which no tokenizer would do; the next request reads those ids."""
    trajectory, engine = through("two_questions", [turn("hello"), turn("are")])
    (record,) = trajectory.records
    assert trained(record) == [*spelled("hello"), EOS, *spelled("are"), EOS]
    first, second = (r.input_ids for r in engine.requests)
    assert second[: len(first) + 6] == [*first, *spelled("hello"), EOS]
    assert record.token_ids[: len(second)] == second
    assert trajectory.stop_reason is StopReason.FINISHED and trajectory.reward == 1.0
    assert trajectory.turn_texts == ["hello", "are"]


@function_tool
def lookup(key: str) -> str:
    """Look a word up.

    Args:
        key: the word
    """
    return f"value of {key}<|im_end|>"


@pytest.mark.parametrize(
    "script",
    [
        [turn("yes")],
        [turn(call("a")), turn("yes")],
        [turn("well " + call("all") + call("b")), turn(call("car")), turn("done")],
        [turn(call("a")), turn("cut", reason="length")],
    ],
)
def test_an_agent_and_the_tool_loop_make_the_same_records(script):
    agent, _ = through("calls_tools", script)
    tools = ToolSet([lookup])
    loop = runner_of(
        ToolLoopDriver(), script, parser=get_parser("hermes"),
        tools=ToolExecutor(tools, ToolLimits(timeout_s=600.0), CHAT.tokenizer.encode),
    )  # fmt: skip
    messages = [{"role": "user", "content": "q"}]
    prompt = replace(rows("q")[0], tools=[agents.TOOL], ids=CHAT.prompt_ids(messages, [agents.TOOL]), toolset=tools)
    (group,) = roll_out(loop, [prompt])
    looped = group.trajectories[0]
    assert agent.records == looped.records
    assert agent.stop_reason == looped.stop_reason and agent.turn_texts == looped.turn_texts
    assert agent.tools == [agents.TOOL]


@pytest.mark.parametrize("name", ["forgets", "edits", "asks_twice", "with_sub_agent"])
def test_another_history_is_a_new_record_and_every_token_is_trained_once(name):
    trajectory, engine = through(name, [turn("one"), turn("two")])
    first, second = trajectory.records
    assert trained(first) == [*spelled("one"), EOS] and trained(second) == [*spelled("two"), EOS]
    for record, request in zip(trajectory.records, engine.requests):
        assert record.token_ids[: len(request.input_ids)] == request.input_ids
        record.check()
    assert trajectory.sanity is None
    again = row_to_trajectory(trajectory_to_row(trajectory, step=1))
    assert [(r.tools, r.messages) for r in again.records] == [(r.tools, r.messages) for r in trajectory.records]


def test_text_of_a_tool_or_a_rewritten_history_never_becomes_control_tokens():
    trajectory, _ = through("calls_tools", [turn(call("a")), turn("yes")])
    (record,) = trajectory.records
    given = [i for i, s in zip(record.token_ids, record.sampled) if not s]
    assert given.count(EOS) == sum(m["role"] != "assistant" for m in trajectory.messages) + 1  # the tools' system turn


def test_a_stream_says_the_same():
    trajectory, _ = through("streams", [turn("so " + call("a"))])
    assert trajectory.info["agent"] == {
        "text": "so ", "calls": ['{"key": "a"}'], "finish": "tool_calls", "tokens": len("so " + call("a")) + 1
    }  # fmt: skip


def test_requests_of_one_conversation_wait_for_each_other():
    trajectory, engine = through("in_parallel", [turn("a"), turn("b"), turn("c")])
    assert len(trajectory.records) == 3 == len(engine.requests)
    assert sorted(CHAT.decode(trained(r)) for r in trajectory.records) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


def test_many_conversations_at_once_keep_apart():
    questions = [f"question {k}" for k in range(12)]
    engine = ScriptedEngine([turn(f"x{k}") for k in range(24)], decode=CHAT.decode)
    runner = runner_of(driver_of("two_questions"), [], engine=engine)
    groups = roll_out(runner, rows(*questions))
    for question, group in zip(questions, groups):
        (trajectory,) = group.trajectories
        assert trajectory.status == "completed" and len(trajectory.records) == 1
        text = CHAT.decode(trajectory.records[0].token_ids)
        assert question in text and sum(other in text for other in questions if other not in question) <= 1
    assert sorted(t for g in groups for x in g.trajectories for t in x.turn_texts) == sorted(f"x{k}" for k in range(24))


def test_limits_and_stops_of_a_request_count_and_its_sampling_does_not():
    trajectory, engine = through("with_settings", [turn("hi")])
    sampling = engine.requests[0].sampling
    assert (sampling.max_new_tokens, sampling.stop, sampling.temperature) == (7, ("END",), 1.0)
    assert trajectory.counters["agent/replaced_temperature"] == trajectory.counters["agent/replaced_seed"] == 1
    (reply,) = agents.SEEN
    assert [item.logprob for item in reply.choices[0].logprobs.content] == pytest.approx([-0.5, -0.51, -0.52])
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"n": 2}, "n is 2: one choice per request"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice is"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"extra_body": {"guided_regex": "x"}}, "guided_regex: not offered"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(fields, text):
    trajectory, engine = through("asks_for", [turn("x")], columns={"fields": fields})
    assert trajectory.status == "failed" and not engine.requests
    assert "BadRequestError" in trajectory.error
    import re

    assert re.search(text, trajectory.error), trajectory.error


def test_images_are_refused_by_name():
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    trajectory, _ = through("asks_for", [turn("x")], columns={"fields": {}, "content": content})
    assert "parts of type image_url are not offered" in trajectory.error


def test_a_limit_ends_the_trajectory_whatever_the_agent_makes_of_it():
    limits = Limits(response_length=3000, max_model_len=4000, max_assistant_turns=2)
    trajectory, engine = through("never_stops", [turn(call("a"))] * 2, limits=limits)
    assert trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS and len(engine.requests) == 2
    assert trajectory.status == "completed" and trajectory.reward == 1.0


def test_a_cut_turn_is_told_as_such_and_ends_the_trajectory():
    trajectory, _ = through("calls_tools", [turn("so lo", reason="length")])
    assert agents.SEEN[0].choices[0].finish_reason == "length"
    assert trajectory.stop_reason is StopReason.RESPONSE_LENGTH or trajectory.stop_reason.status == "truncated"


@pytest.mark.parametrize(
    "name, text",
    [("asks_nothing", "returned without asking"), ("raises", "the agent's own mistake")],
)
def test_an_agent_that_fails_loses_only_its_own_trajectory(name, text):
    trajectory, _ = through(name, [turn("x")])
    assert trajectory.status == "failed" and text in trajectory.error and "row 1" in trajectory.error


@pytest.fixture
def late_when_it_hangs(monkeypatch):
    """The time of an agent is over when it hangs, however long it needed until then."""
    run, seconds = UserCode.run, 600.0
    agents.HANGS.clear()

    async def ends(self, function, args, kwargs, *, timeout_s, **more):
        if function.__name__ != "run":
            return await run(self, function, args, kwargs, timeout_s=timeout_s, **more)
        assert timeout_s == seconds
        call = asyncio.ensure_future(run(self, function, args, kwargs, timeout_s=1e6, **more))
        while not agents.HANGS.is_set():
            await asyncio.sleep(0.001)
        call.cancel()
        raise CallTimeout(f"timed out after {timeout_s:g} s")

    monkeypatch.setattr(UserCode, "run", ends)
    return Limits(response_length=3000, max_model_len=4000, max_seconds=seconds)


def test_an_agent_that_hangs_is_cut_by_the_clock(late_when_it_hangs):
    limits = late_when_it_hangs
    trajectory, _ = through("hangs", [turn("x")], limits=limits)
    assert trajectory.stop_reason is StopReason.TIME_LIMIT and trajectory.reward == 1.0


def test_a_deadline_is_an_error_where_bits_are_promised(late_when_it_hangs):
    limits = late_when_it_hangs
    runner = runner_of(driver_of("hangs"), [turn("x")], limits=limits)
    runner.context = replace(runner.context, deterministic=True)
    with pytest.raises(DeadlineError, match="no deadline may fire"):
        roll_out(runner, rows("q"))


def test_samples_of_one_row_do_not_see_what_an_agent_writes_into_it():
    runner = runner_of(driver_of("writes_into_its_row"), [turn("a"), turn("b")])
    (group,) = roll_out(runner, rows("q"), n=2)
    assert [CHAT.decode(t.records[0].token_ids).count("!") for t in group.trajectories] == [1, 1]


def test_a_blocking_agent_with_the_blocking_client():
    trajectory, _ = through("plain", [turn("hello")])
    assert trajectory.info["agent"] == "hello"


def test_an_engine_that_goes_away_starts_the_trajectory_again():
    trajectory, _ = through("retries", [turn("gone", reason="abort"), turn("here")])
    assert trajectory.status == "completed" and trajectory.counters["retries"] == 1
    assert CHAT.decode(trained(trajectory.records[0])) == "here<|im_end|>"


def test_the_server_is_gone_when_no_conversation_is_left():
    runner = runner_of(driver_of("two_questions"), [turn("a"), turn("b")])

    async def go():
        from verl_mt.rollout.runner import RolloutPlan

        async for _ in runner.run(RolloutPlan(rows("q"), 1, "s1")):
            pass
        return [t.get_name() for t in asyncio.all_tasks()]

    assert "agent server" not in asyncio.run(go())


def test_a_function_that_takes_no_url_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"wrong_signature.*cannot be called as \(row, base_url, api_key\)"):
        driver_of("wrong_signature")


@pytest.mark.parametrize(
    "override, text",
    [
        (
            "actor_rollout_ref.rollout.tool_kwargs.tools_config_file=x.yaml",
            "brings its own tools",
        ),
        ("actor_rollout_ref.rollout.multi_turn.scheduler=math_tip_trick", "Remove one of them"),
        ("actor_rollout_ref.rollout.mode=sync", "agents ask when they like"),
    ],
)
def test_what_does_not_go_with_an_agent_is_refused(override, text):
    own = [f"actor_rollout_ref.rollout.agent_function_path={FILE}:calls_tools", "data.train_files=x.jsonl"]
    with pytest.raises(ConfigError, match=text):
        check(compose([*own, override], config_name="ppo_trainer"))
