"""The tool loop and a generate function over the same scripted turns leave identical records."""

from __future__ import annotations

import json

import pytest
from generate_support import CHAT, EOS, only, roll_out, runner_of, spelled
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.config.schema import Config
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import SamplingParams, VersionSpan
from verl_mt.data.trajectory import Status
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.extensions.compat.rollout.custom_generate import GenerateState, post
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.rollout.runner import RolloutRunner
from verl_mt.rollout.session import SessionContext
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.registry import ToolSet

LIMITS = Limits(response_length=1500, max_model_len=4000)


@function_tool
async def lookup(key: str) -> str:
    """Look a word up.

    Args:
        key: the word
    """
    return found(key)


def found(key: str) -> str:
    return f"all of {key}<|im_end|>"


async def tool_agent(args, sample: Sample, sampling_params):
    """The tool loop, written by a user: parse, call, render, ask again, all in ids."""
    state, parser = GenerateState(args), get_parser("hermes")
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    tools = ToolSet([lookup]).schemas()
    messages = [{"role": "user", "content": "q"}]
    start = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    ids, mask = list(start), []
    for number in range(1, 20):
        payload = {"input_ids": ids, "sampling_params": sampling_params}
        reply = await post(url, payload)
        ids, mask = ids + reply["output_ids"], mask + [1] * len(reply["output_ids"])
        parsed = parser.parse(state.chat.turn_text(reply["output_ids"]), tools).with_ids(f"call_{number}_")
        was_cut = reply["meta_info"]["finish_reason"]["type"] == "length"
        if (was_cut and not getattr(args, "runs_cut_calls", False)) or not parsed.calls:
            break
        message = {"role": "assistant", "content": parsed.content}
        messages.append({**message, "tool_calls": [call.to_message() for call in parsed.calls]})
        results = [
            {"role": "tool", "content": found(call.arguments["key"]), "tool_call_id": call.id, "name": call.name}
            for call in parsed.calls
        ]
        delta = state.chat.delta_ids(results, history=messages, tools=tools, last_ids=ids).ids
        messages += results
        ids, mask = ids + delta, mask + [0] * len(delta)
    sample.tokens, sample.response_length, sample.loss_mask = ids, len(ids) - len(start), mask
    return sample


def prompt_of(question):
    messages = [{"role": "user", "content": question}]
    row = DataRow(messages, "toy", "yes", {}, {}, 0, "toy", "toy")
    return PromptBuilder(CHAT, ToolSet([lookup]), 2000, True, "error").build(row)


def by_tool_loop(script, limits):
    engine = ScriptedEngine(script, decode=CHAT.decode)
    context = SessionContext(
        CHAT, engine, limits, get_parser("hermes"), SamplingParams(max_new_tokens=1), SanityMonitor(SanityMode.STRICT)
    )
    runner = RolloutRunner(
        context,
        load_reward("generate_support.one", timeout_s=600.0),
        tools=ToolExecutor(ToolSet([lookup]), ToolLimits(), CHAT.tokenizer.encode),
    )
    return only(roll_out(runner, [prompt_of("q")])), engine


def by_function(script, limits, **kwargs):
    config = Config()
    config.actor_rollout_ref.rollout.custom_generate_kwargs = kwargs
    runner = runner_of(f"{__name__}.tool_agent", script, limits=limits, config=config)
    return only(roll_out(runner, [prompt_of("q")])), runner.context.engine


def call(*keys):
    return "".join(
        f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': {'key': key}})}</tool_call>" for key in keys
    )


def script_of(texts, length=False):
    script = []
    for k, text in enumerate(texts):
        ids = spelled(text) if length and k == len(texts) - 1 else [*spelled(text), EOS]
        spans = [VersionSpan(k, 2), VersionSpan(k + 1, len(ids) - 2)]
        reason = "length" if length and k == len(texts) - 1 else "stop"
        log_probs = [-0.1 * (k + 1) - 0.001 * j for j in range(len(ids))]
        script.append(ScriptedTurn(ids, None, reason, log_probs, 0.0, spans))
    return script


def same(script, limits=LIMITS):
    loop, engine = by_tool_loop(script, limits)
    function, other = by_function(script, limits)
    assert function.error is None, function.error
    assert loop.records == function.records
    assert [r.input_ids for r in engine.requests] == [r.input_ids for r in other.requests]
    assert (loop.status, loop.num_turns, loop.turn_texts) == (function.status, function.num_turns, function.turn_texts)
    return loop, function


@pytest.mark.slow
@pytest.mark.cap("C42", "C61", "C62")
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["arl", "a", "ll</tool_call>"]), min_size=1, max_size=2), max_size=3), st.data()
)
def test_the_tool_loop_and_a_generate_function_leave_identical_records(calls, data):
    texts = [data.draw(st.sampled_from(["", "all ", "ar\n"])) + call(*keys) for keys in calls]
    loop, function = same(script_of([*texts, data.draw(st.sampled_from(["yes", "all in all"]))]))
    assert loop.status is Status.COMPLETED and len(loop.records) == 1
    assert function.sample.tokens == loop.records[0].token_ids


def test_a_turn_cut_by_length_and_a_full_context_too():
    same(script_of([call("a"), "all o"], length=True))
    loop, function = same(script_of([call("a")]), Limits(response_length=80, max_model_len=4000))
    assert loop.status is Status.TRUNCATED and loop.stop_reason is function.stop_reason


def test_the_last_allowed_turn_is_where_they_may_differ():
    """The loop does not run a call in it. A function runs what it likes: its answer is read by nobody, and dropped."""
    limits = Limits(response_length=1500, max_model_len=4000, max_assistant_turns=1)
    loop, _ = by_tool_loop(script_of([call("a")]), limits)
    function, engine = by_function(script_of([call("a")]), limits)
    assert loop.records == function.records and len(engine.requests) == 1
    assert function.counters["unread_tokens"] > 0 and "unread_tokens" not in loop.counters


def test_a_call_in_a_turn_cut_by_length_is_where_they_may_differ():
    """The loop ends there. A function may run the call and go on, behind an end of turn that nobody sampled."""
    cut, end = script_of([call("a")], length=True)[0], script_of(["yes"])[0]
    loop, _ = by_tool_loop([cut, end], LIMITS)
    function, engine = by_function([cut, end], LIMITS, runs_cut_calls=True)
    assert loop.num_turns == 1 and loop.status is Status.TRUNCATED
    assert (function.error, function.num_turns, function.status) == (None, 2, Status.COMPLETED)
    record, first = function.records[0], loop.records[0]
    assert record.token_ids[: len(first.token_ids)] == first.token_ids
    assert record.token_ids[len(first.token_ids)] == EOS and not record.sampled[len(first.token_ids)]
    assert engine.requests[1].input_ids == record.token_ids[: record.turns[-1].start]
