"""The same scripted turns through the tool loop, a scheduler and a generate function: one record, token for token.

The model's ids are ones that no tokenizer would choose, the weights change in the middle of every turn, and what tools
and users say holds control tokens: whatever a driver decoded and encoded again would show.
"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from generate_support import CHAT, EOS, only, roll_out, runner_of, spelled

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.config.schema import Config
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import SamplingParams, VersionSpan
from verl_mt.data.trajectory import Status, StopReason
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.extensions.compat.rollout.custom_generate import GenerateState, call_tools, post
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler
from verl_mt.extensions.compat.schedulers.driver import SchedulerDriver
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.interactions.base import BaseInteraction
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.drivers import ToolLoopDriver
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.rollout.runner import RolloutRunner
from verl_mt.rollout.session import SessionContext
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.registry import ToolSet

RETRY = "all wrong<|im_end|>, try again"
DRIVERS = ("loop", "scheduler", "function")
RAN: list[str] = []


@function_tool
async def lookup(key: str) -> str:
    """Look a word up.

    Args:
        key: the word
    """
    RAN.append(key)
    if key == "raise":
        raise RuntimeError("all broken")
    return f"all of {key}<|im_end|>"


TOOLS = ToolSet([lookup])


# ---- one user, who says "try again" until the answer is yes, and one program, three times


class Retry(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == "yes"
        return right, "" if right else RETRY, float(right), {}


class AsScheduler(MultiTurnScheduler):
    def __init__(self, retries, runs_all):
        super().__init__()
        self.retries, self.runs_all = retries, runs_all

    async def step(self, infer_request, response_choice, current_turn):
        called = "<tool_call>" in response_choice.message.content
        infer_request.messages += (
            await self.infer_engine.run_tools() if called else [{"role": "user", "content": RETRY}]
        )
        return {"infer_request": infer_request}

    def check_finished(self, infer_request, response_choice, current_turn):
        said = response_choice.message.content
        if self.runs_all:
            return "<tool_call>" not in said
        over = "<tool_call>" not in said and (not self.retries or said == "yes")
        return over or super().check_finished(infer_request, response_choice, current_turn)


async def as_function(args, sample: Sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    start, messages = len(ids), [{"role": "user", "content": "q"}]
    while True:
        reply = await post(url, {"input_ids": ids, "sampling_params": sampling_params})
        ids = ids + reply["output_ids"]
        cut = reply["meta_info"]["finish_reason"]["type"] == "length"
        if not reply["output_ids"] or (cut and not args.runs_all):
            break
        message, said = await call_tools(state.chat.turn_text(reply["output_ids"]))
        messages.append(message)
        if not said and args.retries and message["content"] != "yes":
            said = [{"role": "user", "content": RETRY}]
        if not said:
            break
        ids = ids + state.chat.delta_ids(said, history=messages, tools=state.tools, last_ids=ids).ids
        messages += said
    sample.tokens, sample.response_length = ids, len(ids) - start
    return sample


# ---- the run around them


def call(*keys: str) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': {'key': key}})}</tool_call>" for key in keys
    )


def script_of(*turns) -> list[ScriptedTurn]:
    """A text is a turn that ends; (text, "length") one that is cut. New weights arrive after its second token."""
    script = []
    for k, turn in enumerate(turns):
        text, reason = turn if isinstance(turn, tuple) else (turn, "stop")
        ids = spelled(text) + ([EOS] if reason == "stop" else [])
        log_probs = [-0.1 * (k + 1) - 0.001 * j for j in range(len(ids))]
        versions = [VersionSpan(k, 2), VersionSpan(k + 1, len(ids) - 2)]
        script.append(ScriptedTurn(ids, None, reason, log_probs, 0.0, versions))
    return script


def through(driver: str, script, *, retries=False, runs_all=False, **limits) -> SimpleNamespace:
    """One conversation through one driver."""
    RAN.clear()
    limit = Limits(**{"response_length": 2000, "max_model_len": 4000, **limits})
    engine = ScriptedEngine(script, decode=CHAT.decode)
    context = SessionContext(
        CHAT, engine, limit, get_parser("hermes"), SamplingParams(max_new_tokens=1), SanityMonitor(SanityMode.STRICT)
    )
    config = Config()
    config.actor_rollout_ref.rollout.custom_generate_kwargs = {"retries": retries, "runs_all": runs_all}
    function = runner_of(f"{__name__}.as_function", script, config=config).driver
    function._args._runtime.tools = TOOLS.schemas()
    drivers = {
        "loop": ToolLoopDriver(),
        "scheduler": SchedulerDriver(AsScheduler(retries, runs_all)),
        "function": function,
    }
    runner = RolloutRunner(
        context,
        load_reward("generate_support.one", timeout_s=600.0),
        driver=drivers[driver],
        tools=ToolExecutor(TOOLS, ToolLimits(), CHAT.tokenizer.encode),
        interactions={"retry": Retry({"name": "retry"})} if retries and driver == "loop" else {},
        max_retries=0,
    )
    messages = [{"role": "user", "content": "q"}]
    row = DataRow(messages, "toy", "yes", {}, {"prompt": messages}, 0, "toy", "toy")
    trajectory = only(roll_out(runner, [PromptBuilder(CHAT, TOOLS, 2000, True, "error").build(row)]))
    assert trajectory.error is None, trajectory.error
    return SimpleNamespace(trajectory=trajectory, asked=[r.input_ids for r in engine.requests], ran=list(RAN))


def columns(outcome) -> list[dict]:
    """All that a record is made of, beside the messages that a rewritten history would leave."""
    return [dataclasses.asdict(record) for record in outcome.trajectory.records]


SCENARIOS = {
    "no call": ["yes"],
    "one call": [call("arl"), "yes"],
    "two calls in one turn": ["all " + call("a", "ll"), "yes"],
    "turn after turn": [call("a"), "ar" + call("a"), call("ll", "a", "ll"), "yes"],
    "a call that is no JSON is told to the model": ['<tool_call>{"name": "lookup", "arg</tool_call>', call("a"), "yes"],
    "wrong arguments are told to the model": [
        '<tool_call>{"name": "lookup", "arguments": {"k": 1}}</tool_call>',
        "yes",
    ],
    "no such tool": ['<tool_call>{"name": "nope", "arguments": {}}</tool_call>' + call("a"), "yes"],
    "a tool that raises": [call("raise", "a"), "yes"],
    "a closing tag inside a string": [call("</tool_call>"), "yes"],
    "a last turn that is cut": [call("a"), ("all o", "length")],
}


@pytest.mark.slow
@pytest.mark.parametrize("turns", SCENARIOS.values(), ids=SCENARIOS.keys())
@pytest.mark.parametrize("retries", [False, True], ids=["", "with a user"])
def test_three_drivers_leave_one_record(turns, retries):
    loop, scheduler, function = (through(driver, script_of(*turns), retries=retries) for driver in DRIVERS)
    assert columns(loop) == columns(scheduler) == columns(function)
    assert loop.asked == scheduler.asked == function.asked and len(loop.asked) == len(turns)
    assert loop.ran == scheduler.ran == function.ran
    assert len({o.trajectory.status for o in (loop, scheduler, function)}) == 1
    assert loop.trajectory.turn_texts == scheduler.trajectory.turn_texts == function.trajectory.turn_texts
    (record,) = loop.trajectory.records
    record.check()
    assert record.loss_mask == record.sampled and sum(record.sampled) == sum(
        len(t.token_ids) for t in script_of(*turns)
    )
    assert set(record.policy_versions) == {-1, *range(len(turns) + 1)}


@pytest.mark.parametrize("turns", [["no", "yes"], ["no", call("a"), "no", call("ll", "a") + "ar", "yes"]])
def test_three_drivers_leave_one_record_where_a_user_asks_to_try_again(turns):
    loop, scheduler, function = (through(driver, script_of(*turns), retries=True) for driver in DRIVERS)
    assert columns(loop) == columns(scheduler) == columns(function)
    assert loop.asked == scheduler.asked == function.asked and len(loop.asked) == len(turns)
    assert loop.ran == scheduler.ran == function.ran
    said = [CHAT.decode(loop.asked[-1])]
    assert said[0].count("all wrong") == turns.count("no")  # the user's words arrived, and ended no turn
    assert loop.asked[-1].count(EOS) == said[0].count("<|im_start|>") - 1


@pytest.mark.parametrize(("length", "reason"), [(90, "context_full"), (150, "response_length")])
def test_three_drivers_end_alike_where_the_response_is_full(length, reason):
    turns = [call("a"), call("ll"), "yes"]
    outcomes = [through(driver, script_of(*turns), response_length=length) for driver in DRIVERS]
    assert columns(outcomes[0]) == columns(outcomes[1]) == columns(outcomes[2])
    assert {o.trajectory.status for o in outcomes} == {Status.TRUNCATED}
    assert {o.trajectory.stop_reason for o in outcomes} == {StopReason(reason)}


def test_documented_difference_one_a_call_in_the_last_allowed_turn():
    """The loop does not run it. A scheduler or a function may; nobody is left to read the answer, so the record is
    the same and the difference is what has been run."""
    turns = script_of(call("a"), call("ll"))
    loop, scheduler, function = (through(driver, turns, runs_all=True, max_assistant_turns=2) for driver in DRIVERS)
    assert (loop.ran, scheduler.ran, function.ran) == (["a"], ["a", "ll"], ["a", "ll"])
    assert columns(loop) == columns(scheduler) == columns(function)
    assert loop.trajectory.stop_reason is scheduler.trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert function.trajectory.stop_reason is StopReason.SCHEDULER
    assert [o.trajectory.messages[-1]["role"] for o in (loop, scheduler)] == ["assistant", "tool"]


def test_documented_difference_two_a_call_in_a_turn_cut_by_length():
    """The loop ends there. A scheduler or a function may run it and go on, behind an end of turn nobody sampled."""
    turns = script_of((call("a"), "length"), "yes")
    loop, scheduler, function = (through(driver, turns, runs_all=True) for driver in DRIVERS)
    assert (loop.ran, scheduler.ran, function.ran) == ([], ["a"], ["a"])
    assert (loop.trajectory.status, loop.trajectory.num_turns) == (Status.TRUNCATED, 1)
    for other in (scheduler, function):
        assert (other.trajectory.status, other.trajectory.num_turns) == (Status.COMPLETED, 2)
        assert columns(other) == columns(scheduler)
        (cut,), (record,) = loop.trajectory.records, other.trajectory.records
        end = len(cut.token_ids)
        assert record.token_ids[:end] == cut.token_ids and record.loss_mask[:end] == cut.loss_mask
        assert (record.token_ids[end], record.sampled[end], record.loss_mask[end]) == (EOS, 0, 0)
        assert record.rollout_log_probs[end] == 0.0 and record.policy_versions[end] == -1
