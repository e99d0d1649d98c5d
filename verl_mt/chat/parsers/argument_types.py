"""Arguments that carry no types get them from the tool's JSON schema."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_mt.chat.parsers.json_calls import BadJSON, decode_whole
from verl_mt.data.conversation import ToolSchema

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_LONGEST_PYTHON = 20_000
_DEEPEST_SCHEMA = 16


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
