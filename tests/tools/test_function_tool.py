"""`@function_tool`: the schema from hints and docstring; sync and async functions."""

from __future__ import annotations

import asyncio
import enum
import threading
from dataclasses import dataclass
from datetime import date
from typing import Literal

import pytest
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12

from verl_mt.errors import PluginError, ToolCallError
from verl_mt.tools.function_tool import FunctionTool, function_tool
from verl_mt.tools.toolset import ToolSet


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def test_the_schema_is_what_transformers_renders():
    assert function_tool(add).tool_schema.to_template() == get_json_schema(add)
    assert function_tool(name="plus")(add).name == "plus"


def test_a_decorated_function_stays_a_function_and_is_a_tool():
    tool = function_tool(add)
    assert isinstance(tool, FunctionTool) and tool(2, 3) == 5 and tool.name == "add"
    assert asyncio.run(tool.execute("i", {"a": 2, "b": 3})) == 5


def test_sync_functions_run_in_a_thread_and_async_ones_are_awaited():
    async def where(text: str) -> str:
        """Say which thread.

        Args:
            text: unused
        """
        return threading.current_thread().name

    def where_sync(text: str) -> str:
        """Say which thread.

        Args:
            text: unused
        """
        return threading.current_thread().name

    main = threading.current_thread().name
    assert asyncio.run(function_tool(where).execute("i", {"text": ""})) == main
    assert asyncio.run(function_tool(where_sync).execute("i", {"text": ""})) != main


def test_a_schema_can_be_given_instead():
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    @function_tool(tool_schema=schema)
    def undocumented(point: Point | None = None, lock: threading.Lock | None = None):
        return point

    assert undocumented.tool_schema.to_template() == schema
    assert asyncio.run(undocumented.execute("i", {"point": {"x": 1}})) == {"x": 1}  # as the JSON that it is


def test_what_is_missing_is_named():
    def no_hint(x):
        """D.

        Args:
            x: text
        """

    def no_doc(x: int) -> int:
        return x

    def no_argument_doc(x: int) -> int:
        """Only a summary."""
        return x

    def variable(*numbers: int) -> int:
        """D.

        Args:
            numbers: some
        """
        return 0

    for function, part in [(no_hint, "x"), (no_doc, "docstring"), (no_argument_doc, "x"), (variable, "*numbers")]:
        with pytest.raises(PluginError) as caught:
            function_tool(function)
        assert function.__name__ in str(caught.value) and part in str(caught.value)


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Point:
    x: float
    y: float = 0.0


class Box(TypedDict):
    corner: Point
    title: str


class Query(BaseModel):
    words: list[str] = Field(min_length=1)
    unit: Unit = Unit.METRE


class Tree(BaseModel):
    children: list[Tree] = []


def parameters_of(function) -> dict:
    return function_tool(function).tool_schema.to_template()["function"]["parameters"]


def test_literals_optionals_and_lists_are_checked_as_written():
    def pick(kind: Literal["a", "b"], sizes: list[int] | None = None, limit: int | None = None) -> str:
        """Pick.

        Args:
            kind: which
            sizes: some sizes
            limit: at most
        """
        return f"{kind} {sizes} {limit}"

    tools = ToolSet([function_tool(pick)])
    tools.check_call("pick", {"kind": "a"})
    tools.check_call("pick", {"kind": "b", "sizes": None, "limit": None})
    for wrong in ({"kind": "c"}, {"kind": "a", "sizes": ["x"]}, {"kind": "a", "limit": "3"}, {"kind": None}):
        with pytest.raises(ToolCallError, match="wrong arguments for pick"):
            tools.check_call("pick", wrong)
    assert tools.schemas()[0] == get_json_schema(pick)


def test_dataclasses_typed_dicts_models_and_enums_are_shown_with_their_fields_and_arrive_as_objects():
    def draw(points: list[Point], box: Box, query: Query, unit: Unit = Unit.FOOT, at: date | None = None):
        """Draw.

        Args:
            points: where
            box: around
            query: what
            unit: of length
            at: when
        """
        return points, box, query, unit, at

    shown = parameters_of(draw)
    point = {
        "type": "object",
        "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
        "required": ["x"],
    }
    assert shown["properties"]["points"] == {"type": "array", "items": point, "description": "where"}
    assert shown["properties"]["box"]["properties"] == {"corner": point, "title": {"type": "string"}}
    assert shown["properties"]["unit"] == {"type": "string", "enum": ["m", "ft"], "description": "of length"}
    assert shown["properties"]["query"]["properties"]["words"]["minItems"] == 1
    assert shown["required"] == ["points", "box", "query"] and "$defs" not in str(shown)

    tool = function_tool(draw)
    arguments = {
        "points": [{"x": 1}],
        "box": {"corner": {"x": 0, "y": 1}, "title": "t"},
        "query": {"words": ["w"], "unit": "ft"},
        "at": "2026-01-02",
    }
    ToolSet([tool]).check_call("draw", arguments)
    points, box, query, unit, at = asyncio.run(tool.execute("i", arguments))
    assert points == [Point(1.0)] and box["corner"] == Point(0.0, 1.0) and query.unit is Unit.FOOT
    assert unit is Unit.FOOT and at == date(2026, 1, 2)
    with pytest.raises(ToolCallError, match=r"argument 'at'.*date"):
        asyncio.run(tool.execute("i", {**arguments, "at": "soon"}))


GOOGLE = """Add two numbers.

Args:
    a: the first
    b: the second, which
        may be left out
"""
NUMPY = """Add two numbers.

Parameters
----------
a : int
    the first
b : int, optional
    the second, which
    may be left out

Returns
-------
int
    the sum
"""
REST = """Add two numbers.

:param a: the first
:param b: the second, which
    may be left out
:return: the sum
"""


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_docstrings_of_three_styles_give_one_schema(docstring):
    def total(a: int, b: int = 1) -> int:
        return a + b

    total.__doc__ = docstring
    schema = function_tool(total).tool_schema.to_template()["function"]
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first"},
            "b": {"type": "integer", "description": "the second, which may be left out"},
        },
        "required": ["a"],
    }


def test_types_that_cannot_be_shown_are_refused_by_name():
    def recursive(tree: Tree):
        """D.

        Args:
            tree: a tree
        """

    def opaque(lock: threading.Lock):
        """D.

        Args:
            lock: a lock
        """

    with pytest.raises(PluginError, match="recursive: argument 'tree': Tree contains itself"):
        function_tool(recursive)
    with pytest.raises(PluginError, match="opaque: argument 'lock' has the type"):
        function_tool(opaque)
