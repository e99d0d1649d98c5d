"""Schemas of strangers and arguments of a model: checked in bounded time, without reading anything else."""

from __future__ import annotations

import itertools
import logging
import time

import pytest

from verl_mt.bounds import MAX_ARGUMENT_CHARACTERS, MAX_ARGUMENT_VALUES, MAX_DEPTH, MAX_SCHEMA_VALUES, excess
from verl_mt.errors import PluginError, ToolCallError
from verl_mt.tools.argument_schema import ArgumentSchema

NODE = {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}


def schema(x, **more) -> ArgumentSchema:
    return ArgumentSchema({"type": "object", "properties": {"x": x}, **more}, "tools[0]: tool_schema of 't'")


def messages(x, value, **more) -> list[str]:
    return [error.message for error in schema(x, **more).errors("t", {"x": value})]


def nested(levels: int):
    value = 1
    for _ in range(levels):
        value = {"c": value}
    return value


def test_unique_items_is_linear_and_equal_as_json_schema_says():
    unique = {"type": "array", "uniqueItems": True}
    objects = [{"a": k, "b": [k, {"c": None}]} for k in range(1500)]
    begun = time.process_time()
    assert messages(unique, objects) == []
    assert time.process_time() - begun < 1.0, "the library's own takes 20 s"
    for pair in ([1, 1.0], [{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], ["a", "a"], [None, None], [[], []]):
        assert messages(unique, pair) == ["the list has an item twice, and its items must be unique"], pair
    different = [1, True, 0, False, None, "", [], {}, [1], [True], {"a": 1}, {"a": True}, "list", ["list"], [[]]]
    assert messages(unique, different) == [] and messages({"uniqueItems": False}, [1, 1]) == []


def test_patterns_run_in_a_linear_engine():
    begun = time.process_time()
    slow = "a" * 5000 + "!"
    (refused,) = messages({"type": "string", "pattern": "^(a+)+$"}, slow)
    assert refused.endswith("does not match '^(a+)+$'") and len(refused) < 200
    keyed = {"type": "object", "patternProperties": {"^(a+)+$": {"type": "string"}}, "additionalProperties": False}
    assert messages(keyed, {"aaa": "text"}) == []
    assert messages(keyed, {"aaa": 1}) == ["1 is not of type 'string'"]
    (extra,) = messages(keyed, {slow: 1})
    assert extra.startswith("Additional properties are not allowed ('aaa")
    assert time.process_time() - begun < 1.0
    assert messages({"pattern": "x"}, "\ud800x") == [], "also in a text that is no UTF-8"
    numbers = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
    assert messages(numbers, {"a": "any", "b": 1}) == []
    assert messages(numbers, {"a": "any", "b": "one"}) == ["'one' is not of type 'integer'"]


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ({"$ref": "http://127.0.0.1:9/s.json"}, "'http://127.0.0.1:9/s.json' is no part of the schema"),
        ({"$ref": "file:///etc/passwd"}, "references are never retrieved. Put what it refers to into"),
        ({"$ref": "#/$defs/none"}, r"'#/\$defs/none' is no part of the schema"),
        ({"items": {"$dynamicRef": "https://h/s"}}, "dynamicRef 'https://h/s' is no part"),
        ({"properties": {"enum": {"$ref": "x.json"}}}, "'x.json' is no part of the schema"),
        ({"$ref": "#/properties/x"}, "'#/properties/x' refers to itself"),
        ({"pattern": "(?!a)b"}, r"pattern '\(\?!a\)b' cannot be checked in linear time .* Write it without look"),
        ({"properties": {"default": {"pattern": r"(a)\1"}}}, "back-references"),
        ({"patternProperties": {"(?=a)": {}}}, "cannot be checked in linear time"),
        ({"unevaluatedProperties": False, "$ref": "#/$defs/n"}, "Write additionalProperties or items instead"),
        ({"enum": list(range(MAX_SCHEMA_VALUES))}, "parameters are too large: more than 20000 values"),
        ({"enum": [nested(100)]}, "parameters are too large: more than 64 levels"),
        ({"const": "x" * 1_000_001}, "more than 1000000 characters"),
    ],
)
def test_a_schema_that_cannot_be_checked_in_bounded_time_is_refused_at_load(x, says):
    with pytest.raises(PluginError, match=r"^tools\[0\]: tool_schema of 't': .*" + says):
        schema(x, **{"$defs": {"n": {}}})


def test_what_looks_like_a_keyword_in_data_is_data():
    data = {"$ref": "http://h/x", "pattern": "(?!a)", "nullable": True}
    assert messages({"const": data, "default": data, "examples": [data]}, data) == []
    assert messages({"properties": {"pattern": {"type": "string"}, "$ref": {}}}, {"pattern": "(?!", "$ref": 1}) == []


@pytest.mark.slow
def test_recursive_schemas_work_and_have_a_budget():
    defs = {"$defs": {"n": NODE}}
    assert messages({"$ref": "#/$defs/n"}, nested(20), **defs) == ["1 is not of type 'object'"]
    twice = {"anyOf": [{**NODE, "required": ["y"]}, {**NODE, "required": ["z"]}]}
    with pytest.raises(ToolCallError, match="arguments of t have too many parts to check: send fewer values"):
        schema({"$ref": "#/$defs/n"}, **{"$defs": {"n": twice}}).errors("t", {"x": nested(40)})
    long = {"type": "array", "items": {"enum": list(range(5000))}}
    with pytest.raises(ToolCallError, match="too many parts to check"):  # each list entry has a price
        schema(long).errors("t", {"x": [4999] * 5000})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1] * MAX_ARGUMENT_VALUES, "more than 10000 values"),
        (nested(5000), "more than 64 levels"),
        ("x" * (MAX_ARGUMENT_CHARACTERS + 1), "more than 1000000 characters"),
        ({"x" * (MAX_ARGUMENT_CHARACTERS + 1): 1}, "more than 1000000 characters"),
        (10**5000, "an integer of more than 4214 digits"),
    ],
    ids=["values", "levels", "text", "key", "integer"],
)
def test_arguments_that_are_too_large_are_the_models_mistake(value, says):
    with pytest.raises(ToolCallError, match=f"arguments of t are too large: {says}"):
        schema({}).errors("t", {"x": value})


def test_a_pattern_that_the_server_checks_too_may_be_unknown_here(caplog):
    parameters = {"type": "object", "properties": {"mail": {"type": "string", "pattern": r"^(?!\.)x"}}}
    with caplog.at_level(logging.WARNING):
        found = ArgumentSchema(parameters, "MCP server 'a'", server_checks=True)
    assert found.errors("t", {"mail": "anything"}) == [] and len(found.errors("t", {"mail": 5})) == 1
    assert "MCP server 'a': pattern" in caplog.text and "The server checks it" in caplog.text
    keyed = {"type": "object", "patternProperties": {"(?=a)": {}, "(?=b)": {}}, "additionalProperties": False}
    assert ArgumentSchema(keyed, "s", server_checks=True).errors("t", {"any": 1}) == []


def test_a_value_is_measured_in_bounded_time():
    bomb: list = []
    for _ in range(60):
        bomb = [bomb] * 10
    loop: dict = {}
    loop["again"] = loop
    begun = time.process_time()
    assert excess(bomb, max_values=1000, max_characters=10) == "more than 1000 values"
    assert excess(loop, max_values=1000, max_characters=1000) == f"more than {MAX_DEPTH} levels"
    assert time.process_time() - begun < 1.0
    exact = [[1, "ab"], {"k": None}]
    assert excess(exact, max_values=6, max_characters=3) == ""
    assert [bool(excess(exact, max_values=v, max_characters=c)) for v, c in itertools.product((5, 6), (2, 3))] == [
        True,
        True,
        True,
        False,
    ]
