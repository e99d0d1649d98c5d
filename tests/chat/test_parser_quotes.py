"""A call that stands inside another call's arguments is not run, and no argument is cut out of another one."""

from __future__ import annotations

from typing import Any

import pytest
from counted_work import parser_work

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "write", "parameters": {"a": x\n',
        '{"name": "write", "parameters": {"a": x; ',
        '[{"name": "write", "parameters": {"a": [x], "b": {}\n',
        '{"name": "write", "parameters": {"a": "x; {"name": "now"\n',
    ],
)
def test_many_llama_calls_that_are_never_closed_are_read_in_the_time_of_their_length(text, monkeypatch):
    work, read = parser_work(monkeypatch), get_parser("llama3_json").parse
    for turn_of in (
        lambda size: text + "{}, [], " * 10 * size + "\n",
        lambda size: text * size,
        lambda size: (text + "{}" * 5 * size) * 10,
        lambda size: (text + "{}" * 50) * size,
    ):
        short, long = (work.of(read, turn_of(size), TOOLS) for size in (100, 400))
        assert long < 6 * short


TAGGED = {
    "qwen3_coder": (
        "<tool_call>\n<function=write>\n{}\n</function>\n</tool_call>", "<parameter={}>\n", "\n</parameter>\n",
    ),
    "seed_oss": ("<seed:tool_call><function=write>{}</function></seed:tool_call>", "<parameter={}>", "</parameter>"),
    "glm45": ("<tool_call>write\n{}</tool_call>", "<arg_key>{}</arg_key><arg_value>", "</arg_value>"),
    "deepseek_v32": (
        '<｜DSML｜function_calls><｜DSML｜invoke name="write">{}</｜DSML｜invoke></｜DSML｜function_calls>',
        '<｜DSML｜parameter name="{}" string="true">',
        "</｜DSML｜parameter>",
    ),
}  # fmt: skip
"""A call around its arguments, the opening of one, and its closing tag."""


@pytest.mark.parametrize("inside", [
    "{content}doc:\n{path}evil{close}end{close}",
    "{content}doc:\n{path}evil{close}{close}",
    "{content}doc:\n{path}evil{close}{mode}w{close}end{close}",
    "{content}doc:\n{path}evil{close} or\n{mode}w{close}end{close}",
    "{mode}w{close}{content}doc:\n{path}evil{close}end{close}",
    "{content}doc:\n{path}evil{close}end{close}{mode}w{close}",
])  # fmt: skip
@pytest.mark.parametrize("parser", sorted(TAGGED))
def test_a_value_that_quotes_an_argument_of_its_tool_is_not_taken_apart(parser, inside):
    call, opening, close = TAGGED[parser]
    text = inside.format(**{key: opening.format(key) for key in ("content", "path", "mode")}, close=close)
    turn = get_parser(parser).parse(call.format(text), TOOLS)
    assert turn.calls == [] and [action.name for action in turn.malformed] == ["write"], turn
    assert "clos" in turn.malformed[0].error
    forgotten = f"{opening.format('content')}a\n{opening.format('path')}b\n{opening.format('mode')}c{close}"
    (found,) = get_parser(parser).parse(call.format(forgotten), TOOLS).calls
    assert found.arguments == {"content": "a", "path": "b", "mode": "c"}


@pytest.mark.parametrize("behind", [
    '<｜DSML｜parameter name="path" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>',
    '<｜DSML｜parameter name="path" string="true">x</｜DSML｜parameter>',
    "</｜DSML｜invoke>",
    '{"path": "x"}\n</｜DSML｜invoke>',
])  # fmt: skip
def test_an_invoke_tag_that_closes_itself_before_its_arguments_is_not_run_without_them(behind):
    text = f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="write"/>\n{behind}\n</｜DSML｜function_calls>'
    turn = get_parser("deepseek_v32").parse(text, TOOLS)
    assert turn.calls == [] and turn.content == text and "closes itself" in turn.malformed[0].error
