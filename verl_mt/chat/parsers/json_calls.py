"""Calls written as JSON between tags: Hermes and Qwen.

Decoding, and error texts that the model can learn from, are shared with the other families.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import (
    FoundCalls,
    ToolParser,
    end_of_broken,
    found_instead,
    skip_space,
)
from verl_mt.data.conversation import MalformedCall, ToolCall, ToolSchema

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')
_FIRST_WINDOW = 256
_LONGEST_WORD = 16
"""Longer than every literal and escape of JSON: an error nearer to a window's end may be the window's."""


class BadJSON(ValueError):
    """Text that is not JSON; the message says what and where, counted from the value's first character.

    Args:
        problem: what is wrong.
        start: where the value begins.
        at: where it breaks; None = not known.
    """

    def __init__(self, problem: str, start: int = 0, at: int | None = None):
        super().__init__(problem if at is None else f"{problem} at character {at - start + 1}")
        self.problem = problem
        self.at = at


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start` and the position after it.

    Stricter than `json`: NaN, Infinity, numbers that overflow and lone surrogates are refused, because they cannot be
    written as JSON or UTF-8 again.

    Raises:
        BadJSON: also where Python's own limits (depth, digits) are exceeded.
    """
    try:
        value, length = _decode_window(text, start)
        end = start + length
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadJSON(error.msg.removesuffix(" at"), start, start + error.pos) from error
    except UnicodeEncodeError as error:
        raise BadJSON("a \\u escape is half of a surrogate pair") from error
    except RecursionError as error:
        raise BadJSON("it is nested too deeply") from error
    except ValueError as error:
        raise BadJSON(str(error)) from error
    return value, end


def _decode_window(text: str, start: int) -> tuple[Any, int]:
    """The value at `start` and its length, read from as little text as needed.

    Python's decoder counts the lines of the whole text for every error, so that a text with thousands of broken values
    would take quadratic time.
    """
    width = _FIRST_WINDOW
    while True:
        window = text[start : start + width]
        edge = len(window) - _LONGEST_WORD if start + width < len(text) else len(window) + 1
        try:
            value, length = _DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            if error.pos < edge and not (edge < len(window) and error.msg.startswith("Unterminated string")):
                raise
        else:
            if length < edge or window[0] in '{["':
                return value, length
        width *= 4


def read_call(value: Any, text: str, argument_keys: tuple[str, ...] = ("arguments",)) -> ToolCall | MalformedCall:
    """A decoded value as a call.

    Args:
        value: what the JSON says.
        text: the raw text of the call, for a `MalformedCall`.
        argument_keys: keys that may hold the arguments; the first one is named in errors.

    Returns:
        Arguments that are a JSON string are decoded; null and a blank string count as no arguments.
    """
    key = argument_keys[0]
    if not isinstance(value, dict):
        return malformed(text, f"the call is {kind_of(value)}, not an object", key)
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        got = f"it is {kind_of(name)}" if "name" in value else "it is missing"
        return malformed(text, f'"name" must be the name of a tool as a string; {got}', key)
    found = next((k for k in argument_keys if k in value), None)
    if found is None:
        return malformed(text, f'"{key}" is missing', key, name)
    arguments = value[found]
    if isinstance(arguments, str):
        try:
            arguments = decode_whole(arguments) if arguments.strip() else None
        except BadJSON as error:
            return malformed(text, f'"{found}" is a string that is not valid JSON: {error}', key, name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return malformed(text, f'"{found}" must be an object; it is {kind_of(arguments)}', key, name)
    return ToolCall(name=name.strip(), arguments=arguments)


def malformed(text: str, problem: str, argument_key: str = "arguments", name: str | None = None) -> MalformedCall:
    """A call that was not understood, with the sentence that the model gets back."""
    if name is None and (match := _NAME.search(text)):
        name = match[1]
    return MalformedCall(
        text=text,
        error=(
            f"The tool call was not run: {problem}. Write one JSON object with the keys "
            f'"name" (a string) and "{argument_key}" (an object), and close it.'
        ),
        name=name,
    )


def decode_whole(text: str) -> Any:
    """The JSON value that is all of `text` but white space.

    Raises:
        BadJSON: as `decode_json`; or more text follows.
    """
    start = len(text) - len(text.lstrip())
    value, end = decode_json(text, start)
    if text[end:].strip():
        raise BadJSON("extra text", start, end)
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def kind_of(value: Any) -> str:
    """What a JSON value is, for an error text."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in a turn: Hermes, Qwen2.5, QwQ, Qwen3.

    The JSON is decoded first and the closing tag looked for after it, so a closing tag inside a string is harmless.
    """

    other_names = ("qwen25", "qwen2_5", "qwen3")
    open_tag = "<tool_call>"
    close_tag = "</tool_call>"

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        begin = text.find(self.open_tag, start)
        if begin < 0:
            return None
        inside = skip_space(text, begin + len(self.open_tag))
        try:
            value, after = decode_json(text, inside)
        except BadJSON as error:
            end = end_of_broken(text, inside, self.open_tag, self.close_tag)
            closed = text.endswith(self.close_tag, begin, end)
            problem = f"it is not valid JSON ({error})" if closed else f"it is not closed ({error})"
            return FoundCalls(begin, end, (malformed(text[begin:end], problem),))
        after = skip_space(text, after)
        if text.startswith(self.close_tag, after):
            end = after + len(self.close_tag)
            return FoundCalls(begin, end, (read_call(value, text[begin:end]),))
        end = end_of_broken(text, after, self.open_tag, self.close_tag)
        problem = (
            f"behind the JSON object it should be closed, but {found_instead(text[:end], after)}"
            if text.endswith(self.close_tag, begin, end)
            else "it is not closed"
        )
        return FoundCalls(begin, end, (malformed(text[begin:end], problem),))
