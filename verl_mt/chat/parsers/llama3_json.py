"""`{"name": ..., "parameters": {...}}` without tags: Llama-3.1, 3.2, 3.3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, tool_names
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json, malformed, read_call
from verl_mt.data.conversation import ToolSchema

_TAG = "<|python_tag|>"
_CANDIDATE = re.compile(r"<\|python_tag\|>\s*|^[ \t]*(?=[{\[])", re.MULTILINE)
_NAMED = re.compile(r'\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"')
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')
_SEPARATOR = re.compile(r"\s*;\s*(?=\{)")
_KEYS = ("parameters", "arguments")


class Llama3JsonParser(ToolParser):
    """Bare JSON calls: at the start of a line, or after `<|python_tag|>`; several are separated by `;` or in a list.

    A JSON object is a call if it has `name` and `parameters` (or `arguments`), or names a tool that exists. Any other
    JSON is an answer and stays in `content`; after `<|python_tag|>` everything is meant as a call.
    """

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        names = tool_names(tools)
        position = start
        while True:
            at_start = position == start and text[start : start + 1] in ("{", "[")
            candidate = None if at_start else _CANDIDATE.search(text, position)
            if not at_start and candidate is None:
                return None
            begin, body = (candidate.start(), candidate.end()) if candidate else (start, start)
            found = self._read(text, begin, body, names)
            if found is not None:
                return found
            position = body + 1

    def _read(self, text: str, begin: int, body: int, names: set[str]) -> FoundCalls | None:
        tagged = text.startswith(_TAG, begin)
        try:
            value, end = decode_json(text, body)
        except BadJSON as error:
            if not tagged and not _meant_as_call(text, body, names):
                return None
            end = text.find(_TAG, body)
            end = len(text) if end < 0 else end
            problem = f"it is not valid JSON ({error})"
            return FoundCalls(begin, end, (malformed(text[begin:end], problem, _KEYS[0]),))
        values = value if isinstance(value, list) and value else [value]
        if not tagged and not all(_is_call(v, names) for v in values):
            return None
        if separator := _SEPARATOR.match(text, end):
            end = separator.end()
        return FoundCalls(begin, end, tuple(read_call(v, text[begin:end], _KEYS) for v in values))


def _is_call(value: Any, names: set[str]) -> bool:
    if not isinstance(value, dict) or "name" not in value:
        return False
    name = value["name"]
    return any(key in value for key in _KEYS) or (isinstance(name, str) and name in names)


def _meant_as_call(text: str, body: int, names: set[str]) -> bool:
    match = _NAMED.match(text, body)
    return match is not None and (match[1] in names or bool(_ARGUMENTS.search(text, match.end())))
