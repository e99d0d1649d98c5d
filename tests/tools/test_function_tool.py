"""`@function_tool`: the schema from hints and docstring; sync and async functions."""

from __future__ import annotations

import asyncio
import threading

import pytest
from transformers.utils import get_json_schema

from verl_mt.errors import PluginError
from verl_mt.tools.function_tool import FunctionTool, function_tool


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
    def undocumented():
        return "ok"

    assert undocumented.tool_schema.to_template() == schema


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
