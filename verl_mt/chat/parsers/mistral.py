"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]name[ARGS]{...}`: Mistral, old and new."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, skip_space
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json, malformed, read_call
from verl_mt.chat.parsers.sectioned import json_arguments
from verl_mt.chat.parsers.tagged import BadCall, found_instead, not_run
from verl_mt.data.conversation import MalformedCall, ToolCall, ToolSchema

_TAG = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\]\s*|(?=\{))")
_ADVICE = "Write the name of a tool and its arguments as one JSON object, in the format of your instructions."


class MistralParser(ToolParser):
    """Up to Mistral-Nemo a JSON list of calls behind one tag; later one tag per call, its name, in some models an id,
    and the arguments. Which it is shows in the text; ids are kept."""

    reasoning_tags = ("[THINK]", "[/THINK]")
    separators = ()

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        begin = text.find(_TAG, start)
        if begin < 0:
            return None
        body = skip_space(text, begin + len(_TAG))
        if text.startswith(("[", "{"), body):
            return _listed(text, begin, body, self.max_calls)
        try:
            call, end = _named(text, body)
        except BadCall as error:
            end = _before_next(text, body)
            return FoundCalls(begin, end, (not_run(text[begin:end], str(error), _ADVICE, error.name),))
        return FoundCalls(begin, end, (call,))


def _listed(text: str, begin: int, body: int, most: int) -> FoundCalls:
    try:
        value, end = decode_json(text, body)
    except BadJSON as error:
        end = _before_next(text, body)
        return FoundCalls(begin, end, (malformed(text[begin:end], f"it is not valid JSON ({error})"),))
    raw = text[begin:end]
    values = value if isinstance(value, list) else [value]
    if not values:
        return FoundCalls(begin, end, (malformed(raw, "the list of calls is empty"),))
    return FoundCalls(begin, end, tuple(_with_id(read_call(one, raw), one) for one in values[: most + 1]))


def _with_id(call: ToolCall | MalformedCall, value: Any) -> ToolCall | MalformedCall:
    given = value.get("id") if isinstance(value, dict) else None
    return replace(call, id=given) if isinstance(call, ToolCall) and isinstance(given, str) else call


def _named(text: str, start: int) -> tuple[ToolCall, int]:
    head = _HEAD.match(text, start)
    if head is None:
        raise BadCall(f"the name of a tool and its arguments should come where {found_instead(text, start)}")
    arguments, end = json_arguments(text, head.end(), head[1])
    return ToolCall(head[1], arguments, head[2] or ""), end


def _before_next(text: str, position: int) -> int:
    following = text.find(_TAG, position)
    return following if following >= 0 else len(text)
