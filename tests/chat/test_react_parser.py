"""ReAct text: pairs of an action and its input."""

from __future__ import annotations

from typing import Any

import pytest

from verl_mt.chat.parsers import get_parser
from verl_mt.data.conversation import ParsedTurn, ToolCall

KEYS: dict[str, Any] = {key: {} for key in ("i", "s", "b")}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": KEYS}}},
    {"type": "function", "function": {"name": "ask", "parameters": {"properties": {"query": {"type": "string"}}}}},
]


def parse(text: str) -> ParsedTurn:
    return get_parser("react").parse(text, TOOLS)


@pytest.mark.cap("C34")
def test_react_pairs_of_action_and_input_are_calls():
    pair = "Action: calculator\nAction Input: 1+2"
    assert parse(pair).calls == [ToolCall("calculator", {"input": "1+2"})]
    turn = parse(f"Thought: both.\n{pair}\n{pair}\nObservation:")
    assert turn.calls == [ToolCall("calculator", {"input": "1+2"})] * 2
    assert turn.content == f"Thought: both.\n{pair}\n{pair}\nObservation:"
    assert parse("Thought: x\nFinal Answer: 3").actions == []
    assert get_parser("react").stop_strings == ("Observation:",)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("Action: ask\nAction Input: who?", ToolCall("ask", {"query": "who?"})),
        (
            'Action: `ask`\nAction Input:\n```json\n{"query": "a\\nAction: b"}\n```',
            ToolCall("ask", {"query": "a\nAction: b"}),
        ),
        ('Action: ask\nAction Input: {"query": "x"}\nObservation: made up', ToolCall("ask", {"query": "x"})),
        (
            'Action: f\nAction Input: {"s": "\\nAction: g\\nAction Input: h"}',
            ToolCall("f", {"s": "\nAction: g\nAction Input: h"}),
        ),
        ('Action: f\nAction Input: {\n "i": 1\n}\n', ToolCall("f", {"i": 1})),
        ("Action: f\nAction Input:", ToolCall("f", {})),
        ("Action: ask\nAction Input: two\nlines\nThought: so", ToolCall("ask", {"query": "two\nlines"})),
    ],
)
def test_react_inputs_are_json_or_the_only_argument(text, call):
    assert parse(text) == ParsedTurn(text, actions=[call])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Thought: x\nAction: ask\n", "has no input"),
        ("Action: f\nAction Input: 1+2", "not a JSON object"),
        ('Action: f\nAction Input: {"i": }', "not valid JSON"),
        ("Action:\nAction Input: 3", "name of the tool is missing"),
    ],
)
def test_a_malformed_react_action_says_what_is_wrong(text, says):
    turn = parse(text)
    assert turn.calls == [] and says in turn.malformed[0].error and turn.content == text
    assert "i, s, b" in turn.malformed[0].error or "Action: f" not in text


def test_an_action_none_before_a_final_answer_is_no_call():
    assert parse("Thought: done\nAction: None\nFinal Answer: 3").actions == []
