"""Calls between control tokens: in a section for calls (DeepSeek, Kimi), or as a message of a channel (gpt-oss)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_mt.chat.parsers.argument_types import parameters_of, read_argument
from verl_mt.chat.parsers.base import (
    BadCall,
    FoundCalls,
    IndexedText,
    ToolParser,
    first_match,
    found_instead,
    not_run,
    skip_space,
)
from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall, ToolSchema
from verl_mt.extensions.rare_parsers.bare_json import JSON_ADVICE, json_arguments
from verl_mt.extensions.rare_parsers.tagged import ArgumentTags, Values

_DSML_ADVICE = (
    "Write it in the format of your instructions: the name of a tool in the invoke tag, inside it one parameter tag "
    "per argument with its name and whether it is a string, every tag closed."
)


class SectionedParser(ToolParser):
    """The frame: a section, calls in it, each read by `read_call`. A section that is left out is no mistake."""

    section_begins: tuple[str, ...]
    section_ends: tuple[str, ...]
    call_begin: str
    call_end: str
    advice = JSON_ADVICE
    separators: tuple[str, ...] = ()

    def read_call(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> tuple[ToolCall, int]:
        """The call whose text begins at `start`, and where the text goes on behind its `call_end`.

        Raises:
            BadCall: it cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement read_call(text, start, tools)")

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        begin, section = min(
            ((at, s) for s in (*self.section_begins, self.call_begin) if (at := text.find(s, start)) >= 0),
            default=(-1, ""),
        )
        if begin < 0:
            return None
        inside = begin
        if section != self.call_begin:
            inside = skip_space(text, begin + len(section))
            if not text.startswith(self.call_begin, inside):
                end = self._end_of_broken(text, inside)
                return FoundCalls(begin, end, (not_run(text[begin:end], "there is no call in it", self.advice),))
        inside += len(self.call_begin)
        item: ToolCall | MalformedCall
        try:
            item, after = self.read_call(text, inside, tools)
            end = self._with_section_end(text, after)
        except BadCall as error:
            end = self._end_of_broken(text, max(inside, error.at))
            item = not_run(text[begin:end], str(error), self.advice, error.name)
        return FoundCalls(begin, end, (item,))

    def closed(self, text: str, position: int, call: ToolCall) -> tuple[ToolCall, int]:
        """The call, and where the text goes on behind its `call_end`, which must come at `position`.

        Raises:
            BadCall: something else stands there.
        """
        after = skip_space(text, position)
        if not text.startswith(self.call_end, after):
            raise BadCall(f"it should be closed behind its arguments, but {found_instead(text, after)}", call.name)
        return call, after + len(self.call_end)

    def _with_section_end(self, text: str, position: int) -> int:
        after = skip_space(text, position)
        end = next((s for s in self.section_ends if text.startswith(s, after)), None)
        return position if end is None else after + len(end)

    def _end_of_broken(self, text: str, position: int) -> int:
        """After its closing tags, or before the next call: a broken call does not hide the next one."""
        close, following = text.find(self.call_end, position), text.find(self.call_begin, position)
        if close >= 0 and (following < 0 or close < following):
            return self._with_section_end(text, close + len(self.call_end))
        ends = [at + len(s) for s in self.section_ends if (at := text.find(s, position)) >= 0]
        return min([*ends, following if following >= 0 else len(text)])


class DeepSeekParser(SectionedParser):
    """V3 and R1 write `function`, a separator, the name and the arguments in a fenced block; V3.1 name, separator and
    arguments. Which it is shows in the text."""

    other_names = ("deepseek", "deepseekv3", "deepseek_r1", "deepseekv31", "deepseek_v31")
    section_begins = ("<｜tool▁calls▁begin｜>",)
    section_ends = ("<｜tool▁calls▁end｜>",)
    call_begin = "<｜tool▁call▁begin｜>"
    call_end = "<｜tool▁call▁end｜>"
    end_markers = (*ToolParser.end_markers, "<｜end▁of▁sentence｜>")

    _separator = "<｜tool▁sep｜>"
    _fence = re.compile(r"```(?:json)?[ \t]*\n")

    def read_call(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> tuple[ToolCall, int]:
        at = text.find(self._separator, start)
        stop = text.find(self.call_end, start)
        if at < 0 or 0 <= stop < at:
            raise BadCall("the name of the tool is not set apart from the rest")
        name = text[start:at].strip()
        position = skip_space(text, at + len(self._separator))
        fence = first_match(self._fence, text, position)
        if fence is not None and fence.end() > (stop if stop >= 0 else len(text)):
            fence = None
        if not text.startswith("{", position) and fence is not None:
            name, position = text[position : fence.start()].strip(), fence.end()
        arguments, position = json_arguments(text, position, name)
        if fence is not None and text.startswith("```", after := skip_space(text, position)):
            position = after + len("```")
        return self.closed(text, position, ToolCall(name, arguments))


class KimiK2Parser(SectionedParser):
    """`functions.name:0`, a separator, the arguments. The whole of it is the call's id, as the template shows it again
    with the result."""

    other_names = ("kimi",)
    section_begins = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    section_ends = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    call_begin = "<|tool_call_begin|>"
    call_end = "<|tool_call_end|>"
    runs_calls_in_unclosed_reasoning = True

    _head = re.compile(r"\s*((?:functions\.)?([^\s<>]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")

    def read_call(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> tuple[ToolCall, int]:
        head = self._head.match(text, start)
        if head is None:
            raise BadCall("the name of the tool is missing or not set apart from the arguments")
        arguments, after = json_arguments(text, skip_space(text, head.end()), head[2])
        return self.closed(text, after, ToolCall(head[2], arguments, head[1] if ":" in head[1] else ""))


class DeepSeekDsmlParser(SectionedParser):
    """V3.2 and V4: every parameter between tags, and the tag says whether it is a string; everything else is JSON.

    The arguments may also be one JSON object. A tag that closes itself is a call without arguments.
    """

    other_names = ("deepseekv32", "deepseekv4", "deepseek_v4")
    section_begins = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    section_ends = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    call_begin = "<｜DSML｜invoke"
    call_end = "</｜DSML｜invoke>"
    advice = _DSML_ADVICE
    separators = ("\n\n",)
    end_markers = DeepSeekParser.end_markers

    _head = re.compile(r'\s+name="(?P<name>[^"\n]+)"\s*(?P<closed>/)?>')
    _parameter = re.compile(r'<｜DSML｜parameter\s+name="(?P<key>[^"]+)"(?:\s+string="(?P<string>true|false)")?\s*>')
    _tags = ArgumentTags(
        closing="</｜DSML｜parameter>",
        goes_on=re.compile(r"\s*(?:<｜DSML｜parameter\s+name=|</｜DSML｜invoke>)"),
        opening=re.compile(
            r'<｜DSML｜parameter(?:\s+name="(?P<key>[^"]+)"(?P<whole>(?:\s+string="(?:true|false)")?\s*>))?'
        ),
        call_ends=re.compile(r"</｜DSML｜invoke>\s*</｜DSML｜(?:function|tool)_calls>|<｜DSML｜invoke\s+name="),
    )

    def read_call(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> tuple[ToolCall, int]:
        head = self._head.match(text, start)
        if head is None:
            raise BadCall("the invoke tag has no name")
        name, position = head["name"].strip(), skip_space(text, head.end())
        if head["closed"]:
            if text.startswith(("{", "<｜DSML｜parameter", self.call_end), position):
                raise BadCall("its invoke tag closes itself, but the rest of a call stands behind it", name, position)
            return ToolCall(name, {}), head.end()
        if text.startswith("{", position):
            arguments, position = json_arguments(text, position, name)
            return self.closed(text, position, ToolCall(name, arguments))
        arguments = {}
        parameters = parameters_of(tools, name)
        values = Values(text, self._tags, name, parameters)
        while not text.startswith(self.call_end, position):
            opening = self._parameter.match(text, position)
            if opening is None:
                raise BadCall(f"a parameter tag should come where {found_instead(text, position)}", name, position)
            key = opening["key"]
            if key in arguments:
                raise BadCall(f"the parameter {key!r} appears twice", name, position)
            value, after = values.read(opening.end(), key)
            arguments[key] = _typed(value, key, opening["string"], parameters)
            position = skip_space(text, after)
        return self.closed(text, position, ToolCall(name, arguments))


def _typed(raw: str, key: str, string: str | None, parameters: dict[str, Any] | None) -> Any:
    if string == "true":
        return raw
    return read_argument(raw, key, None if string == "false" else parameters)


_HEADER = re.compile(r"\s{0,8}(?:<\|start\|>)?(?P<header>(?:assistant\b|to=|<\|channel\|>)[^\n]{0,200}?)<\|message\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CLOSING = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_NEXT = re.compile(r"<\|start\|>|<\|channel\|>")
_HARMONY_ADVICE = (
    "Write a call as a message of the commentary channel to functions.NAME, with one JSON object of arguments as its "
    "body."
)


@dataclass
class _HarmonyTurn:
    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    actions: list[ToolCall | MalformedCall] = field(default_factory=list)


class HarmonyParser(ToolParser):
    """gpt-oss: one turn is several messages, each in a channel.

    `<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{...}<|call|>`

    A message with a recipient is a call, whatever its channel; without one, `analysis` is reasoning and every other
    channel is content.
    """

    other_names = ("harmony", "openai", "gptoss")
    end_markers = ("<|return|>", "<|call|>", "<|end|>", "<|endoftext|>")
    reasoning_key = "thinking"

    def parse(
        self, text: str, tools: Sequence[ToolSchema | dict[str, Any]] = (), *, in_reasoning: bool = False
    ) -> ParsedTurn:
        """As `ToolParser.parse`. `in_reasoning`: the text begins in the body of an analysis message."""
        text = IndexedText(text)
        turn = _HarmonyTurn()
        position = 0
        if in_reasoning:
            position = self._body(text, 0, "<|channel|>analysis", 0, turn)
        while position < len(text):
            begin, kept = position, len(turn.text)
            header = _HEADER.match(text, position)
            if header is not None:
                position = self._body(text, header.end(), header["header"], begin, turn)
            else:
                following = first_match(_NEXT, text, begin + 1)
                position = following.start() if following else len(text)
                self._loose(text[begin:position], turn)
            if len(turn.actions) > self.max_calls:
                turn.actions[-1] = self.too_many(text[begin:])
                turn.text[kept:] = [text[begin:]]
                break
        content = "\n".join(piece for piece in turn.text if piece.strip())
        return ParsedTurn(content, "\n".join(turn.thoughts) if turn.thoughts else None, turn.actions)

    def _body(self, text: str, start: int, header: str, begin: int, turn: _HarmonyTurn) -> int:
        """Read the message whose body begins at `start`; returns where the next one begins."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            return self._call(text, start, recipient[1].removeprefix("functions."), begin, turn)
        closing = first_match(_CLOSING, text, start)
        body = text[start : closing.start() if closing else len(text)]
        channel = _CHANNEL.search(header)
        (turn.thoughts if channel and channel[1] == "analysis" else turn.text).append(body)
        return closing.end() if closing else len(text)

    def _call(self, text: str, start: int, name: str, begin: int, turn: _HarmonyTurn) -> int:
        """The arguments are decoded first and the closing token looked for after them, so one inside a string is
        harmless."""
        position = skip_space(text, start)
        closing = _CLOSING.match(text, position)
        try:
            empty = closing is not None or position == len(text)
            arguments, end = ({}, position) if empty else json_arguments(text, position, name)
            end = skip_space(text, end)
            closing = _CLOSING.match(text, end)
            if closing is None and end < len(text):
                raise BadCall(f"it should be closed behind its arguments, but {found_instead(text, end)}", name)
            turn.actions.append(ToolCall(name, arguments))
        except BadCall as error:
            closing = first_match(_CLOSING, text, position)
            raw = text[begin : closing.end() if closing else len(text)]
            turn.actions.append(not_run(raw, str(error), _HARMONY_ADVICE, error.name))
            turn.text.append(raw)
        return closing.end() if closing else len(text)

    def _loose(self, text: str, turn: _HarmonyTurn) -> None:
        """Text outside every message: what a model writes that does not know the format, or a header without a body."""
        text = self._without_end_markers(text)
        if _RECIPIENT.search(text) and ("<|channel|>" in text or "<|start|>" in text):
            turn.actions.append(not_run(text, "the message has no body", _HARMONY_ADVICE))
        turn.text.append(text)
