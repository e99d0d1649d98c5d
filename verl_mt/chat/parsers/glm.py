"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 and later."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, skip_space
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

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"\s*([^\s<>{}\[\]\"]+)\s*(?=<arg_key>|</tool_call>)")
_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_TAGS = ArgumentTags(
    closing="</arg_value>",
    goes_on=re.compile(r"\s*(?:<arg_key>|</tool_call>)"),
    opening=re.compile(r"<arg_key>(?P<key>[^<]*)(?P<whole></arg_key>\s*<arg_value>)?"),
    call_ends=re.compile(
        r"</tool_call>\s*(?:\Z|<tool_call>\s*[^\s<>]+\s*(?:<arg_key>|</tool_call>))|<tool_call>\s*[^\s<>]+\s*<arg_key>"
    ),
)
_ADVICE = (
    "Write it in the format of your instructions: the name of a tool behind the opening tag, then a key tag and a "
    "value tag per argument, every tag closed."
)


class GlmParser(ToolParser):
    """Calls whose keys and values stand between tags: strings as they are, everything else as JSON.

    The types come from the tool's JSON schema (`read_argument`). A closing tag inside a value is harmless unless a new
    argument or the end of the call follows it there.
    """

    runs_calls_in_unclosed_reasoning = True
    end_markers = (*ToolParser.end_markers, "<|user|>", "<|observation|>")

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        begin = text.find(_OPEN, start)
        if begin < 0:
            return None
        try:
            call, end = _read(text, begin + len(_OPEN), tools)
        except BadCall as error:
            end = end_of_broken(text, max(begin + len(_OPEN), error.at), _OPEN, _CLOSE)
            problem = str(error) if text.endswith(_CLOSE, begin, end) else f"it is not closed ({error})"
            return FoundCalls(begin, end, (not_run(text[begin:end], problem, _ADVICE, error.name),))
        return FoundCalls(begin, end, (call,))


def _read(text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> tuple[ToolCall, int]:
    head = _NAME.match(text, start)
    if head is None:
        raise BadCall(f"the name of a tool and its arguments should come where {found_instead(text, start)}")
    name, position = head[1], head.end()
    parameters = parameters_of(tools, name)
    arguments: dict[str, Any] = {}
    values = Values(text, _TAGS, name, parameters)
    while not text.startswith(_CLOSE, position):
        opening = _KEY.match(text, position)
        key = opening[1].strip() if opening else ""
        if opening is None or not key:
            raise BadCall(f"a key and its value should come where {found_instead(text, position)}", name, position)
        if key in arguments:
            raise BadCall(f"the argument {key!r} is given twice", name, position)
        value, after = values.read(opening.end(), key)
        arguments[key] = read_argument(value, key, parameters)
        position = skip_space(text, after)
    return ToolCall(name, arguments), position + len(_CLOSE)
