"""Calls written as JSON without closing tags: Llama 3 (bare), Mistral (behind a tag)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_mt.chat.parsers.base import (
    BadCall,
    FoundCalls,
    IndexedText,
    ToolParser,
    first_match,
    found_instead,
    not_run,
    skip_space,
    tool_names,
)
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json, kind_of, malformed, read_call
from verl_mt.data.conversation import MalformedCall, ToolCall, ToolSchema

JSON_ADVICE = "Write the name of a tool and its arguments as one JSON object, in the format of your instructions."


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


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_OBJECT = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"'
_LLAMA_KEY = r'\{\s*"(?:[^"\\\n]|\\.)*"\s*:'
_LLAMA_CANDIDATE = re.compile(
    rf"(?P<tag><\|python_tag\|>\s*)|(?P<line>^[ \t]*)(?=(?:\[\s*)?{_LLAMA_KEY})|(?={_LLAMA_OBJECT})", re.MULTILINE
)
_LLAMA_NEXT = re.compile(rf"(?:^|;\s*)(?=\[?\s*{_LLAMA_OBJECT})", re.MULTILINE)
_LLAMA_NAMED = re.compile(rf'\[?\s*{_LLAMA_OBJECT}([^"]*)"')
_LLAMA_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')
_LLAMA_SEPARATOR = re.compile(r"\s*;\s*(?=\{)")
_LLAMA_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\[\]{}]')
_LLAMA_DEEPEST = 500
_LLAMA_KEYS = ("parameters", "arguments")


class Llama3JsonParser(ToolParser):
    """`{"name": ..., "parameters": {...}}` without tags: Llama-3.1, 3.2, 3.3.

    Calls stand at the start of a line, or after `<|python_tag|>`; several are separated by `;` or in a list.
    A JSON object is a call if it has `name` and `parameters` (or `arguments`), or names a tool that exists; in the
    middle of a line it must do both, as an answer may quote a call. Any other JSON is an answer and stays in `content`;
    after `<|python_tag|>` everything is meant as a call.
    """

    other_names = ("llama3",)

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        names = tool_names(tools)
        position = start
        while True:
            if position == start and text[start : start + 1] in ("{", "["):
                begin, body, tagged, quoted = start, start, False, False
            elif candidate := first_match(_LLAMA_CANDIDATE, text, position):
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
            value, end = _decode_llama(text, body)
        except BadJSON as error:
            if not (tagged or _meant_as_call(text, body, names)):
                return None, body + 1
            end = _end_of_broken(text, body, error.at, names)
            problem = f"it is not valid JSON ({error})"
            return FoundCalls(begin, end, (malformed(text[begin:end], problem, _LLAMA_KEYS[0]),)), end
        values = value if isinstance(value, list) and value else [value]
        if not tagged and not all(_is_call(v, names) for v in values):
            return None, end
        if separator := _LLAMA_SEPARATOR.match(text, end):
            end = separator.end()
        items = tuple(read_call(v, text[begin:end], _LLAMA_KEYS) for v in values[: self.max_calls + 1])
        return FoundCalls(begin, end, items), end

    def _in_line(self, text: str, body: int, names: set[str]) -> tuple[FoundCalls | None, int]:
        """The same in the middle of a line: only what is a call beyond doubt."""
        if body in _known_broken(text):
            return None, body + 1
        try:
            value, end = _decode_llama(text, body)
        except BadJSON:
            return None, body + 1
        call = read_call(value, "", _LLAMA_KEYS)
        if not isinstance(call, ToolCall) or (names and call.name not in names):
            return None, end
        if separator := _LLAMA_SEPARATOR.match(text, end):
            end = separator.end()
        return FoundCalls(body, end, (call,)), end


def _known_broken(text: str) -> dict[int, tuple[str, int | None]]:
    """What is wrong with the value that begins at a place, and where, as far as that was found out."""
    return text.unreadable if isinstance(text, IndexedText) else {}


def _decode_llama(text: str, body: int) -> tuple[Any, int]:
    """As `decode_json`. The values around a broken place are all broken: noted, they are not read again."""
    if known := _known_broken(text).get(body):
        raise BadJSON(known[0], body, known[1])
    try:
        return decode_json(text, body)
    except BadJSON as error:
        # Every bracket still open where the decoder gave up belongs to a value that breaks at the same place. Without
        # the note, `[[[[...` would be read from each of its brackets to that place: quadratic in what a model repeats.
        seen: list[int] = []
        around: list[int] = []
        for part in _LLAMA_PART.finditer(text, body, len(text) if error.at is None else error.at):
            if part[0] in ("[", "{"):
                seen.append(part.start())
                around.append(part.start())
            elif part[0] in ("]", "}") and around:
                around.pop()
            if error.at is None and not 0 < len(around) < _LLAMA_DEEPEST:
                break
        _known_broken(text).update(dict.fromkeys(around or seen, (error.problem, error.at)))
        raise


def _end_of_broken(text: str, body: int, at: int | None, names: set[str]) -> int:
    """Where a call that is not valid JSON ends: a call behind the place where it breaks is a separate call.

    What stands in front of that place, or between brackets that are closed, was meant as its arguments.
    """
    tag = text.find(_PYTHON_TAG, body)
    limit = tag if tag >= 0 else len(text)
    if (closed := _closed_at(text, body, limit)) is not None:
        return closed
    if at is not None and text.startswith("{", at) and at > body and _LLAMA_NAMED.match(text, at):
        return at
    following = first_match(_LLAMA_NEXT, text, body + 1 if at is None else max(at, body + 1))
    while following and following.end() < limit:
        if _meant_as_call(text, following.end(), names):
            limit = following.end()
        following = first_match(_LLAMA_NEXT, text, following.end() + 1)
    return limit


def _closed_at(text: str, body: int, limit: int) -> int | None:
    """Behind the bracket that closes the one at `body`; None if none does, which is noted for all that stay open."""
    unclosed = text.unclosed if isinstance(text, IndexedText) else set()
    around: list[int] = []
    for part in _LLAMA_PART.finditer(text, body, limit) if text.startswith(("{", "["), body) else ():
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
    return any(key in value for key in _LLAMA_KEYS) or (isinstance(name, str) and name in names)


def _meant_as_call(text: str, body: int, names: set[str]) -> bool:
    match = _LLAMA_NAMED.match(text, body)
    return match is not None and (match[1] in names or first_match(_LLAMA_ARGUMENTS, text, match.end()) is not None)


_MISTRAL_TAG = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\]\s*|(?=\{))")


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]name[ARGS]{...}`: Mistral, old and new.

    Up to Mistral-Nemo a JSON list of calls behind one tag; later one tag per call, its name, in some models an id, and
    the arguments. Which it is shows in the text; ids are kept.
    """

    reasoning_tags = ("[THINK]", "[/THINK]")
    separators = ()

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        begin = text.find(_MISTRAL_TAG, start)
        if begin < 0:
            return None
        body = skip_space(text, begin + len(_MISTRAL_TAG))
        if text.startswith(("[", "{"), body):
            return _listed(text, begin, body, self.max_calls)
        try:
            call, end = _named(text, body)
        except BadCall as error:
            end = _before_next(text, body)
            return FoundCalls(begin, end, (not_run(text[begin:end], str(error), JSON_ADVICE, error.name),))
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
    head = _MISTRAL_HEAD.match(text, start)
    if head is None:
        raise BadCall(f"the name of a tool and its arguments should come where {found_instead(text, start)}")
    arguments, end = json_arguments(text, head.end(), head[1])
    return ToolCall(head[1], arguments, head[2] or ""), end


def _before_next(text: str, position: int) -> int:
    following = text.find(_MISTRAL_TAG, position)
    return following if following >= 0 else len(text)
