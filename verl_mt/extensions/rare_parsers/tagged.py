"""Arguments between tags (Qwen3-Coder, Seed-OSS, GLM): where a raw value ends.

Values are written without escapes, so a closing tag inside a string looks like the end of the value. The end is the
first closing tag behind which the grammar goes on, or the opening of the next argument. Values carry no types either:
the tool's JSON schema says what they are (`argument_types`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_mt.chat.parsers.argument_types import parameters_of, read_argument
from verl_mt.chat.parsers.base import (
    BadCall,
    FoundCalls,
    ToolParser,
    end_of_broken,
    first_match,
    found_instead,
    not_run,
    skip_space,
)
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json
from verl_mt.data.conversation import ToolCall, ToolSchema


@dataclass(frozen=True)
class ArgumentTags:
    """How a grammar marks its arguments."""

    closing: str
    """Closes a value."""
    goes_on: re.Pattern[str]
    """What stands behind that tag when the value ended there."""
    opening: re.Pattern[str]
    """Opens an argument: `key` is its name, `whole` matches if the opening is complete."""
    call_ends: re.Pattern[str]
    """Where the call ends for certain: a value that is not closed must not swallow the calls behind it."""
    on_lines: re.Pattern[str] | None = None
    """The same as `goes_on` where templates write every tag on a separate line; None: they do not."""


class Values:
    """The values of one call, read in the order written.

    Args:
        name: of the tool.
        parameters: the schema of the tool's arguments; None = the tool is unknown.
        padded: one line end before a value and one after it are the template's.
    """

    def __init__(
        self,
        text: str,
        tags: ArgumentTags,
        name: str,
        parameters: Mapping[str, Any] | None,
        *,
        padded: bool = False,
    ):
        self.text, self.tags, self.name, self.parameters, self.padded = text, tags, name, parameters, padded
        self._one_not_closed = False

    def read(self, start: int, key: str) -> tuple[str, int]:
        """The raw value of `key` that begins at `start`, and where the text goes on.

        Raises:
            BadCall: where it ends cannot be told. So it is with a closing tag too many behind a value that the opening
                of the next argument ended: then that value was closed, and quotes the opening.
        """
        span = _value_span(self.text, start, self.tags, self.parameters)
        if span is None:
            raise BadCall(f"the parameter {key!r} is not closed", self.name, start)
        if self._one_not_closed and self.tags.closing in self.text[start : span[0]]:
            raise BadCall(f"the parameter {key!r} is closed twice, and one before it is not closed", self.name, start)
        self._one_not_closed |= span[0] == span[1]
        return _value_text(self.text, start, span, self.padded), span[1]


def _value_span(
    text: str, start: int, tags: ArgumentTags, parameters: Mapping[str, Any] | None
) -> tuple[int, int] | None:
    """The end of the value that begins at `start`, and where the text goes on; None if it cannot be told.

    - A value that is a JSON object or list ends where it ends as JSON, whatever its strings hold.
    - Else it ends before the first closing tag behind which the grammar goes on; on lines of their own if the value
      begins on one.
    - The opening of another argument of the tool ends it too: its closing tag was forgotten. Where that is in doubt
      (the tool has no such argument, the opening is not complete, or stands in the middle of a line where the others do
      not) the value cannot be told.
    """
    if text.startswith(("{", "["), inside := skip_space(text, start)):
        with contextlib.suppress(BadJSON):
            _, after = decode_json(text, inside)
            end = skip_space(text, after)
            if text.startswith(tags.closing, end) and tags.goes_on.match(text, end + len(tags.closing)):
                return end, end + len(tags.closing)
    on_lines = tags.on_lines if text.startswith("\n", start) else None
    stop = first_match(tags.call_ends, text, start)
    limit = stop.start() if stop else len(text)
    # Values have no escapes, so any closing tag may be a quotation. `loose` is the first one behind which the grammar
    # goes on; where the value began on a line of its own, a later one that does so on its own line is the template's
    # and wins, and `loose` is only what is left if none comes. An opening before any closing tag means that the model
    # forgot one: it ends the value only where it cannot be a quotation.
    place = start
    loose: int | None = None
    while True:
        closing = text.find(tags.closing, place, limit)
        opening = first_match(tags.opening, text, place)
        if opening is not None and opening.start() < (closing if closing >= 0 else limit):
            at_line = text.startswith("\n", opening.start() - 1)
            known = opening["whole"] is not None and _is_argument(opening["key"].strip(), parameters)
            if loose is None and on_lines is not None and not (at_line or known):
                place = opening.end()
                continue
            if loose is None and known and (on_lines is None or at_line):
                return opening.start(), opening.start()
            break
        if closing < 0:
            break
        place = closing + len(tags.closing)
        if on_lines is not None and text.startswith("\n", closing - 1) and on_lines.match(text, place):
            return closing, place
        if loose is None and tags.goes_on.match(text, place):
            loose = closing
            if on_lines is None:
                break
    return None if loose is None else (loose, loose + len(tags.closing))


def _value_text(text: str, start: int, span: tuple[int, int], padded: bool) -> str:
    """The value itself. White space before the opening of the next argument is the template's."""
    value = text[start : span[0]]
    if span[0] == span[1]:
        value = value.rstrip()
    return value.removeprefix("\n").removesuffix("\n") if padded else value


def _is_argument(key: str, parameters: Mapping[str, Any] | None) -> bool:
    """Whether the schema names it; where it names nothing every key may be one."""
    properties = (parameters or {}).get("properties")
    return bool(key) and (not isinstance(properties, dict) or not properties or key in properties)


_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_BARE = re.compile(r"<function=[^<>\s]+>\s*(?:<parameter=[^<>\n]+>|</function>)")
_CLOSE_FUNCTION = "</function>"
_FUNCTION_ADVICE = (
    "Write it in the format of your instructions: one function tag with the name of a tool in it, inside it one "
    "parameter tag per argument with its plain value, every tag closed."
)


class Qwen3CoderParser(ToolParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5,
    Nemotron-3, Step-3.5. Arguments stand one by one between tags, without escapes and without types.

    The types come from the tool's JSON schema (`read_argument`); `null` is null for every type. A closing tag inside
    a value is harmless unless the whole end of a call stands there. The tags around `<function=...>` may be missing.
    """

    other_names: tuple[str, ...] = ("qwen3_xml", "qwen3_5", "step3p5")
    open_tag = "<tool_call>"
    close_tag = "</tool_call>"
    separators = ("\n\n", "\n")
    padded = True
    """A value stands on separate lines: one line end before it and one after it are not part of it."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        opening, closing = re.escape(self.open_tag), re.escape(self.close_tag)
        self._tags = ArgumentTags(
            closing="</parameter>",
            goes_on=re.compile(r"\s*(?:<parameter=[^<>\n]*>|</function>)"),
            opening=re.compile(r"<parameter=(?P<key>[^<>\n]*)(?P<whole>>)?"),
            call_ends=re.compile(
                rf"</function>\s*{closing}\s*(?:\Z|{opening})|<function=[^<>\s]+>\s*<parameter=[^<>\n]+>"
            ),
            on_lines=re.compile(rf"\n(?:<parameter=[^<>\n]*>\n|</function>\n{closing})") if self.padded else None,
        )

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        begin = text.find(self.open_tag, start)
        bare = _BARE.search(text, start, begin if begin >= 0 else len(text))
        if bare is not None:
            return self._bare(text, bare.start(), tools)
        if begin < 0:
            return None
        position = skip_space(text, begin + len(self.open_tag))
        calls: list[ToolCall] = []
        try:
            while not (calls and text.startswith(self.close_tag, position)):
                if calls and not text.startswith("<function=", position):
                    raise BadCall(f"its closing tag should come where {found_instead(text, position)}", calls[-1].name)
                call, after = self._function(text, position, tools)
                calls.append(call)
                position = skip_space(text, after)
        except BadCall as error:
            end = end_of_broken(text, max(position, error.at), self.open_tag, self.close_tag)
            problem = str(error) if text.endswith(self.close_tag, begin, end) else f"it is not closed ({error})"
            return FoundCalls(begin, end, (not_run(text[begin:end], problem, _FUNCTION_ADVICE, error.name),))
        return FoundCalls(begin, position + len(self.close_tag), tuple(calls))

    def _bare(self, text: str, begin: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls:
        try:
            call, end = self._function(text, begin, tools)
        except BadCall as error:
            end = end_of_broken(text, error.at, self.open_tag, _CLOSE_FUNCTION)
            following = first_match(_BARE, text, error.at)
            end = min(end, following.start() if following else end)
            return FoundCalls(begin, end, (not_run(text[begin:end], str(error), _FUNCTION_ADVICE, error.name),))
        if text.startswith(self.close_tag, after := skip_space(text, end)):
            end = after + len(self.close_tag)
        return FoundCalls(begin, end, (call,))

    def _function(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> tuple[ToolCall, int]:
        """The function block at `start`, and where the text goes on after it.

        Raises:
            BadCall: it cannot be read.
        """
        head = _FUNCTION.match(text, start)
        name = head[1].strip() if head else ""
        if head is None or not name:
            raise BadCall(f"a function tag with a name should come where {found_instead(text, start)}")
        parameters = parameters_of(tools, name)
        arguments: dict[str, Any] = {}
        values = Values(text, self._tags, name, parameters, padded=self.padded)
        position = skip_space(text, head.end())
        while not text.startswith(_CLOSE_FUNCTION, position):
            opening = _PARAMETER.match(text, position)
            key = opening[1].strip() if opening else ""
            if opening is None or not key:
                raise BadCall(f"a parameter tag should come where {found_instead(text, position)}", name, position)
            if key in arguments:
                raise BadCall(f"the parameter {key!r} appears twice", name, position)
            value, after = values.read(opening.end(), key)
            arguments[key] = read_argument(value, key, parameters, null_word=True)
            position = skip_space(text, after)
        return ToolCall(name, arguments), position + len(_CLOSE_FUNCTION)


class SeedOssParser(Qwen3CoderParser):
    """The same between Seed-OSS's own tags."""

    other_names = ()
    open_tag = "<seed:tool_call>"
    close_tag = "</seed:tool_call>"
    padded = False
    reasoning_tags = ("<seed:think>", "</seed:think>")
    end_markers = (*ToolParser.end_markers, "<seed:eos>")


_GLM_OPEN, _GLM_CLOSE = "<tool_call>", "</tool_call>"
_GLM_NAME = re.compile(r"\s*([^\s<>{}\[\]\"]+)\s*(?=<arg_key>|</tool_call>)")
_GLM_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_TAGS = ArgumentTags(
    closing="</arg_value>",
    goes_on=re.compile(r"\s*(?:<arg_key>|</tool_call>)"),
    opening=re.compile(r"<arg_key>(?P<key>[^<]*)(?P<whole></arg_key>\s*<arg_value>)?"),
    call_ends=re.compile(
        r"</tool_call>\s*(?:\Z|<tool_call>\s*[^\s<>]+\s*(?:<arg_key>|</tool_call>))|<tool_call>\s*[^\s<>]+\s*<arg_key>"
    ),
)
_GLM_ADVICE = (
    "Write it in the format of your instructions: the name of a tool behind the opening tag, then a key tag and a "
    "value tag per argument, every tag closed."
)


class GlmParser(ToolParser):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 and later. Strings stand
    as they are, everything else as JSON.

    The types come from the tool's JSON schema (`read_argument`). A closing tag inside a value is harmless unless a new
    argument or the end of the call follows it there.
    """

    other_names = ("glm", "glm47")
    runs_calls_in_unclosed_reasoning = True
    end_markers = (*ToolParser.end_markers, "<|user|>", "<|observation|>")

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        begin = text.find(_GLM_OPEN, start)
        if begin < 0:
            return None
        try:
            call, end = _read_glm(text, begin + len(_GLM_OPEN), tools)
        except BadCall as error:
            end = end_of_broken(text, max(begin + len(_GLM_OPEN), error.at), _GLM_OPEN, _GLM_CLOSE)
            problem = str(error) if text.endswith(_GLM_CLOSE, begin, end) else f"it is not closed ({error})"
            return FoundCalls(begin, end, (not_run(text[begin:end], problem, _GLM_ADVICE, error.name),))
        return FoundCalls(begin, end, (call,))


def _read_glm(text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> tuple[ToolCall, int]:
    head = _GLM_NAME.match(text, start)
    if head is None:
        raise BadCall(f"the name of a tool and its arguments should come where {found_instead(text, start)}")
    name, position = head[1], head.end()
    parameters = parameters_of(tools, name)
    arguments: dict[str, Any] = {}
    values = Values(text, _GLM_TAGS, name, parameters)
    while not text.startswith(_GLM_CLOSE, position):
        opening = _GLM_KEY.match(text, position)
        key = opening[1].strip() if opening else ""
        if opening is None or not key:
            raise BadCall(f"a key and its value should come where {found_instead(text, position)}", name, position)
        if key in arguments:
            raise BadCall(f"the argument {key!r} appears twice", name, position)
        value, after = values.read(opening.end(), key)
        arguments[key] = read_argument(value, key, parameters)
        position = skip_space(text, after)
    return ToolCall(name, arguments), position + len(_GLM_CLOSE)
