"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

So do Nemotron-3 and Step-3.5; Seed-OSS writes the same between tags of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, first_match, skip_space
from verl_mt.chat.parsers.tagged import (
    ArgumentTags,
    BadCall,
    Values,
    end_of_broken,
    found_instead,
    not_run,
    parameters_of,
    read_argument,
)
from verl_mt.data.conversation import ToolCall, ToolSchema

_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_BARE = re.compile(r"<function=[^<>\s]+>\s*(?:<parameter=[^<>\n]+>|</function>)")
_CLOSE_FUNCTION = "</function>"
_ADVICE = (
    "Write it in the format of your instructions: one function tag with the name of a tool in it, inside it one "
    "parameter tag per argument with its plain value, every tag closed."
)


class Qwen3CoderParser(ToolParser):
    """Calls whose arguments stand one by one between tags, without escapes and without types.

    The types come from the tool's JSON schema (`read_argument`); `null` is null for every type. A closing tag inside
    a value is harmless unless the whole end of a call stands there. The tags around `<function=...>` may be missing.
    """

    open_tag = "<tool_call>"
    close_tag = "</tool_call>"
    separators = ("\n\n", "\n")
    padded = True
    """A value stands on lines of its own: one line end before it and one after it are not part of it."""

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
            return FoundCalls(begin, end, (not_run(text[begin:end], problem, _ADVICE, error.name),))
        return FoundCalls(begin, position + len(self.close_tag), tuple(calls))

    def _bare(self, text: str, begin: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls:
        try:
            call, end = self._function(text, begin, tools)
        except BadCall as error:
            end = end_of_broken(text, max(begin, error.at), self.open_tag, _CLOSE_FUNCTION)
            following = first_match(_BARE, text, max(begin + 1, error.at))
            end = min(end, following.start() if following else end)
            return FoundCalls(begin, end, (not_run(text[begin:end], str(error), _ADVICE, error.name),))
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
                raise BadCall(f"the parameter {key!r} is given twice", name, position)
            value, after = values.read(opening.end(), key)
            arguments[key] = read_argument(value, key, parameters, null_word=True)
            position = skip_space(text, after)
        return ToolCall(name, arguments), position + len(_CLOSE_FUNCTION)


class SeedOssParser(Qwen3CoderParser):
    """The same between Seed-OSS's own tags."""

    open_tag = "<seed:tool_call>"
    close_tag = "</seed:tool_call>"
    padded = False
    reasoning_tags = ("<seed:think>", "</seed:think>")
    end_markers = (*ToolParser.end_markers, "<seed:eos>")
