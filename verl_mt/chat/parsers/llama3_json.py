"""`{"name": ..., "parameters": {...}}` without tags: Llama-3.1, 3.2, 3.3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, IndexedText, ToolParser, first_match, tool_names
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json, malformed, read_call
from verl_mt.data.conversation import ToolCall, ToolSchema

_TAG = "<|python_tag|>"
_OBJECT = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"'
_KEY = r'\{\s*"(?:[^"\\\n]|\\.)*"\s*:'
_CANDIDATE = re.compile(
    rf"(?P<tag><\|python_tag\|>\s*)|(?P<line>^[ \t]*)(?=(?:\[\s*)?{_KEY})|(?={_OBJECT})", re.MULTILINE
)
_NEXT = re.compile(rf"(?:^|;\s*)(?=\[?\s*{_OBJECT})", re.MULTILINE)
_NAMED = re.compile(rf'\[?\s*{_OBJECT}([^"]*)"')
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')
_SEPARATOR = re.compile(r"\s*;\s*(?=\{)")
_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\[\]{}]')
_DEEPEST = 500
_KEYS = ("parameters", "arguments")


class Llama3JsonParser(ToolParser):
    """Bare JSON calls: at the start of a line, or after `<|python_tag|>`; several are separated by `;` or in a list.

    A JSON object is a call if it has `name` and `parameters` (or `arguments`), or names a tool that exists; in the
    middle of a line it must do both, as an answer may quote a call. Any other JSON is an answer and stays in `content`;
    after `<|python_tag|>` everything is meant as a call.
    """

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        names = tool_names(tools)
        position = start
        while True:
            if position == start and text[start : start + 1] in ("{", "["):
                begin, body, tagged, quoted = start, start, False, False
            elif candidate := first_match(_CANDIDATE, text, position):
                begin, body, tagged = candidate.start(), candidate.end(), candidate["tag"] is not None
                quoted = not tagged and candidate["line"] is None
            else:
                return None
            if quoted:
                found, position = self._in_line(text, body, names)
            elif tagged or body not in _known_broken(text) or _meant_as_call(text, body, names):
                found, position = self._read(text, begin, body, names, tagged)
            else:
                found, position = None, body + 1
            if found is not None:
                return found

    def _read(self, text: str, begin: int, body: int, names: set[str], tagged: bool) -> tuple[FoundCalls | None, int]:
        """The calls that begin at `begin`, their JSON at `body`; and where to look on if there are none."""
        try:
            value, end = _decode(text, body)
        except BadJSON as error:
            if not (tagged or _meant_as_call(text, body, names)):
                return None, body + 1
            end = _end_of_broken(text, body, error.at, names)
            problem = f"it is not valid JSON ({error})"
            return FoundCalls(begin, end, (malformed(text[begin:end], problem, _KEYS[0]),)), end
        values = value if isinstance(value, list) and value else [value]
        if not tagged and not all(_is_call(v, names) for v in values):
            return None, end
        if separator := _SEPARATOR.match(text, end):
            end = separator.end()
        items = tuple(read_call(v, text[begin:end], _KEYS) for v in values[: self.max_calls + 1])
        return FoundCalls(begin, end, items), end

    def _in_line(self, text: str, body: int, names: set[str]) -> tuple[FoundCalls | None, int]:
        """The same in the middle of a line: only what is a call beyond doubt."""
        if body in _known_broken(text):
            return None, body + 1
        try:
            value, end = _decode(text, body)
        except BadJSON:
            return None, body + 1
        call = read_call(value, text[body:end], _KEYS)
        if not isinstance(call, ToolCall) or (names and call.name not in names):
            return None, end
        if separator := _SEPARATOR.match(text, end):
            end = separator.end()
        return FoundCalls(body, end, (call,)), end


def _known_broken(text: str) -> dict[int, tuple[str, int | None]]:
    """What is wrong with the value that begins at a place, and where, as far as that was found out."""
    return text.unreadable if isinstance(text, IndexedText) else {}


def _decode(text: str, body: int) -> tuple[Any, int]:
    """As `decode_json`. The values around a broken place are all broken: noted, they are not read again."""
    if known := _known_broken(text).get(body):
        raise BadJSON(known[0], body, known[1])
    try:
        return decode_json(text, body)
    except BadJSON as error:
        seen: list[int] = []
        around: list[int] = []
        for part in _PART.finditer(text, body, len(text) if error.at is None else error.at):
            if part[0] in ("[", "{"):
                seen.append(part.start())
                around.append(part.start())
            elif part[0] in ("]", "}") and around:
                around.pop()
            if error.at is None and not 0 < len(around) < _DEEPEST:
                break
        _known_broken(text).update(dict.fromkeys(around or seen, (error.problem, error.at)))
        raise


def _end_of_broken(text: str, body: int, at: int | None, names: set[str]) -> int:
    """Where a call that is not valid JSON ends: a call behind the place where it breaks is one of its own.

    What stands in front of that place, or between brackets that are closed, was meant as its arguments.
    """
    tag = text.find(_TAG, body)
    limit = tag if tag >= 0 else len(text)
    if (closed := _closed_at(text, body, limit)) is not None:
        return closed
    if at is not None and text.startswith("{", at) and at > body and _NAMED.match(text, at):
        return at
    following = first_match(_NEXT, text, body + 1 if at is None else max(at, body + 1))
    while following and following.end() < limit:
        if _meant_as_call(text, following.end(), names):
            limit = following.end()
        following = first_match(_NEXT, text, following.end() + 1)
    return limit


def _closed_at(text: str, body: int, limit: int) -> int | None:
    """Behind the bracket that closes the one at `body`; None if none does, which is noted for all that stay open."""
    unclosed = text.unclosed if isinstance(text, IndexedText) else set()
    around: list[int] = []
    for part in _PART.finditer(text, body, limit) if text.startswith(("{", "["), body) else ():
        if part.start() in unclosed:
            break
        if part[0] in ("[", "{"):
            around.append(part.start())
        elif part[0] in ("]", "}"):
            around.pop()
            if not around:
                return part.end()
    unclosed.update(around)
    return None


def _is_call(value: Any, names: set[str]) -> bool:
    if not isinstance(value, dict) or "name" not in value:
        return False
    name = value["name"]
    return any(key in value for key in _KEYS) or (isinstance(name, str) and name in names)


def _meant_as_call(text: str, body: int, names: set[str]) -> bool:
    match = _NAMED.match(text, body)
    return match is not None and (match[1] in names or first_match(_ARGUMENTS, text, match.end()) is not None)
