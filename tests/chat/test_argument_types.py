"""Raw values become what the tool's JSON schema says."""

from __future__ import annotations

import pytest

from verl_mt.chat.parsers.argument_types import read_argument


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " 3\n", " 3\n"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", 3),
        ({"anyOf": [{"type": "string"}, {}]}, "true", True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"oneOf": [{"type": "string"}, {}]}, "3", 3),
        ({"allOf": [{}, {"type": "string"}]}, "3", "3"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "3", "3"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [0.5, 2]}, "0.5", 0.5),
        ({"const": "3"}, "3", "3"),
        ({"$ref": "#/$defs/word"}, "3", "3"),
        ({"$ref": "#/$defs/loop"}, "3", 3),
        ({"$ref": "#/$defs/nothing"}, "3", 3),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", 3.5),
        ({"type": "integer"}, "three", "three"),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "1e300", 1e300),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "array"}, "[__import__('os')]", "[__import__('os')]"),
        ({"type": "object"}, "{'a': {1, 2}}", "{'a': {1, 2}}"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": "array"}, "[1e999]", "[1e999]"),
        ({"type": "object"}, "{'a': -1e999}", "{'a': -1e999}"),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, '"a"', '"a"'),
        ({}, "True", "True"),
    ],
)
def test_a_raw_value_becomes_what_the_schema_says(schema, text, value):
    parameters = {"properties": {"k": schema}, "$defs": {"word": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    got = read_argument(text, "k", parameters)
    assert got == value and type(got) is type(value)


def test_values_of_unknown_tools_and_arguments_are_json_or_text():
    assert read_argument("3", "k", None) == 3 and read_argument("Paris", "k", None) == "Paris"
    assert read_argument("[1]", "other", {"properties": {"k": {}}}) == [1]
