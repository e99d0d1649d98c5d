"""Tools in generate functions: those of a row's metadata, those of the run; and the log line of every turn."""

from __future__ import annotations

import json
import logging

import generate_functions
import pytest
from generate_support import CHAT, only, roll_out, rows, runner_of, turn
from test_generate_driver import LIMITS, by_tool_loop, lookup, prompt_of, script_of

from verl_mt.chat.parsers import get_parser
from verl_mt.data.trajectory import Status
from verl_mt.errors import DataError
from verl_mt.extensions.compat.generate.row_tools import RowTools, json_schema
from verl_mt.rollout.turn_log import first_tag
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.registry import ToolSet

SEARCH = {"name": "search", "description": "Search the web", "parameters": {"query": "string"}}
CALCULATOR = {"name": "calculator", "description": "Perform calculations", "parameters": {"expression": "string"}}


# ---- tools of the row


@pytest.mark.cap("C69")
def test_rows_with_different_tools_get_different_prompts_and_only_their_own_tools():
    script = [turn("search"), turn("ok"), turn("search"), turn("ok")]
    runner = runner_of("generate_functions.with_row_tools", script, max_concurrent=1)
    prompts = rows("q", "q")
    prompts[0].row.metadata = {"tools": [SEARCH, CALCULATOR]}
    prompts[1].row.metadata = {"tools": [CALCULATOR]}
    first, second = (g.trajectories[0] for g in roll_out(runner, prompts))
    assert (first.error, second.error) == (None, None)
    shown = [CHAT.decode(t.records[0].token_ids[: t.records[0].num_prompt_tokens]) for t in (first, second)]
    assert shown[0].startswith("You have access to:\n- search: Search the web\n- calculator: Perform calculations\n\n")
    assert shown[1].startswith("You have access to:\n- calculator: Perform calculations\n\n")
    told = []
    for trajectory in (first, second):
        span = trajectory.records[0].turns[2]
        told.append(CHAT.decode(trajectory.records[0].token_ids[span.start : span.end]))
        assert sum(trajectory.records[0].loss_mask[span.start : span.end]) == 0
        assert trajectory.status is Status.COMPLETED
    assert told[0] == "search says ['query']"
    assert told[1] == "<error>tool 'search' is not available here. Available: calculator</error>"


@pytest.mark.cap("C69")
def test_parameters_in_short_become_a_json_schema_and_a_schema_stays_as_it_is():
    short = {"query": "string", "topk": {"type": "integer", "minimum": 1}}
    assert json_schema(short, "x") == {
        "type": "object",
        "properties": {"query": {"type": "string"}, "topk": {"type": "integer", "minimum": 1}},
        "required": ["query", "topk"],
    }
    full = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1]}}},
        "additionalProperties": False,
    }
    assert json_schema(full, "x") == full
    [schema] = RowTools({"tools": [SEARCH]}).schemas()
    assert schema["type"] == "function" and schema["function"]["parameters"] == json_schema(SEARCH["parameters"], "")
    assert len(RowTools({})) == 0 and RowTools({"tools": None}).describe() == ""


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ([{"description": "x"}], r"tools\[0\]: expected {name, description, parameters}"),
        ([SEARCH, SEARCH], r"tools\[1\]: a second tool is named 'search'"),
        ([{"name": "f", "parameters": {"x": "text"}}], r"tools\[0\] \(f\).parameters.x: expected one of string"),
    ],
)
def test_a_row_with_broken_tools_is_refused_by_place_and_name(tools, text):
    with pytest.raises(DataError, match=text):
        RowTools({"tools": tools})


# ---- tools of the run


def call(key):
    return f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': {'key': key}})}</tool_call>"


def with_tools(script):
    generate_functions.SEEN.clear()
    runner = runner_of("generate_functions.with_tools", script, limits=LIMITS)
    tools = ToolSet([lookup])
    runner.tools = ToolExecutor(tools, ToolLimits(), CHAT.tokenizer.encode)
    runner.driver._args._runtime.tools = tools.schemas()
    runner.context = type(runner.context)(**{**vars(runner.context), "parser": get_parser("hermes")})
    return only(roll_out(runner, [prompt_of("q")]))


@pytest.mark.cap("C42", "C53", "C55")
def test_call_tools_runs_the_runs_tools_and_gives_the_tool_loops_records():
    script = script_of([call("a") + call("b"), '<tool_call>{"name": "lookup"</tool_call>', "yes"])
    trajectory, (loop, _) = with_tools(script), by_tool_loop(script, LIMITS)
    assert trajectory.error is None and trajectory.records == loop.records
    assert [a["content"][:8] for a in generate_functions.SEEN[0]["answers"]] == ["all of a", "all of b"]
    assert generate_functions.SEEN[0]["message"]["tool_calls"][1]["id"] == "call_1_1"
    assert generate_functions.SEEN[2] == {"message": {"role": "assistant", "content": "yes"}, "answers": []}
    assert trajectory.counters["tools/lookup/calls"] == loop.counters["tools/lookup/calls"] == 3


def test_call_tools_without_tools_says_where_to_name_them():
    trajectory = only(roll_out(runner_of("generate_functions.with_tools", [turn("x")]), rows("q")))
    assert "call_tools: no tools are configured" in trajectory.error


# ---- the log line of a turn


@pytest.mark.cap("C79")
def test_every_turn_is_a_structured_log_line(caplog):
    with caplog.at_level(logging.DEBUG, logger="verl_mt.turns"):
        script = [turn("<search>capital</search>"), turn("x" * 30, reason="length")]
        runner = runner_of("search_r1_functions.generate", script)
        trajectory = only(roll_out(runner, rows("q")))
    first, second = caplog.records
    assert (first.turn, first.action, first.finish_reason) == (1, "search", "stop")
    assert first.trajectory_id == trajectory.trajectory_id == "s1.00000.00"
    assert first.sampled_tokens == first.response_tokens == first.mask_tokens == first.trained_tokens == 25
    assert (second.turn, second.action, second.finish_reason, second.sampled_tokens) == (2, None, "length", 30)
    record = trajectory.records[0]
    assert second.response_tokens == second.mask_tokens == len(record.token_ids) - record.num_prompt_tokens
    assert second.trained_tokens == 55
    assert "turn 1: action search, stop after 25 tokens; response 25, mask 25, trained 25" in first.getMessage()


def test_the_log_is_silent_unless_it_is_asked_for(caplog):
    runner = runner_of("search_r1_functions.generate", [turn("<answer>x</answer>")])
    roll_out(runner, rows("q"))
    assert [r for r in caplog.records if r.name == "verl_mt.turns"] == []


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("<think><search>x</search></think><answer>y</answer>", "search"),
        ("<think>a</think> <answer>y</answer>", "answer"),
        ("<search>x</answer>", None),
        ("plain", None),
    ],
)
def test_an_action_is_the_first_tag_that_is_closed(text, tag):
    assert first_tag(text) == tag
