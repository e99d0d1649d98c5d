"""Calls in a section of their own, each between control tokens: DeepSeek, Kimi."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, first_match, skip_space
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json, kind_of
from verl_mt.chat.parsers.tagged import (
    ArgumentTags,
    BadCall,
    Values,
    found_instead,
    not_run,
    parameters_of,
    read_argument,
)
from verl_mt.data.conversation import MalformedCall, ToolCall, ToolSchema

_JSON_ADVICE = "Write the name of a tool and its arguments as one JSON object, in the format of your instructions."
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
    advice = _JSON_ADVICE
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
                raise BadCall(f"the parameter {key!r} is given twice", name, position)
            value, after = values.read(opening.end(), key)
            arguments[key] = _typed(value, key, opening["string"], parameters)
            position = skip_space(text, after)
        return self.closed(text, position, ToolCall(name, arguments))


def _typed(raw: str, key: str, string: str | None, parameters: dict[str, Any] | None) -> Any:
    if string == "true":
        return raw
    return read_argument(raw, key, None if string == "false" else parameters)


def json_arguments(text: str, start: int, name: str) -> tuple[dict[str, Any], int]:
    """The JSON object at `start` and where the text goes on after it.

    Raises:
        BadCall: there is none, or the name before it is empty.
    """
    if not name:
        raise BadCall("the name of the tool is missing")
    try:
        value, end = decode_json(text, start)
    except BadJSON as error:
        raise BadCall(f"the arguments are not valid JSON ({error})", name) from error
    if not isinstance(value, dict):
        raise BadCall(f"the arguments must be an object; they are {kind_of(value)}", name)
    return value, end
