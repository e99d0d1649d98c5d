"""`@function_tool`: a tool from a typed python function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, overload

from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.function_schema import from_json, rich_arguments, schema_of
from verl_mt.tools.schemas import OpenAIFunctionToolSchema
from verl_mt.user_code import in_daemon_thread


class FunctionTool(BaseTool):
    """A stateless tool around a function; still callable like the function itself.

    `converts`: whether arguments become what the type hints say (dataclasses, enums, ...).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None = None,
        tool_schema: OpenAIFunctionToolSchema | None = None,
        *,
        converts: bool = True,
    ):
        self.function = function
        self.is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        # A plain function gets its thread in `execute`, so nothing here blocks the caller's loop.
        self.runs_inline = not self.is_async
        self.__doc__ = function.__doc__
        self._converts = converts
        super().__init__(dict(config or {}), tool_schema)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema from the function's type hints and docstring."""
        schema = self.__dict__.get("tool_schema")
        return schema if schema is not None else schema_of(self.function)

    def bind(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> FunctionTool:
        """The tool that one YAML entry declares."""
        return FunctionTool(self.function, config, tool_schema or self.tool_schema, converts=self._converts)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """`function(**parameters, **kwargs)`: text, a dict, or (response, step reward, metrics).

        Raises:
            ToolCallError: an argument that its type refuses.
        """
        if self._converts:
            parameters = from_json(rich_arguments(self.function), parameters)
        if self.is_async:
            return await self.function(**parameters, **kwargs)
        value = await in_daemon_thread(self.function, **parameters, **kwargs)
        return await value if inspect.isawaitable(value) else value


@overload
def function_tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def function_tool(
    function: None = None, /, *, name: str | None = None, tool_schema: dict[str, Any] | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def function_tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    tool_schema: dict[str, Any] | None = None,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a function, sync or async; the YAML entry's `class_name` names it.

    The schema comes from the type hints and the docstring (Google's style, numpy's or reStructuredText's)::

        @function_tool
        def add(a: int, b: int) -> int:
            '''Add two numbers.

            Args:
                a: the first number
                b: the second number
            '''
            return a + b

    An argument may be a dataclass, a TypedDict, a pydantic model or an enum: the model sees the fields, the function
    gets the object.

    Args:
        name: what the model calls it; None = the function's name.
        tool_schema: an OpenAI tool schema to use as it is, instead of hints and docstring; arguments then arrive as
            the JSON that they are.

    Raises:
        PluginError: a type hint or a docstring is missing; names the function and the argument.
    """

    def make(target: Callable[..., Any]) -> FunctionTool:
        schema = OpenAIFunctionToolSchema.model_validate(tool_schema) if tool_schema else schema_of(target)
        if name:
            schema = schema.model_copy(update={"function": schema.function.model_copy(update={"name": name})})
        return FunctionTool(target, tool_schema=schema, converts=tool_schema is None)

    return make if function is None else make(function)
