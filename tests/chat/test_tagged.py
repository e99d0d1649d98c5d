"""Values between tags: where each ends, and what type it has."""

from __future__ import annotations

from typing import Any

import pytest

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.parsers.argument_types import parameters_of, read_argument
from verl_mt.chat.parsers.base import BadCall
from verl_mt.data.conversation import OpenAIFunctionToolSchema, ToolCall
from verl_mt.extensions.rare_parsers.tagged import Values

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
SCHEMA: dict[str, Any] = {"properties": {"s": STRING, "i": INTEGER, "o": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
DEFS = {"n": STRING, "deep": {"n": STRING}, "flat": 3, "self": {"$ref": "#/$defs/self"}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, " 3 ", " 3 "),
        (INTEGER, "3", 3),
        (INTEGER, "3.0", 3),
        (INTEGER, "3.5", 3.5),
        (INTEGER, "1e2", 100),
        (INTEGER, "abc", "abc"),
        (INTEGER, "true", True),
        (INTEGER, "True", "True"),
        (INTEGER, "(1, 2)", "(1, 2)"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "3.0", 3.0),
        ({"type": ["integer", "number"]}, "3.0", 3.0),
        ({"type": ["string", "integer"]}, "3", 3),
        ({"type": ["string", "integer"]}, "3.0", 3),
        ({"type": ["string", "integer"]}, "3.5", "3.5"),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"type": ["string", "integer"]}, '"x"', '"x"'),
        ({"type": ["string", "number"]}, "true", "true"),
        ({"type": ["string", "number"]}, "2.0", 2.0),
        ({"type": ["string", 3]}, "3", "3"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, " True ", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "None", None),
        ({"type": "boolean"}, "1", 1),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "True", "True"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "array"}, " ['a'] ", ["a"]),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "array"}, r"[\"a\"]", ["a"]),
        ({"type": "array"}, "{'a': 1}", {"a": 1}),
        ({"type": "array"}, "[1e999]", "[1e999]"),
        ({"type": "array"}, "a", "a"),
        ({"type": ["array", "string"]}, "(1, 2)", [1, 2]),
        ({"type": ["array", "string"]}, "{'a': 1}", "{'a': 1}"),
        ({"type": "object"}, r"{\"a\": 1}", {"a": 1}),
        ({"type": "object"}, r"""{'a': '\\"'}""", {"a": '\\"'}),
        ({"type": "object"}, '{"a": 1} x', '{"a": 1} x'),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, "{'a'", "{'a'"),
        ({"type": "date"}, "3", 3),
        ({"type": "date"}, "abc", "abc"),
        (None, "3", 3),
        (None, '"x"', '"x"'),
        (None, "abc", "abc"),
        (None, "null", None),
        (None, "True", "True"),
        (None, "['a']", "['a']"),
        (True, "3", 3),
    ],
)
def test_a_raw_value_gets_the_strictest_type_of_the_schema_that_fits(schema, text, value):
    assert repr(read_argument(text, "a", {"properties": {"a": schema}})) == repr(value)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"enum": ["a", 1]}, "1", 1),
        ({"enum": ["a", 1]}, "2.0", 2),
        ({"enum": ["a", 1]}, "2.5", "2.5"),
        ({"enum": ["a", 1.5]}, "2", 2),
        ({"enum": ["a", 1.5]}, "2.0", 2.0),
        ({"enum": ["a", 1.5]}, "2.5", 2.5),
        ({"enum": ["a", 1.0]}, "2.0", 2.0),
        ({"enum": ["a", True]}, "True", True),
        ({"enum": ["a", True]}, "1", "1"),
        ({"enum": "x"}, "3", 3),
        ({"enum": "x"}, '"x"', '"x"'),
        ({"enum": "x", "const": "a"}, "3", "3"),
        ({"const": "a"}, "3", "3"),
        ({"const": None}, "None", None),
        ({"anyOf": [STRING, INTEGER]}, "3", 3),
        ({"anyOf": [STRING]}, "3", "3"),
        ({"anyOf": [STRING, {}]}, "3", 3),
        ({"anyOf": [STRING, {}]}, '"x"', '"x"'),
        ({"anyOf": [STRING, True]}, "3", 3),
        ({"anyOf": [STRING], "oneOf": [INTEGER]}, "3", 3),
        ({"anyOf": None}, "3", 3),
        ({"oneOf": [STRING, {"type": "boolean"}]}, "True", True),
        ({"oneOf": [STRING, {}]}, "3", 3),
        ({"allOf": [STRING, {"description": "x"}]}, "3", "3"),
        ({"allOf": [{"description": "x"}, STRING]}, "3", "3"),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"type": "integer", "nullable": "yes"}, "None", "None"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"nullable": True}, "None", "None"),
        (INTEGER, "None", "None"),
        ({"$ref": "#/$defs/n"}, "3", "3"),
        ({"$ref": "#/$defs/deep/n"}, "3", "3"),
        ({"$ref": "#/$defs/none"}, "3", 3),
        ({"$ref": "#/$defs/flat/n"}, "3", 3),
        ({"$ref": "#/$defs/self"}, "3", 3),
        ({"$ref": 3, "type": "string"}, "3", "3"),
    ],
)
def test_types_are_read_from_choices_and_references_of_a_schema(schema, text, value):
    assert repr(read_argument(text, "a", {"properties": {"a": schema}, "$defs": DEFS})) == repr(value)


@pytest.mark.parametrize(("levels", "value"), [(16, "3"), (17, 3)])
def test_a_schema_is_followed_sixteen_levels_deep(levels, value):
    defs: dict[str, Any] = {f"n{k}": {"$ref": f"#/$defs/n{k + 1}"} for k in range(1, levels)}
    linked = {"properties": {"a": {"$ref": "#/$defs/n1"}}, "$defs": {**defs, f"n{levels}": STRING}}
    nested: dict[str, Any] = STRING
    for _ in range(levels):
        nested = {"anyOf": [nested]}
    assert read_argument("3", "a", linked) == read_argument("3", "a", {"properties": {"a": nested}}) == value


def test_a_list_as_python_writes_it_may_have_twenty_thousand_characters():
    schema = {"properties": {"a": {"type": "array"}}}
    for size, read in ((20_000, True), (20_001, False)):
        text = f"['{'x' * (size - 4)}']"
        assert read_argument(text, "a", schema) == (["x" * (size - 4)] if read else text)


def test_the_word_null_is_null_where_the_grammar_says_so_and_where_the_schema_names_no_type():
    schema = {"properties": {"a": STRING}}
    assert read_argument(" null\n", "a", schema, null_word=True) is None
    assert read_argument("null", "a", schema) == "null"
    for unknown in (None, {}, {"properties": []}, {"properties": {"b": STRING}}):
        assert read_argument("null", "a", unknown) is None and read_argument("x", "a", unknown) == "x"


def test_the_parameters_of_a_tool_are_found_by_its_name_in_every_shape_of_schema():
    described = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {"s": STRING}}}
    whole = {"type": "function", "function": described}
    assert parameters_of([{"name": "g"}, described], "f") == described["parameters"]
    assert parameters_of([{"type": "function", "function": {"name": "g"}}, whole], "f") == described["parameters"]
    made = parameters_of([OpenAIFunctionToolSchema.model_validate(whole)], "f")
    assert made is not None and list(made["properties"]) == ["s"]
    assert parameters_of([{"name": "f"}], "f") == parameters_of([{"name": "f", "parameters": None}], "f") == {}
    assert parameters_of([whole], "g") is None and parameters_of([], "f") is None


def read(parser: str, text: str) -> tuple[list[Any], str]:
    """Arguments of each call, or the error of what is none; and the content."""
    turn = get_parser(parser).parse(text, TOOLS)
    found: list[Any] = []
    for action in turn.actions:
        if isinstance(action, ToolCall):
            found.append(action.arguments)
        else:
            problem = action.error.removeprefix("The tool call was not run: ").partition(". Write")[0]
            found.append((action.text, action.name, problem))
    return found, turn.content


CLOSED_TWICE = "the parameter 'i' is closed twice, and one before it is not closed"
NOT_CLOSED = "the parameter 's' is not closed"


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ('<parameter=o>{"a": "</parameter></function></seed:tool_call>"}</parameter>',
         {"o": {"a": "</parameter></function></seed:tool_call>"}}),
        ('<parameter=o> \n{"a": "</parameter></function>"} </parameter> \n<parameter=i>1</parameter>',
         {"o": {"a": "</parameter></function>"}, "i": 1}),
        ('<parameter=s>["</parameter><parameter=i>"]</parameter>', {"s": '["</parameter><parameter=i>"]'}),
        ('<parameter=s>{"a": 1}</parameter>x</parameter>', {"s": '{"a": 1}</parameter>x'}),
        ('<parameter=s>{"a": 1} x</parameter>', {"s": '{"a": 1} x'}),
        ("<parameter=s>{bad</parameter>", {"s": "{bad"}),
        ("<parameter=s>a</parameter>b</parameter>", {"s": "a</parameter>b"}),
        ("<parameter=s></parameter>", {"s": ""}),
        ("<parameter=s>a</parameter></parameter>", {"s": "a</parameter>"}),
        ("<parameter=s>\na\n</parameter>", {"s": "\na\n"}),
        ("<parameter=s> a \n<parameter=i>1</parameter>", {"s": " a", "i": 1}),
        ("<parameter=s>a<parameter= i >1</parameter>", {"s": "a", "i": 1}),
        ("<parameter=s>a <parameter=zz>1</parameter>", NOT_CLOSED),
        ("<parameter=s>a <parameter=>1</parameter>", NOT_CLOSED),
        ("<parameter=s>a<parameter=i</parameter>", NOT_CLOSED),
        ("<parameter=s>a</parameter>b<parameter=i>1</parameter>", {"s": "a</parameter>b", "i": 1}),
        ("<parameter=s>a</parameter>b<parameter=zz>1</parameter>", NOT_CLOSED),
        ("<parameter=s>a<parameter=i>1</parameter>2</parameter>", CLOSED_TWICE),
        ("<parameter=s>a<parameter=i></parameter>2</parameter>", CLOSED_TWICE),
        ("<parameter=s>a<parameter=i>1</parameter></parameter>", CLOSED_TWICE),
        ("<parameter=s>a<parameter=i>1</parameter><parameter=o>{}</parameter>", {"s": "a", "i": 1, "o": {}}),
        ("<parameter=s>a</parameter><parameter=i>1</parameter>2</parameter>", {"s": "a", "i": "1</parameter>2"}),
        ("<parameter=s>a</function></seed:tool_call> x </parameter>", {"s": "a</function></seed:tool_call> x "}),
        ("<parameter=s>a <function=f> <parameter=s>b</parameter>", NOT_CLOSED),
        ("<parameter=s>a <function=f> b</parameter>", {"s": "a <function=f> b"}),
        ("<parameter=>1</parameter>", "a parameter tag should come where another tag stands"),
        ("x<parameter=s>1</parameter>", "a parameter tag should come where it says 'x'"),
    ],
)  # fmt: skip
def test_a_value_ends_where_the_grammar_goes_on_behind_its_closing_tag(inside, expected):
    text = f"<seed:tool_call><function=f>{inside}</function></seed:tool_call>"
    known = isinstance(expected, dict)
    assert read("seed_oss", text) == (([expected], "") if known else ([(text, "f", expected)], text))


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("<parameter=s>\nx</parameter></function> y\n</parameter>", [{"s": "x</parameter></function> y"}]),
        ("<parameter=s>\nx</parameter>", [{"s": "x"}]),
        ("<parameter=s>x</parameter>", [{"s": "x"}]),
        ("<parameter=s>x\n</parameter>", [{"s": "x"}]),
        ("<parameter=s>\n\na\n\n</parameter>", [{"s": "\na\n"}]),
        ("<parameter=s>\nx\n</parameter><parameter=i>\n1\n</parameter>", [{"s": "x", "i": 1}]),
        ("<parameter=s>\na</parameter>\n<parameter=i>\n1\n</parameter>\n", [{"s": "a", "i": 1}]),
        ("<parameter=s>\nx\n</parameter> </function>\n</parameter>", [{"s": "x\n</parameter> </function>"}]),
        ("<parameter=s>\nx</parameter><parameter=i>1</parameter> y\n</parameter>\n<parameter=i>\n1\n</parameter>",
         "the parameter 'i' appears twice"),
        ("<parameter=s>\nx</parameter><parameter=i>1</parameter> y", "the parameter 'i' is not closed"),
        ("<parameter=s>\nx</parameter></function></parameter>\n<parameter=i>1</parameter>",
         "its closing tag should come where another tag stands"),
        ("<parameter=s>\na <parameter=zz>\n</parameter>", [{"s": "a <parameter=zz>"}]),
        ("<parameter=s>\na <parameter=i\n</parameter>", [{"s": "a <parameter=i"}]),
        ("<parameter=s>\na\n<parameter=zz>\n</parameter>", NOT_CLOSED),
        ("<parameter=s>\na\n<parameter=i\n</parameter>", NOT_CLOSED),
        ("<parameter=s>\na <parameter=i>\n1\n</parameter>", NOT_CLOSED),
        ("<parameter=s>\na\n<parameter=i>\n1\n</parameter>", [{"s": "a", "i": 1}]),
        ("<parameter=s>a <parameter=zz>\n</parameter>", NOT_CLOSED),
        ("<parameter=s>a\n<parameter=i>1</parameter>", [{"s": "a", "i": 1}]),
        ("<parameter=s>a <parameter=i>1</parameter>", [{"s": "a", "i": 1}]),
        ("<parameter=s>\na</tool_call>b\n</parameter>\n<parameter=s>\n2\n</parameter>",
         "the parameter 's' appears twice"),
        ("<parameter=s>\na</tool_call>b\n</parameter>\n</function>junk",
         "its closing tag should come where it says 'junk'"),
        ("<parameter=s>\na</tool_call>b\n</parameter>\n</function>\n<function=g>", [{"s": "a</tool_call>b"}, {}]),
    ],
)  # fmt: skip
def test_a_value_on_lines_of_its_own_ends_at_a_closing_tag_on_its_own_line(inside, expected):
    text = f"<tool_call>\n<function=f>\n{inside}\n</function>\n</tool_call>"
    known = isinstance(expected, list)
    assert read("qwen3_coder", text) == ((expected, "") if known else ([(text, "f", expected)], text))


EMPTY = "<function=f></function>"
OPENED = "<function=f><parameter=s>a"
TWICE = "the parameter 's' appears twice"
NO_FUNCTION = "a function tag with a name should come where"


@pytest.mark.parametrize(
    ("text", "expected", "content"),
    [
        (f"x{EMPTY}y<tool_call>{EMPTY}</tool_call>", [{}, {}], "xy"),
        (f"<tool_call>{EMPTY}</tool_call>{EMPTY}", [{}, {}], ""),
        (f"{EMPTY * 3} \n</tool_call>z", [{}, {}, {}], "z"),
        (OPENED, [(OPENED, "f", NOT_CLOSED)], OPENED),
        (f"{OPENED}</function>z{EMPTY}", [(f"{OPENED}</function>", "f", NOT_CLOSED), {}], f"{OPENED}</function>z"),
        (f"{OPENED}</parameter>x</function>z", [(f"{OPENED}</parameter>x</function>", "f", NOT_CLOSED)],
         f"{OPENED}</parameter>x</function>z"),
        (f"{OPENED}</parameter>x<tool_call>{EMPTY}</tool_call>", [(f"{OPENED}</parameter>x", "f", NOT_CLOSED), {}],
         f"{OPENED}</parameter>x"),
        ("<tool_call> <function= f ><parameter= s >a</parameter></function></tool_call>", [{"s": "a"}], ""),
        (f"<tool_call>\n{EMPTY}", [(f"<tool_call>\n{EMPTY}", "f",
         "it is not closed (its closing tag should come where the text ends)")], f"<tool_call>\n{EMPTY}"),
        (f"a<tool_call>{EMPTY}<tool_call>{EMPTY}</tool_call>", [(f"<tool_call>{EMPTY}", "f",
         "it is not closed (its closing tag should come where another tag stands)"), {}], f"a<tool_call>{EMPTY}"),
        ("<tool_call>", [("<tool_call>", None, f"it is not closed ({NO_FUNCTION} the text ends)")], "<tool_call>"),
        ("<tool_call></tool_call>z", [("<tool_call></tool_call>", None, f"{NO_FUNCTION} another tag stands")],
         "<tool_call></tool_call>z"),
        ("<tool_call>x</tool_call>", [("<tool_call>x</tool_call>", None, f"{NO_FUNCTION} it says 'x'")],
         "<tool_call>x</tool_call>"),
        (f"{OPENED}</function>b</parameter><parameter=s>2</parameter></function>z", [
            (f"{OPENED}</function>b</parameter><parameter=s>2</parameter></function>", "f", TWICE)],
         f"{OPENED}</function>b</parameter><parameter=s>2</parameter></function>z"),
        (f"{OPENED}{EMPTY}b</parameter><parameter=s>2</parameter></function>z", [
            (f"{OPENED}{EMPTY}b</parameter><parameter=s>2</parameter></function>", "f", TWICE)],
         f"{OPENED}{EMPTY}b</parameter><parameter=s>2</parameter></function>z"),
        ('<tool_call><function=nope><parameter=i>1</parameter><parameter=zz>"x"</parameter></function></tool_call>',
         [{"i": 1, "zz": '"x"'}], ""),
        ("<tool_call><function=f><parameter=i>null</parameter><parameter=s>null</parameter></function></tool_call>",
         [{"i": None, "s": None}], ""),
    ],
)  # fmt: skip
def test_function_blocks_with_and_without_outer_tags_end_where_they_should(text, expected, content):
    assert read("qwen3_coder", text) == (expected, content)


def test_a_value_that_is_not_closed_does_not_swallow_the_next_call():
    cut = "<seed:tool_call><function=f><parameter=s>a</function></seed:tool_call>"
    whole = "<seed:tool_call><function=f><parameter=s>b</parameter></function></seed:tool_call>"
    assert read("seed_oss", cut + whole) == ([(cut, "f", NOT_CLOSED), {"s": "b"}], cut)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("</parameter></function> <parameter=i>1</parameter></function>", ("", 12)),
        ("</parameter>x</parameter></function>", ("</parameter>x", 25)),
        ("<parameter=i>1</parameter>", ("", 0)),
        ("x<parameter=i>1</parameter>", ("x", 1)),
    ],
)
def test_a_value_may_stand_at_the_beginning_of_the_text(text, expected):
    assert Values(text, get_parser("seed_oss")._tags, "f", SCHEMA).read(0, "s") == expected
    with pytest.raises(BadCall, match=r"^the parameter 's' is not closed$"):
        Values("</parameter>x", get_parser("seed_oss")._tags, "f", SCHEMA).read(0, "s")


@pytest.mark.parametrize("properties", [{}, ["x"], None])
def test_any_argument_may_follow_where_the_schema_names_none(properties):
    text = "<seed:tool_call><function=f><parameter=s>a<parameter=i>1</parameter></function></seed:tool_call>"
    tools = [{"name": "f", "parameters": {"properties": properties}}]
    assert get_parser("seed_oss").parse(text, tools).calls == [ToolCall("f", {"s": "a", "i": 1})]


ARGUMENT = "<arg_key>s</arg_key><arg_value>a</tool_call>b</arg_value>"


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("f<arg_key> s </arg_key> \n<arg_value>x</arg_value> \n", {"s": "x"}),
        (" f ", {}),
        ("f<arg_key> </arg_key><arg_value>x</arg_value>", "a key and its value should come where another tag stands"),
        ("f<arg_key>s</arg_key><arg_value>a <arg_key>i</arg_key><arg_value>1</arg_value>", {"s": "a", "i": 1}),
        (f"f{ARGUMENT}<arg_key>s</arg_key><arg_value>a</arg_value>", "the argument 's' appears twice"),
        (f"f{ARGUMENT}", {"s": "a</tool_call>b"}),
        ("f<arg_key>i</arg_key><arg_value>1.0</arg_value>", {"i": 1}),
        ("f<arg_key>i</arg_key><arg_value>None</arg_value>", {"i": "None"}),
    ],
)
def test_keys_and_values_of_glm_are_read_in_pairs(inside, expected):
    text = f"<tool_call>{inside}</tool_call>"
    known = isinstance(expected, dict)
    assert read("glm45", f"{text}z") == (([expected], "z") if known else ([(text, "f", expected)], f"{text}z"))
    assert [call.name for call in get_parser("glm45").parse(text).calls] == ["f"] * known


def test_a_glm_call_without_a_name_ends_at_its_closing_tag():
    text = "<tool_call>{}</tool_call>"
    problem = "the name of a tool and its arguments should come where it says '{}'"
    assert read("glm45", f"x{text}{text}z") == ([(text, None, problem)] * 2, f"x{text}{text}z")
