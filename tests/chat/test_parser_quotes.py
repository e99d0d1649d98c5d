"""A call that stands inside another call's arguments is not run, and no argument is cut out of another one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from verl_mt.chat.parsers import get_parser
from verl_mt.data.conversation import MalformedCall, ToolCall

TOOLS: list[dict[str, Any]] = [
    {"name": name, "parameters": {"properties": {key: {"type": "string"} for key in keys}}}
    for name, keys in (("write", ("content", "path", "mode")), ("now", ()))
]
NOW = '{"name": "now", "parameters": {}}'
WRITE = '{"name": "write", "parameters": {%s}}'


@pytest.mark.parametrize(
    "arguments",
    [
        f'"flag": True, "plan": [\n  {NOW}\n]',
        f"'steps': [\n{NOW}\n]",
        f'"content": "Example:\n{NOW}\nend"',
        f'"plan": [{NOW} {NOW}]',
        f'"plan": [bad; {NOW}]',
    ],
)
def test_what_stands_between_the_brackets_of_a_broken_llama_call_is_not_run(arguments):
    broken = WRITE % arguments
    for tag in ("", "<|python_tag|>", "Now.\n"):
        turn = get_parser("llama3_json").parse(tag + broken, TOOLS)
        assert [type(action) for action in turn.actions] == [MalformedCall] and turn.malformed[0].name == "write"
        turn = get_parser("llama3_json").parse(f"{tag}{broken}\n{NOW}", TOOLS)
        assert [action.name for action in turn.actions] == ["write", "now"] and turn.calls == [ToolCall("now", {})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "write", "parameters": {"a": x\n',
        '{"name": "write", "parameters": {"a": x; ',
        '[{"name": "write", "parameters": {"a": [x], "b": {}\n',
        '{"name": "write", "parameters": {"a": "x; {"name": "now"\n',
    ],
)
def test_many_llama_calls_that_are_never_closed_are_read_in_no_time(text):
    parser, whole = get_parser("llama3_json"), text + "{}, [], " * 30_000 + "\n"
    for turn in (whole, text * 3000, (text + "{}" * 500) * 200):
        begun = time.process_time()
        parser.parse(turn, TOOLS)
        assert time.process_time() - begun < 0.6
