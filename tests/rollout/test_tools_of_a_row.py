"""A row names the tools it may use, and a trajectory has a budget of calls: prompt, executor and loop agree."""

from __future__ import annotations

import json

import pytest
import tool_runs
from tool_runs import CHAT

from verl_mt.config.compose import compose
from verl_mt.data.dataset import DataRow
from verl_mt.data.trajectory import Status, StopReason, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import rollout_metrics
from verl_mt.errors import DataError
from verl_mt.rewards import Reward
from verl_mt.rewards.adapters import adapt
from verl_mt.rollout.drivers import has_own_loop
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.rollout.stream import RolloutStream
from verl_mt.tools.function_tool import FunctionTool, function_tool
from verl_mt.tools.toolset import ToolSet

RUNS: list[str] = []


@function_tool
def north(step: int) -> str:
    """Go north.

    Args:
        step: how far
    """
    RUNS.append(f"north {step}")
    return f"north {step}"


@function_tool
def south(step: int) -> str:
    """Go south.

    Args:
        step: how far
    """
    RUNS.append(f"south {step}")
    return f"south {step}"


def call(name: str, step: int | str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'step': step}})}</tool_call>"


def roll_out(turns: list[str], *, max_calls: int | None = None, **extra) -> Trajectory:
    """One trajectory whose model says `turns`, of a row with this `extra_info`."""
    RUNS.clear()
    return tool_runs.roll_out(turns, ToolSet([north, south]), extra_info=extra, max_calls=max_calls)[0]


def prompt_text(trajectory: Trajectory) -> str:
    record = trajectory.records[0]
    return CHAT.decode(record.token_ids[: record.num_prompt_tokens])


def answers(trajectory: Trajectory) -> list[str]:
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


@pytest.mark.cap("C69")
def test_the_prompt_shows_the_tools_of_the_row_and_no_other_can_be_called():
    done = roll_out([call("south", 1) + call("north", 2), "done"], tool_selection=["north"])
    assert "Go north." in prompt_text(done) and "Go south." not in prompt_text(done)
    assert answers(done) == ["<error>tool 'south' is not available here. Available: north</error>", "north 2"]
    assert RUNS == ["north 2"] and done.status is Status.COMPLETED
    assert done.counters["tools/unknown/model_errors"] == 1


def test_a_row_without_a_selection_gets_all_tools_and_one_with_an_empty_selection_none():
    both = roll_out(["done"])
    assert "Go north." in prompt_text(both) and "Go south." in prompt_text(both)
    none = roll_out([call("north", 1), "done"], tool_selection=[])
    assert "Go north." not in prompt_text(none)
    assert answers(none) == ["<error>tool 'north' is not available here. Available: (none)</error>"] and RUNS == []


def test_the_prompt_shows_some_of_the_tools_that_a_row_may_call():
    done = roll_out([call("south", 1), "done"], prompt_tools=["north"])
    assert "Go north." in prompt_text(done) and "Go south." not in prompt_text(done)
    assert answers(done) == ["south 1"] and RUNS == ["south 1"]
    failed = roll_out(["done"], tool_selection=["north"], prompt_tools=["south"])
    assert "row 4: extra_info.prompt_tools: unknown tool 'south'; did you mean 'north'?" in failed.error


def test_a_row_that_selects_what_does_not_exist_fails_alone_and_says_so():
    failed = roll_out(["done"], tool_selection=["nroth"])
    assert failed.stop_reason is StopReason.ERROR
    assert "toy.jsonl, row 4: extra_info.tool_selection: unknown tool 'nroth'; did you mean 'north'?" in failed.error


@pytest.mark.cap("C88")
def test_a_spent_budget_is_told_once_and_calling_again_ends_the_trajectory():
    turns = [call("north", 1), call("north", 2) + call("south", 3), call("south", 4), "never said"]
    done = roll_out(turns, max_calls=2)
    assert RUNS == ["north 1", "north 2"]
    assert answers(done)[2].startswith("<error>not run: all 2 tool calls of this conversation are used up")
    assert done.stop_reason is StopReason.MAX_TOOL_CALLS and done.status is Status.COMPLETED and done.num_turns == 3
    metrics = rollout_metrics([TrajectoryGroup("g", "p", [done])], ["north", "south"])
    assert metrics["tools/south/over_budget"] == 1 and metrics["stop/max_tool_calls"] == 1
    assert metrics["tools/north/calls"] == 2


def test_a_model_that_answers_when_its_calls_are_used_up_finishes_as_any_other():
    done = roll_out([call("north", 1) + call("north", 2), "the answer"], max_calls=1)
    assert done.stop_reason is StopReason.FINISHED and done.turn_texts[-1] == "the answer"
    assert sum(done.records[0].loss_mask) == sum(done.records[0].sampled)


def test_a_row_chooses_the_tool_loop_or_one_answer_by_its_agent_name():
    turns, tools = [call("north", 1), "done"], ToolSet([north, south])
    RUNS.clear()
    (looped,) = tool_runs.roll_out(turns, tools, raw={"agent_name": "tool_agent"})
    assert RUNS == ["north 1"] and looped.num_turns == 2
    (once,) = tool_runs.roll_out(turns, tools, raw={"agent_name": "single_turn_agent"})
    assert RUNS == ["north 1"] and once.num_turns == 1 and once.stop_reason is StopReason.FINISHED
    assert "Go north." in prompt_text(looped) and "Go north." not in prompt_text(once)


@pytest.mark.parametrize("name", ["tool_agnt", 3])
def test_an_agent_name_that_is_no_loop_is_refused_with_file_and_row_unless_a_loop_of_the_users_runs(name):
    row = DataRow([{"role": "user", "content": "q"}], "toy", raw={"agent_name": name}, index=3, file="toy.jsonl")
    builder = PromptBuilder(CHAT, ToolSet([north]), 6000, True, "error")
    with pytest.raises(DataError, match=r"toy\.jsonl, row 4: column agent_name is .*single_turn_agent, tool_agent"):
        builder.keep([row])
    theirs = PromptBuilder(CHAT, ToolSet([north]), 6000, True, "error", reads_agent_name=False)
    assert theirs.keep([row]) == [row]


@pytest.mark.slow
def test_only_the_tool_loop_reads_the_agent_name():
    for setting in ("custom_generate_function_path=my.f", "agent_function_path=my.f", "multi_turn.scheduler=my.S"):
        keys = [f"actor_rollout_ref.rollout.{key}" for key in (setting, "tool_kwargs.tools_config_file=null")]
        assert has_own_loop(compose(keys).actor_rollout_ref.rollout)
    assert not has_own_loop(compose([]).actor_rollout_ref.rollout)


@pytest.mark.parametrize("convert", [False, True])
def test_a_number_as_text_is_told_to_the_model_or_reaches_the_tool_converted_and_counted(convert):
    RUNS.clear()
    turns = [call("north", "2"), "done"]
    (done,) = tool_runs.roll_out(turns, ToolSet([north]), convert_arguments=convert)
    assert (["north 2"] if convert else []) == RUNS
    assert done.counters.get("tools/north/converted_arguments", 0) == convert
    assert done.counters.get("tools/north/model_errors", 0) == (not convert)
    assert json.loads(turns[0].removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"] == {"step": "2"}


class Counts(Reward):
    """A native reward."""

    def __init__(self):
        self.seen = []

    async def score(self, items):
        self.seen += [item.extra_info["num_turns"] for item in items]
        return [{"score": 1.0} for _ in items]


@pytest.mark.parametrize(
    ("turns", "rounds"),
    [(["done"], 0), ([call("north", 1) + call("south", 1), call("north", 2), "done"], 2)],
)
def test_a_reward_with_verls_parameters_counts_turns_as_there_and_a_native_one_the_assistants(turns, rounds):
    seen, native = [], Counts()

    def one(data_source, solution_str, ground_truth, extra_info):
        seen.append(extra_info)
        return 1.0

    def several(data_sources, solution_strs, ground_truths, extra_infos):
        seen.extend(extra_infos)
        return [1.0] * len(extra_infos)

    for function in (one, several):
        reward = adapt(function, label="counts", kwargs={}, timeout_s=600.0)
        RUNS.clear()
        (done,) = tool_runs.roll_out(turns, ToolSet([north, south]), reward=reward)
        assert done.reward == 1.0, done.error
    assert [(i["num_turns"] - 2) / 2 for i in seen] == [rounds, rounds]  # as verl's retool counts tool rounds
    assert [i["assistant_turns"] for i in seen] == [len(turns)] * 2
    (done,) = tool_runs.roll_out(turns, ToolSet([north, south]), reward=native)
    assert native.seen == [done.num_turns] == [len(turns)]


def test_tools_are_closed_once_when_the_run_is_over():
    closed = []

    class Connected(FunctionTool):
        async def close(self):
            closed.append(self.name)

    stream = RolloutStream(tool_runs.make_runner([], ToolSet([Connected(north.function), Connected(south.function)])))
    assert closed == []
    stream.close()
    stream.close()
    assert sorted(closed) == ["north", "south"]
