"""ReAct text: pairs of an action and its input."""

from __future__ import annotations

from typing import Any

import pytest

from verl_mt.chat.parsers import get_parser, prompted
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


SOME_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"i": {}, "s": {}}}}},
    {"name": "ask", "parameters": {"properties": {"query": {"type": "string"}}}},
    {"name": "two", "parameters": {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "zz"]}},
    {"name": "none"},
]
ADVICE = ". Write a line with Action: and the name of a tool, and below it a line with Action Input: and its arguments"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Action: ask\nAction Input: {"query": "x"} y', [("ask", {"query": '{"query": "x"} y'})]),
        ('Action: ask\nAction Input: {"query": "x"}\n\nThought: z', [("ask", {"query": "x"})]),
        ('Action: ask\nAction Input: {"query": "x"}z\n', [("ask", {"query": '{"query": "x"}z'})]),
        (
            'Action: f\nAction Input: {"i": 1}z',
            [
                (
                    'Action: f\nAction Input: {"i": 1}z',
                    "f",
                    "the input is not a JSON object",
                    ": one JSON object with the keys i, s.",
                )
            ],
        ),
        ('Action: f\nAction Input: ```\n{"i": 1}\n```', [("f", {"i": 1})]),
        (
            'Action: f\nAction Input: ```json\n{"i": 1} z\n```',
            [
                (
                    'Action: f\nAction Input: ```json\n{"i": 1} z\n```',
                    "f",
                    "the input is not a JSON object",
                    ": one JSON object with the keys i, s.",
                )
            ],
        ),
        (
            'Action: f\nAction Input: ```json\n{"i": }\n```',
            [
                (
                    'Action: f\nAction Input: ```json\n{"i": }\n```',
                    "f",
                    "the input is not valid JSON (Expecting value at character 7)",
                    ": one JSON object with the keys i, s.",
                )
            ],
        ),
        ("Action: ask\nAction Input: ```json\n[1]\n```", [("ask", {"query": "[1]"})]),
        ("Action: ask\nAction Input: ```\ntext \n```", [("ask", {"query": "text "})]),
        ("Action: ask\nAction Input: ```\n x\n  ```", [("ask", {"query": " x"})]),
        ("Action: ask\nAction Input: ```\ntext", [("ask", {"query": "```\ntext"})]),
        (
            'Action: f\nAction Input: ```\n{"i": 1}\n``',
            [
                (
                    'Action: f\nAction Input: ```\n{"i": 1}\n``',
                    "f",
                    "the input is not a JSON object",
                    ": one JSON object with the keys i, s.",
                )
            ],
        ),
        ("Action: two\nAction Input: 3", [("two", {"a": 3})]),
        (
            'Action: two\nAction Input: {"a": x}',
            [
                (
                    'Action: two\nAction Input: {"a": x}',
                    "two",
                    "the input is not valid JSON (Expecting value at character 7)",
                    ": one JSON object with the keys a, b.",
                )
            ],
        ),
        ("Action: two\nAction Input: ", [("two", {"a": ""})]),
        ("Action: none\nAction Input: ", [("none", {})]),
        (
            "Action: none\nAction Input: x",
            [("Action: none\nAction Input: x", "none", "the input is not a JSON object", ": one JSON object.")],
        ),
        ("Action: nope\nAction Input: ", [("nope", {})]),
        ("Action: nope\nAction Input: x", [("nope", {"input": "x"})]),
        (
            'Action: nope\nAction Input: {"a": x}',
            [
                (
                    'Action: nope\nAction Input: {"a": x}',
                    "nope",
                    "the input is not valid JSON (Expecting value at character 7)",
                    ": one JSON object.",
                )
            ],
        ),
        ('Action: ask\nAction Input: {"a": x}', [("ask", {"query": '{"a": x}'})]),
        ("Action: ask\nAction Input: ", [("ask", {})]),
        (
            "Action: f\nAction Input: 3",
            [
                (
                    "Action: f\nAction Input: 3",
                    "f",
                    "the input is not a JSON object",
                    ": one JSON object with the keys i, s.",
                )
            ],
        ),
        ("Action: f\nAction Input: ", [("f", {})]),
        (" Action:  `ask` \n Action Input: x", [("ask", {"query": "x"})]),
        ('Action: ["ask"]\nAction Input: x', [("ask", {"query": "x"})]),
        (
            "Action: \nAction Input: x\nThought: y",
            [("Action: \nAction Input: x\n", None, "the name of the tool is missing", ".")],
        ),
        ("Action: ask\n\n\nAction Input: x", [("ask", {"query": "x"})]),
        ("Action: ask", [("Action: ask", "ask", "the action 'ask' has no input", ".")]),
        (
            "Action: ask\nThought: y\nAction: ask\nAction Input: x",
            [("Action: ask\n", "ask", "the action 'ask' has no input", "."), ("ask", {"query": "x"})],
        ),
        (
            "Action: nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
            [
                (
                    "Action: nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
                    "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
                    "the action 'nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn' has no input",
                    ".",
                )
            ],
        ),
        ("Action: ask\nFinal Answer: 3", []),
        ("Action: None\nFinal Answer: 3\nAction: ask\nAction Input: x", [("ask", {"query": "x"})]),
        ("xAction: ask\nAction Input: x", []),
        ("Action: ask\nAction Input: x\n  Observation: y", [("ask", {"query": "x"})]),
        ("Action: ask\nAction Input:   x  ", [("ask", {"query": "x"})]),
        ('Action: f\nAction Input:   {"i": 1}  ', [("f", {"i": 1})]),
        ('Action: f\nAction Input: \n{"i": 1}', [("f", {"i": 1})]),
    ],
)
def test_an_input_is_an_object_the_one_argument_that_it_can_be_or_an_error(text, expected):
    turn = get_parser("react").parse(text, SOME_TOOLS)
    found = []
    for action in turn.actions:
        if isinstance(action, ToolCall):
            found.append((action.name, action.arguments))
        else:
            problem, _, advice = action.error.removeprefix("The tool call was not run: ").partition(ADVICE)
            found.append((action.text, action.name, problem, advice))
    assert (found, turn.content) == (expected, text)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("a<search> q </search>b<answer>x</answer>", (1, 21, "search", " q ")),
        ("<answer></answer><search>q</search>", (0, 17, "answer", "")),
        ("<search>q<answer>x</answer>", (9, 27, "answer", "x")),
        ("</search><search>q</search>", (9, 27, "search", "q")),
        ("</answer><answer>", None),
        ("<search>", None),
    ],
)
def test_the_first_whole_action_of_search_r1_is_found(text, action):
    assert prompted._first_action(text, 0) == action
    found = get_parser("search_r1").find_calls("zz" + text, 2, ())
    assert (found and (found.start - 2, found.end - 2)) == (action and action[:2])
    calls = get_parser("search_r1").parse(text).calls
    assert calls == ([ToolCall("search", {"query": "q"})] if action and action[2] == "search" else [])
