"""The drivers agree: the same scripted turns through the tool loop and through a scheduler make the same records."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from scheduler_lab import CHAT, prompt_of, roll_out, runner_for, said

from verl_mt.config.compose import compose
from verl_mt.data.run_files import trajectory_to_row
from verl_mt.data.trajectory import StopReason
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import EngineError
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler
from verl_mt.extensions.compat.schedulers.driver import SchedulerDriver
from verl_mt.rollout.context import Limits
from verl_mt.rollout.drivers import DRIVERS, DriverParts, ToolLoopDriver, build_driver
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.registry import ToolSet

RAN: list[str] = []


@function_tool
def lookup(key: str) -> str:
    """Look a word up.

    Args:
        key: the word
    """
    RAN.append(key)
    if key == "raise":
        raise RuntimeError("broken pipe")
    if key == "gone":
        raise EngineError("the index went away")
    return f"value of {key}<|im_end|>"


TOOLS = ToolSet([lookup])


def call(key: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': {'key': key}})}</tool_call>"


class CallsTools(MultiTurnScheduler):
    """The tool loop, written as a scheduler."""

    async def step(self, infer_request, response_choice, current_turn):
        infer_request.messages += await self.infer_engine.run_tools()
        return {"infer_request": infer_request}

    def check_finished(self, infer_request, response_choice, current_turn):
        called = "<tool_call>" in response_choice.message.content
        return not called or super().check_finished(infer_request, response_choice, current_turn)


class RunsEverything(CallsTools):
    """Another opinion: calls of cut turns, and of the last allowed turn, are run too."""

    def check_finished(self, infer_request, response_choice, current_turn):
        return "<tool_call>" not in response_choice.message.content


def through(driver, turns, max_calls=None, **limits):
    RAN.clear()
    executor = ToolExecutor(TOOLS, ToolLimits(timeout_s=600.0, max_calls=max_calls), CHAT.tokenizer.encode)
    runner = runner_for(
        ScriptedEngine(turns), driver, limits=Limits(**{"response_length": 4000, "max_model_len": 8000, **limits}),
        tools=executor, max_retries=0,
    )  # fmt: skip
    prompt = PromptBuilder(CHAT, TOOLS, 4000, True, "error").build(replace(prompt_of().row))
    (trajectory,) = roll_out(runner, [prompt])
    return trajectory, list(RAN)


def records(trajectory):
    row = trajectory_to_row(trajectory, step=0)
    return row["records"], row["status"], row["reward"], row["turn_texts"]


@pytest.mark.parametrize(
    "turns",
    [
        [said("yes")],
        [said(call("a")), said("yes")],
        [said("thinking " + call("a") + call("b")), said(call("raise")), said("yes")],
        [said('<tool_call>{"name": "lookup", "arguments": {bad</tool_call>'), said("yes")],
        [said('<tool_call>{"name": "nope", "arguments": {}}</tool_call>'), said("no")],
        [said(call("gone"))],
        [said(call("a")), said("cut", "length")],
    ],
)
def test_a_scheduler_and_the_tool_loop_make_the_same_records(turns):
    looped, ran = through(ToolLoopDriver(), turns)
    scheduled, ran_too = through(SchedulerDriver(CallsTools()), turns)
    assert records(scheduled) == records(looped)
    assert ran_too == ran
    tools = {k: v for k, v in looped.counters.items() if k.startswith("tools/") and not k.endswith("latency_s")}
    assert {k: scheduled.counters.get(k) for k in tools} == tools


def test_a_call_in_the_last_allowed_turn_is_run_by_a_scheduler_that_says_so():
    turns, limits = [said(call("a")), said(call("b"))], {"max_assistant_turns": 2}
    looped, ran = through(ToolLoopDriver(), turns, **limits)
    scheduled, ran_too = through(SchedulerDriver(RunsEverything()), turns, **limits)
    assert (ran, ran_too) == (["a"], ["a", "b"])
    assert looped.stop_reason is scheduled.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    # The observation that no turn is left to read is in the messages only.
    assert scheduled.messages[-1]["role"] == "tool"
    assert [r["token_ids"] for r in records(scheduled)[0]] == [r["token_ids"] for r in records(looped)[0]]


def test_a_call_in_a_turn_cut_by_length_is_run_by_a_scheduler_that_says_so():
    turns, limits = [said(call("a"), "length"), said("yes")], {"max_tokens_per_turn": len(call("a"))}
    looped, ran = through(ToolLoopDriver(), turns, **limits)
    scheduled, ran_too = through(SchedulerDriver(RunsEverything()), turns, **limits)
    assert (ran, ran_too) == ([], ["a"])
    assert looped.stop_reason is StopReason.MAX_TOKENS_PER_TURN
    assert scheduled.stop_reason is StopReason.SCHEDULER
    assert scheduled.counters["inserted_end_tokens"] == 1


def test_run_tools_without_tools_says_which_key_names_them():
    (trajectory,) = roll_out(runner_for(ScriptedEngine([said(call("a"))]), CallsTools()), [prompt_of()])
    assert "no tools are configured (actor_rollout_ref.rollout.tool_kwargs.tools_config_file)" in trajectory.error


@pytest.mark.cap("C88")
def test_the_limit_of_tool_calls_holds_for_schedulers_too():
    turns = [said(call("a")), said(call("b")), said(call("c"))]
    looped, ran = through(ToolLoopDriver(), turns, max_calls=1)
    scheduled, ran_too = through(SchedulerDriver(CallsTools()), turns, max_calls=1)
    assert records(scheduled) == records(looped)
    assert (ran, ran_too) == (["a"], ["a"])
    assert looped.stop_reason is scheduled.stop_reason is StopReason.MAX_TOOL_CALLS


class OwnDriver(ToolLoopDriver):
    @classmethod
    def build(cls, config, parts):
        assert parts.media == {"images"}
        return cls()


def test_a_driver_is_a_line_in_the_registry(monkeypatch):
    parts = DriverParts(None, frozenset({"images"}))
    assert type(build_driver(compose([]), parts)) is ToolLoopDriver
    monkeypatch.setitem(DRIVERS, "multi_turn.tool_parser", f"{__name__}:OwnDriver.build")
    assert type(build_driver(compose([]), parts)) is OwnDriver


@pytest.mark.slow
def test_a_run_imports_no_driver_of_another_family():
    code = (
        "import sys; import verl_mt.trainer.build; from verl_mt.rollout.drivers import *; from verl_mt.config.schema "
        "import Config; build_driver(Config(), DriverParts()); "
        "print([m for m in sys.modules if m.startswith(('verl_mt.rollout.agent', 'verl_mt.rollout.generate', "
        "'verl_mt.rollout.schedulers'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
