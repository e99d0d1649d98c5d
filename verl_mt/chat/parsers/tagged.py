"""Arguments between tags: where a raw value ends, and what type it has.

Values are written without escapes, so a closing tag inside a string looks like the end of the value. The end is the
first closing tag behind which the grammar goes on, or the opening of the next argument. Values carry no types either:
the tool's JSON schema says what they are.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_mt.chat.parsers.base import first_match, skip_space
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json, decode_whole
from verl_mt.data.conversation import MalformedCall, ToolSchema

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_TAG_BEGINS = re.compile(r"[<\[]")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_LONGEST_PYTHON = 20_000
_DEEPEST_SCHEMA = 16


class BadCall(ValueError):
    """A call that cannot be read; the message is the end of "The tool call was not run: ...".

    `at` is the position where reading stopped: what was read before it is not read again.
    """

    def __init__(self, problem: str, name: str | None = None, at: int = 0):
        super().__init__(problem)
        self.name = name
        self.at = at


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
    """The same as `goes_on` where templates write every tag on a line of its own; None: they do not."""


def not_run(text: str, problem: str, advice: str, name: str | None = None) -> MalformedCall:
    """A call that was not understood, with the sentence that the model gets back."""
    return MalformedCall(text=text, error=f"The tool call was not run: {problem}. {advice}", name=name or None)


def found_instead(text: str, position: int) -> str:
    """What stands at `position`, for an error text: no tags, for the model would see them as its own."""
    if position >= len(text):
        return "the text ends"
    shown = _TAG_BEGINS.split(text[position : position + 30])[0].strip()
    return f"it says {shown!r}" if shown else "another tag stands"


def end_of_broken(text: str, position: int, opening: str, closing: str) -> int:
    """After the next closing tag, before the next opening tag, or the end of the turn: whichever comes first."""
    close, open_ = text.find(closing, position), text.find(opening, position)
    if close >= 0 and (open_ < 0 or close < open_):
        return close + len(closing)
    return open_ if open_ >= 0 else len(text)


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
        if self._one_not_closed and self.text.find(self.tags.closing, start, span[0]) >= 0:
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
    place, loose = start, -1
    while True:
        closing = text.find(tags.closing, place, limit)
        opening = first_match(tags.opening, text, place)
        if opening is not None and opening.start() < (closing if closing >= 0 else limit):
            at_line = text.startswith("\n", opening.start() - 1)
            known = opening["whole"] is not None and _is_argument(opening["key"].strip(), parameters)
            if loose < 0 and on_lines is not None and not (at_line or known):
                place = opening.end()
                continue
            if loose < 0 and known and (on_lines is None or at_line):
                return opening.start(), opening.start()
            break
        if closing < 0:
            break
        place = closing + len(tags.closing)
        if on_lines is not None and text.startswith("\n", closing - 1) and on_lines.match(text, place):
            return closing, place
        if loose < 0 and tags.goes_on.match(text, place):
            loose = closing
            if on_lines is None:
                break
    return (loose, loose + len(tags.closing)) if loose >= 0 else None


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


def parameters_of(tools: Sequence[ToolSchema | dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The JSON schema of a tool's parameters; None = there is no such tool."""
    for tool in tools:
        schema = tool if isinstance(tool, dict) else tool.to_template()
        function = schema.get("function", schema)
        if function.get("name") == name:
            return function.get("parameters") or {}
    return None


def read_argument(text: str, key: str, parameters: Mapping[str, Any] | None, *, null_word: bool = False) -> Any:
    """A raw value as the type that the tool's schema gives the argument.

    - A string stays as it was written, white space included.
    - Other types are read as JSON, lists and objects also as Python writes them or with escaped quotes, and `True`,
      `False`, `None` count where the schema has that type. What cannot be read stays text: checking against the schema
      then tells the model.
    - Of several types the strictest that fits counts, so `3` for string-or-integer is a number.
    - Without a schema: JSON if it is JSON, but never a quoted string; else text.

    Args:
        parameters: the schema of all arguments; None = the tool is unknown.
        null_word: `null` means null whatever the schema says.
    """
    if null_word and text.strip() == "null":
        return None
    properties = (parameters or {}).get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    types = frozenset(_types(schema, parameters or {}, 0)) if isinstance(schema, dict) else frozenset()
    if types == {"string"}:
        return text
    for value in _readings(text, types):
        if not types and not isinstance(value, str):
            return value
        if any(_fits(value, name) for name in types - {"string"}):
            whole = isinstance(value, float) and "integer" in types and "number" not in types
            return int(value) if whole else value
        if types and "string" not in types:
            return value
    return text


def _readings(text: str, types: frozenset[str]) -> Iterator[Any]:
    try:
        yield decode_whole(text)
        return
    except BadJSON:
        pass
    word = text.strip()
    if word in _PYTHON_WORDS and types & {"boolean", "null"}:
        yield _PYTHON_WORDS[word]
    elif word[:1] in ("[", "{", "(") and types & {"array", "object"} and len(word) <= _LONGEST_PYTHON:
        if '\\"' in word:
            with contextlib.suppress(BadJSON):
                yield decode_whole(decode_whole(f'"{word}"'))
                return
        try:
            value = ast.literal_eval(word)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return
        yield list(value) if isinstance(value, tuple) else value


def _fits(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, ()))


def _types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> set[str]:
    """Names of the types that a schema allows; empty = any."""
    if depth > _DEEPEST_SCHEMA:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1) if isinstance(target, Mapping) else set()
    declared = schema.get("type")
    if declared:
        found = {declared} if isinstance(declared, str) else {t for t in declared if isinstance(t, str)}
    elif isinstance(schema.get("enum"), list) or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        found = {name for value in values for name in _TYPES if _fits(value, name)} - {"number"} | (
            {"number"} if any(isinstance(value, float) for value in values) else set()
        )
    else:
        found = set()
        for key in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(key) or ():
                inner = _types(one, root, depth + 1) if isinstance(one, Mapping) else set()
                if not inner and key != "allOf":
                    return set()
                found |= inner
    return found | ({"null"} if found and schema.get("nullable") is True else set())
