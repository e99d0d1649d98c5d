"""Calls between control tokens: where each ends, and what is left as content."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.parsers.base import BadCall
from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall

TYPES = {"s": {"type": "string"}, "i": {"type": "integer"}, "o": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": TYPES}}}]
TAGS = {
    "kimi_k2": {"{B}": "<|tool_calls_section_begin|>", "{E}": "<|tool_calls_section_end|>",
                "{C}": "<|tool_call_begin|>", "{D}": "<|tool_call_end|>", "{S}": "<|tool_call_argument_begin|>"},
    "deepseek_v3": {"{B}": "<｜tool▁calls▁begin｜>", "{E}": "<｜tool▁calls▁end｜>",
                    "{C}": "<｜tool▁call▁begin｜>", "{D}": "<｜tool▁call▁end｜>", "{S}": "<｜tool▁sep｜>"},
    "deepseek_v32": {"{I}": "<｜DSML｜invoke", "{J}": "</｜DSML｜invoke>", "{O}": "<｜DSML｜parameter",
                     "{X}": "</｜DSML｜parameter>"},
    "gpt_oss": {},
}  # fmt: skip
"""Short names of the control tokens in the tables below."""


def read(parser: str, text: str) -> tuple[list[Any], str, str | None]:
    """Name, arguments and id of each call, or text, name and problem of what is none; content and reasoning."""
    for short, tag in TAGS[parser].items():
        text = text.replace(short, tag)
    turn = get_parser(parser).parse(text, TOOLS)
    found: list[Any] = []
    for action in turn.actions:
        if isinstance(action, ToolCall):
            found.append((action.name, action.arguments, action.id))
        else:
            problem = action.error.removeprefix("The tool call was not run: ").partition(". Write")[0]
            found.append((shortened(parser, action.text), action.name, problem))
    assert json.dumps(found)
    return found, shortened(parser, turn.content), turn.reasoning


def shortened(parser: str, text: str) -> str:
    for short, tag in TAGS[parser].items():
        text = text.replace(tag, short)
    return text


KIMI: list[Any] = [
    ("a{B}{C}f:0{S}{}{D}{E}b", [("f", {}, "f:0")], "ab", None),
    ("a{C}f:0{S} {} {D} {E}b", [("f", {}, "f:0")], "ab", None),
    ("a{B} {C} functions.f {S}{}{D}b", [("f", {}, "")], "ab", None),
    ("{B}x{E}b", [("{B}x{E}", None, "there is no call in it")], "{B}x{E}b", None),
    ("{B}x{D} {E}b", [("{B}x{D} {E}", None, "there is no call in it")], "{B}x{D} {E}b", None),
    ("{B}x{C}f{S}{}{D}", [("{B}x", None, "there is no call in it"), ("f", {}, "")], "{B}x", None),
    (
        "{C}f{S}{}x{D} {E}b",
        [("{C}f{S}{}x{D} {E}", "f", "it should be closed behind its arguments, but it says 'x'")],
        "{C}f{S}{}x{D} {E}b",
        None,
    ),
    (
        "{C}f{S}{}x{E}b",
        [("{C}f{S}{}x{E}", "f", "it should be closed behind its arguments, but it says 'x'")],
        "{C}f{S}{}x{E}b",
        None,
    ),
    (
        "{C}f{S}{}x",
        [("{C}f{S}{}x", "f", "it should be closed behind its arguments, but it says 'x'")],
        "{C}f{S}{}x",
        None,
    ),
    (
        "{C}f{S}{}x{C}f{S}{}{D}",
        [("{C}f{S}{}x", "f", "it should be closed behind its arguments, but it says 'x'"), ("f", {}, "")],
        "{C}f{S}{}x",
        None,
    ),
    (
        "{C}f{S}{}x{E}{D}b",
        [("{C}f{S}{}x{E}{D}", "f", "it should be closed behind its arguments, but it says 'x'")],
        "{C}f{S}{}x{E}{D}b",
        None,
    ),
    (
        "{C}f{S}[1]{D}b",
        [("{C}f{S}[1]{D}", "f", "the arguments must be an object; they are a list")],
        "{C}f{S}[1]{D}b",
        None,
    ),
    (
        "{C}{S}{}{D}",
        [("{C}{S}{}{D}", None, "the name of the tool is missing or not set apart from the arguments")],
        "{C}{S}{}{D}",
        None,
    ),
    (
        "{C}f{S}{}",
        [("{C}f{S}{}", "f", "it should be closed behind its arguments, but the text ends")],
        "{C}f{S}{}",
        None,
    ),
    ("{B}{E}", [("{B}{E}", None, "there is no call in it")], "{B}{E}", None),
    ("{B}", [("{B}", None, "there is no call in it")], "{B}", None),
    (
        "{C}x{C}x{D}{D}",
        [
            ("{C}x", None, "the name of the tool is missing or not set apart from the arguments"),
            ("{C}x{D}", None, "the name of the tool is missing or not set apart from the arguments"),
        ],
        "{C}x{C}x{D}{D}",
        None,
    ),
    ("{B}x{E}{C}f{S}{}{D}", [("{B}x{E}", None, "there is no call in it"), ("f", {}, "")], "{B}x{E}", None),
    (
        "{C}f{S}x{C}y{E}",
        [
            ("{C}f{S}x", "f", "the arguments are not valid JSON (Expecting value at character 1)"),
            ("{C}y{E}", None, "the name of the tool is missing or not set apart from the arguments"),
        ],
        "{C}f{S}x{C}y{E}",
        None,
    ),
]


@pytest.mark.parametrize(("text", "actions", "content", "reasoning"), KIMI)
def test_calls_in_a_section_of_kimi_end_behind_their_closing_tokens(text, actions, content, reasoning):
    assert read("kimi_k2", text) == (actions, content, reasoning)


DEEPSEEK: list[Any] = [
    ("{C} f {S} {} {D}", [("f", {}, "")], "", None),
    ("{C}function{S} f \n```json\n{}\n```{D}", [("f", {}, "")], "", None),
    ("{C}function{S}f\n```\n{}\n``` {D}", [("f", {}, "")], "", None),
    ("{C}function{S}f\n```json\n{}{D}", [("f", {}, "")], "", None),
    (
        "{C}f{D}{S}{}{D}",
        [("{C}f{D}", None, "the name of the tool is not set apart from the rest")],
        "{C}f{D}{S}{}{D}",
        None,
    ),
    ("{C}f{S}{}{D}{C}function{S}g\n```json\n{}\n```{D}", [("f", {}, ""), ("g", {}, "")], "", None),
    (
        "{C}f{S}x{D}```json\n{}",
        [("{C}f{S}x{D}", "f", "the arguments are not valid JSON (Expecting value at character 1)")],
        "{C}f{S}x{D}```json\n{}",
        None,
    ),
    (
        '{C}f{S}{"s": "```json\n"}{D}',
        [
            (
                '{C}f{S}{"s": "```json\n"}{D}',
                "f",
                "the arguments are not valid JSON (Invalid control character at character 15)",
            )
        ],
        '{C}f{S}{"s": "```json\n"}{D}',
        None,
    ),
    (
        "{C}f{S}{}```{D}",
        [("{C}f{S}{}```{D}", "f", "it should be closed behind its arguments, but it says '```'")],
        "{C}f{S}{}```{D}",
        None,
    ),
    (
        "{C}f{S}g\n```json\n{}",
        [("{C}f{S}g\n```json\n{}", "g", "it should be closed behind its arguments, but the text ends")],
        "{C}f{S}g\n```json\n{}",
        None,
    ),
    ("{C}f", [("{C}f", None, "the name of the tool is not set apart from the rest")], "{C}f", None),
    (
        "{C}f{S}",
        [("{C}f{S}", "f", "the arguments are not valid JSON (Expecting value at character 1)")],
        "{C}f{S}",
        None,
    ),
    ('{C}function{S}f\n```json\n{"s": "{D}"}\n```{D}', [("f", {"s": "<｜tool▁call▁end｜>"}, "")], "", None),
    ("{C}{S}f\n```json\n{}\n```{D}", [("f", {}, "")], "", None),
    (
        "{C}function{S}\n```json\n{}\n```{D}",
        [("{C}function{S}\n```json\n{}\n```{D}", None, "the name of the tool is missing")],
        "{C}function{S}\n```json\n{}\n```{D}",
        None,
    ),
    ("{C}f{S}g ```json\n{}\n```{D}", [("g", {}, "")], "", None),
    (
        "{C}f{S}{} ```json\n{D}",
        [("{C}f{S}{} ```json\n{D}", "f", "it should be closed behind its arguments, but it says 'json'")],
        "{C}f{S}{} ```json\n{D}",
        None,
    ),
]


@pytest.mark.parametrize(("text", "actions", "content", "reasoning"), DEEPSEEK)
def test_names_and_fences_of_deepseek_are_told_from_arguments(text, actions, content, reasoning):
    assert read("deepseek_v3", text) == (actions, content, reasoning)


DSML: list[Any] = [
    (
        '{I} name=" f "> {O} name="s" string="true">3{X} {O} name="i" string="false">3{X} {O} name="o">{}{X} {J}',
        [("f", {"s": "3", "i": 3, "o": {}}, "")],
        "",
        None,
    ),
    ('{I} name="f">{O} name="i">3.0{X}{O} name="s">3{X}{J}', [("f", {"i": 3, "s": "3"}, "")], "", None),
    (
        '{I} name="f">{O} name="i" string="false">3.0{X}{O} name="s" string="false">3{X}{J}',
        [("f", {"i": 3.0, "s": 3}, "")],
        "",
        None,
    ),
    ('{I} name="f"> {"i": 1} {J}', [("f", {"i": 1}, "")], "", None),
    (
        '{I} name="f"/>{}{J}',
        [('{I} name="f"/>{}{J}', "f", "its invoke tag closes itself, but the rest of a call stands behind it")],
        '{I} name="f"/>{}{J}',
        None,
    ),
    (
        '{I} name="f"/>{O} name="s">{J}',
        [
            (
                '{I} name="f"/>{O} name="s">{J}',
                "f",
                "its invoke tag closes itself, but the rest of a call stands behind it",
            )
        ],
        '{I} name="f"/>{O} name="s">{J}',
        None,
    ),
    (
        '{I} name="f"/>{J}x',
        [('{I} name="f"/>{J}', "f", "its invoke tag closes itself, but the rest of a call stands behind it")],
        '{I} name="f"/>{J}x',
        None,
    ),
    ('{I} name="f"/>x', [("f", {}, "")], "x", None),
    ('{I} name="f" / >{J}', [('{I} name="f" / >{J}', None, "the invoke tag has no name")], '{I} name="f" / >{J}', None),
    (
        '{I} name="f">x{J}y',
        [('{I} name="f">x{J}', "f", "a parameter tag should come where it says 'x'")],
        '{I} name="f">x{J}y',
        None,
    ),
    (
        '{I} name="f">{O} name="s">a{J}b{X}{O} name="s">a{X}{J}y',
        [('{I} name="f">{O} name="s">a{J}b{X}{O} name="s">a{X}{J}', "f", "the parameter 's' appears twice")],
        '{I} name="f">{O} name="s">a{J}b{X}{O} name="s">a{X}{J}y',
        None,
    ),
    (
        '{I} name="f">{O} name="s">a{X}',
        [('{I} name="f">{O} name="s">a{X}', "f", "the parameter 's' is not closed")],
        '{I} name="f">{O} name="s">a{X}',
        None,
    ),
    ('{I} name="f">{O} name="s">a{O} name="i">1{X}{J}', [("f", {"s": "a", "i": 1}, "")], "", None),
    ("{I}>{J}z", [("{I}>{J}", None, "the invoke tag has no name")], "{I}>{J}z", None),
    (
        '{I} name="f">{} x{J}z',
        [('{I} name="f">{} x{J}', "f", "it should be closed behind its arguments, but it says 'x'")],
        '{I} name="f">{} x{J}z',
        None,
    ),
    (
        '{I} name="f">[1]{J}',
        [('{I} name="f">[1]{J}', "f", "a parameter tag should come where another tag stands")],
        '{I} name="f">[1]{J}',
        None,
    ),
    ('{I} name="f">{J}<｜DSML｜x>', [("f", {}, "")], "<｜DSML｜x>", None),
    (
        '{I} name="f">{O} name="s" string="maybe">a{X}{J}',
        [
            (
                '{I} name="f">{O} name="s" string="maybe">a{X}{J}',
                "f",
                "a parameter tag should come where another tag stands",
            )
        ],
        '{I} name="f">{O} name="s" string="maybe">a{X}{J}',
        None,
    ),
    (
        '{I} name="f">{O} name="i" string="true">3{X}</｜DSML｜function_calls>',
        [
            (
                '{I} name="f">{O} name="i" string="true">3{X}</｜DSML｜function_calls>',
                "f",
                "the parameter 'i' is not closed",
            )
        ],
        '{I} name="f">{O} name="i" string="true">3{X}</｜DSML｜function_calls>',
        None,
    ),
]


@pytest.mark.parametrize(("text", "actions", "content", "reasoning"), DSML)
def test_parameters_of_dsml_say_whether_they_are_strings(text, actions, content, reasoning):
    assert read("deepseek_v32", text) == (actions, content, reasoning)


HARMONY: list[Any] = [
    ("<|channel|>analysis<|message|>a<|end|>", [], "", "a"),
    ("<|channel|>analysis<|message|>a<|end|>b<|channel|>final<|message|>c", [], "b\nc", "a"),
    (
        "<|start|>assistant<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b<|end|>",
        [],
        "a\nb",
        None,
    ),
    ("a<|channel|>final<|message|>b", [], "a\nb", None),
    ("<|start|>assistant<|message|>a<|return|>", [], "a", None),
    ("<|channel|>commentary<|message|>a<|end|>b", [], "a\nb", None),
    ("<|channel|>commentary to=f<|message|> {} <|call|>x", [("f", {}, "")], "x", None),
    ("<|channel|>commentary to=functions.f<|message|> <|call|>x", [("f", {}, "")], "x", None),
    ("<|channel|>commentary to=f<|message|>", [("f", {}, "")], "", None),
    ("<|channel|>commentary to=f<|message|>{}", [("f", {}, "")], "", None),
    (
        "<|channel|>commentary to=f<|message|>{} y<|call|>x",
        [
            (
                "<|channel|>commentary to=f<|message|>{} y<|call|>",
                "f",
                "it should be closed behind its arguments, but it says 'y'",
            )
        ],
        "<|channel|>commentary to=f<|message|>{} y<|call|>\nx",
        None,
    ),
    (
        "<|channel|>commentary to=f<|message|>{} y",
        [
            (
                "<|channel|>commentary to=f<|message|>{} y",
                "f",
                "it should be closed behind its arguments, but it says 'y'",
            )
        ],
        "<|channel|>commentary to=f<|message|>{} y",
        None,
    ),
    (
        "<|channel|>commentary to=f<|message|>[1]<|call|>x",
        [("<|channel|>commentary to=f<|message|>[1]<|call|>", "f", "the arguments must be an object; they are a list")],
        "<|channel|>commentary to=f<|message|>[1]<|call|>\nx",
        None,
    ),
    (
        "<|channel|>commentary to=f<|message|>{}<|start|>assistant<|channel|>final<|message|>b",
        [("f", {}, "")],
        "b",
        None,
    ),
    ("to=f", [], "to=f", None),
    ("<|channel|>to=f", [("<|channel|>to=f", None, "the message has no body")], "<|channel|>to=f", None),
    ("<|start|>to=f", [("<|start|>to=f", None, "the message has no body")], "<|start|>to=f", None),
    ("a <|end|>", [], "a ", None),
    (" <|start|>assistant<|message|>a<|end|> \n<|start|>assistant<|message|>  <|end|>", [], "a", None),
    ("<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>b", [], "", "a\nb"),
]


@pytest.mark.parametrize(("text", "actions", "content", "reasoning"), HARMONY)
def test_messages_of_harmony_are_calls_thoughts_or_content(text, actions, content, reasoning):
    assert read("gpt_oss", text) == (actions, content, reasoning)


def test_a_harmony_turn_may_begin_in_a_thought_and_holds_so_many_calls():
    parser = get_parser("gpt_oss")
    assert parser.parse("hm<|end|><|channel|>final<|message|>x", in_reasoning=True) == ParsedTurn("x", "hm")
    parser.max_calls = 1
    call = "<|channel|>commentary to=f<|message|>{}<|call|>"
    assert parser.parse(call) == ParsedTurn("", actions=[ToolCall("f", {})])
    turn = parser.parse(f"<|channel|>final<|message|>q<|end|>{call}{call}z")
    assert turn.actions == [ToolCall("f", {}), parser.too_many(f"{call}z")] and turn.content == f"q\n{call}z"
    assert isinstance(turn.actions[1], MalformedCall)


def test_a_harmony_turn_beyond_its_calls_keeps_those_before():
    parser = get_parser("gpt_oss")
    parser.max_calls = 2
    call = "<|channel|>commentary to=f<|message|>{}<|call|>"
    assert parser.parse(call * 3).actions == [ToolCall("f", {}), ToolCall("f", {}), parser.too_many(call)]


@pytest.mark.parametrize(
    ("text", "end"), [("{D}z", 1), ("{D} {E}z", 3), ("{C}{D}", 0), ("x{C}", 1), ("{E}z", 1), ("x{E}{C}", 2), ("xyz", 3)]
)
def test_a_broken_call_of_a_section_ends_at_the_first_tag_behind_it(text, end):
    parser, pieces = get_parser("kimi_k2"), re.findall(r"\{.\}|.", text)
    tags = TAGS["kimi_k2"]
    found = parser._end_of_broken("".join(tags.get(p, p) for p in pieces), 0)
    assert found == len("".join(tags.get(p, p) for p in pieces[:end]))


def test_a_deepseek_call_is_read_from_the_place_that_is_given():
    parser = get_parser("deepseek_v3")
    for text, problem in (("{S}{}{D}", "the name of the tool is missing"), ("{D}f{S}{}{D}", "not set apart")):
        for short, tag in TAGS["deepseek_v3"].items():
            text = text.replace(short, tag)
        with pytest.raises(BadCall, match=problem):
            parser.read_call(text, 0, TOOLS)
    assert read("deepseek_v3", "{C}function{S}f```json\n{}\n```{D}") == ([("f", {}, "")], "", None)
