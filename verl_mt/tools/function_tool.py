"""`@function_tool`: a tool from a typed python function."""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, overload

import docstring_parser
from docstring_parser.common import DocstringStyle
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from verl_mt.errors import PluginError, ToolCallError
from verl_mt.plugins import code_place
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, as_tool_schema
from verl_mt.user_code import in_daemon_thread

_PLAIN = (str, int, float, bool, type(None), Any, list, dict, Literal, Union, types.UnionType)


def schema_of(function: Callable[..., Any], where: str | None = None) -> OpenAIFunctionToolSchema:
    """An OpenAI tool schema from type hints and docstring.

    Plain types (text, numbers, lists, dicts, Literal, Optional) come out as transformers' `get_json_schema` writes
    them; dataclasses, TypedDicts, pydantic models, enums and what else pydantic knows with their fields. The docstring
    may be Google's, numpy's or reStructuredText's.

    Args:
        function: the function; a bound method is shown without its first argument.
        where: what to call it in errors; None = `@function_tool` and its name.

    Raises:
        PluginError: a type hint or a description is missing, or a type has no schema; names function and argument.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    where = where or f"@function_tool {code_place(function)}"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise PluginError(
                f"{where}: argument {parameter} cannot be shown to a model. Give it a name, a type and a description"
            )
    rich = rich_arguments(function)
    try:
        schema = get_json_schema(_plainer(function, rich))
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise PluginError(
            f"{where}: no tool schema can be made: {error} Every argument needs a type hint and a line `name: text` "
            "under `Args:` in the docstring, or pass tool_schema={...}."
        ) from error
    properties = schema["function"]["parameters"]["properties"]
    for name, adapter in rich.items():
        properties[name] = {**_json_schema(adapter, f"{where}: argument {name!r}"), **_description(properties[name])}
    return OpenAIFunctionToolSchema.model_validate(schema)


@lru_cache(maxsize=1024)
def rich_arguments(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """The arguments that JSON cannot give as they are: name -> what makes them from JSON.

    Raises:
        PluginError: pydantic does not know the type.
    """
    found: dict[str, TypeAdapter[Any]] = {}
    for name, hint in _hints(function).items():
        if name != "return" and not _is_plain(hint):
            try:
                found[name] = TypeAdapter(hint)
            except PydanticUserError as error:
                where = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
                raise PluginError(
                    f"@function_tool {where}: argument {name!r} has the type {hint!r}, which no JSON can become. "
                    "Use text, numbers, lists, dicts, dataclasses or pydantic models"
                ) from error
    return found


def from_json(adapters: dict[str, TypeAdapter[Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with `adapters` applied.

    Raises:
        ToolCallError: a value that its type refuses; the text is written for the model.
    """
    converted = dict(arguments)
    for name in adapters.keys() & arguments.keys():
        try:
            converted[name] = adapters[name].validate_python(arguments[name])
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, (name, *first["loc"])))
            raise ToolCallError(f"argument {path!r}: {first['msg']}") from error
    return converted


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except NameError as error:
        raise PluginError(
            f"@function_tool {code_place(function)}: {error}. Its type "
            "hints must name things that exist at the top of its module"
        ) from error


def _is_plain(hint: Any) -> bool:
    if isinstance(hint, enum.EnumMeta):
        return False
    origin = get_origin(hint)
    if origin is Literal:
        return True
    if origin in (list, dict, Union, types.UnionType):
        return all(map(_is_plain, get_args(hint)))
    return origin is None and hint in _PLAIN


def _plainer(function: Callable[..., Any], rich: dict[str, TypeAdapter[Any]]) -> Callable[..., Any]:
    """A stand-in with a Google docstring and plain types, which is what transformers reads."""
    documented = docstring_parser.parse(inspect.getdoc(function) or "")
    google = documented.style in (None, DocstringStyle.GOOGLE) or not documented.params
    if google and not rich:
        return function

    def stand_in() -> None: ...

    signature = inspect.signature(function)
    hints = {name: str if name in rich else hint for name, hint in _hints(function).items()}
    parameters = [p.replace(annotation=hints.get(p.name, p.empty)) for p in signature.parameters.values()]
    stand_in.__name__, stand_in.__annotations__ = function.__name__, hints
    stand_in.__doc__ = inspect.getdoc(function) if google else _as_google(documented)
    stand_in.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return stand_in


def _as_google(documented: docstring_parser.Docstring) -> str:
    def one_line(text: str | None) -> str:
        return " ".join((text or "").split())

    arguments = "\n".join(f"    {p.arg_name}: {one_line(p.description)}" for p in documented.params)
    parts = (documented.short_description, documented.long_description)
    return "\n\n".join([*filter(None, map(one_line, parts)), f"Args:\n{arguments}"])


def _json_schema(adapter: TypeAdapter[Any], where: str) -> dict[str, Any]:
    schema = adapter.json_schema()
    return _inlined(schema, schema.pop("$defs", {}), (), where)


def _inlined(node: Any, defs: dict[str, Any], inside: tuple[str, ...], where: str) -> Any:
    """Without references and titles: models read the schema as text."""
    if isinstance(node, list):
        return [_inlined(item, defs, inside, where) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name in inside:
            raise PluginError(f"{where}: {name} contains itself. A model cannot be shown such a type")
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return _inlined({**defs[name], **rest}, defs, (*inside, name), where)
    # A field may be called `title`: only the annotation, which is text, goes.
    return {
        key: _inlined(value, defs, inside, where)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }


def _description(rendered: dict[str, Any]) -> dict[str, Any]:
    return {"description": rendered["description"]} if "description" in rendered else {}


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

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any = None, **kwargs: Any
    ) -> Any:
        """`function(**parameters, **kwargs)`, without `agent_data`: text, a dict, or (response, step reward, metrics).

        Runs on the tool's loop. Waits for a plain function in a daemon thread.

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
    """Make a tool of a function, sync or async. The YAML entry's `class_name` names it.

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
        name: what the model calls it. None = the function's name.
        tool_schema: an OpenAI tool schema to use as it is, instead of hints and docstring. Arguments then arrive as
            the JSON that they are.

    Raises:
        PluginError: a type hint or a docstring is missing, or `tool_schema` is none. Names the function and the
            argument.
    """

    def make(target: Callable[..., Any]) -> FunctionTool:
        schema = (
            as_tool_schema(tool_schema, f"tool_schema of @function_tool {code_place(target)}")
            if tool_schema
            else schema_of(target)
        )
        if name:
            schema = schema.model_copy(update={"function": schema.function.model_copy(update={"name": name})})
        return FunctionTool(target, tool_schema=schema, converts=tool_schema is None)

    return make if function is None else make(function)
