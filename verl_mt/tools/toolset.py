"""The tools of a run: schemas for the template, validation of a call's arguments, what a row says about them."""

from __future__ import annotations

import copy
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema.exceptions import ValidationError

from verl_mt.errors import DataError, PluginError, ToolCallError, error_text, value_text
from verl_mt.plugins import listing, suggest
from verl_mt.tools.argument_schema import ArgumentSchema
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import as_tool_schema

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(?P<rest>(\.[0-9]+)?([eE][+-]?[0-9]+)?)")
"""JSON's grammar."""
_MAX_DIGITS = 300
_NAME = re.compile(r"[\w.-]{1,128}")

ROW_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")

RowKwargs = dict[str, dict[str, dict[str, Any]]]
"""tool -> one of `ROW_KWARGS` -> arguments."""


@dataclass(frozen=True)
class ToolEntry:
    """One tool with its checked schema."""

    tool: BaseTool
    schema: dict[str, Any]
    """What the chat template gets."""
    arguments: ArgumentSchema
    where: str
    """Where it was declared, for errors."""

    @classmethod
    def of(
        cls, tool: BaseTool, *, where: str, schema: dict[str, Any] | None = None, server_checks: bool = False
    ) -> ToolEntry:
        """Check the tool and its schema.

        Args:
            schema: the schema as its author wrote it; None = what `tool.get_openai_tool_schema()` returns.
            server_checks: see `ArgumentSchema`.

        Raises:
            PluginError: the name is missing or not one that model APIs take, or the parameters are no JSON Schema of
                type object.
        """
        if not isinstance(getattr(tool, "name", None), str) or not tool.name:
            raise PluginError(
                f"{where}: the tool has no name. Does its __init__ call super().__init__(config, tool_schema)?"
            )
        if not _NAME.fullmatch(tool.name):
            raise PluginError(
                f"{where}: the tool name {value_text(tool.name)} is not 1 to 128 letters, digits, '_', '-' or '.', as "
                "model APIs ask for. Give the tool another name (tool_schema.function.name)"
            )
        if schema is None:
            try:
                given = tool.get_openai_tool_schema()
            except Exception as error:
                raise PluginError(
                    f"{where}: get_openai_tool_schema() raised {error_text(error, named=True)}"
                ) from error
            schema = as_tool_schema(given, f"{where}: what get_openai_tool_schema() returns").to_template()
        parameters = schema["function"].get("parameters") or {"type": "object", "properties": {}}
        named = f"{where}: tool_schema of {tool.name!r}"
        return cls(tool, schema, ArgumentSchema(parameters, named, server_checks=server_checks), where)


class ToolSet:
    """Tools by name, in the order declared.

    Args:
        tools: tool objects, or entries that `load_tools` made.

    Raises:
        PluginError: two tools of one name, or a schema that is none.
    """

    def __init__(self, tools: Iterable[BaseTool | ToolEntry] = ()):
        self._entries: dict[str, ToolEntry] = {}
        for item in tools:
            entry = item if isinstance(item, ToolEntry) else ToolEntry.of(item, where=type(item).__name__)
            other = self._entries.get(entry.tool.name)
            if other is not None:
                raise PluginError(
                    f"{entry.where}: a tool named {entry.tool.name!r} exists already ({other.where}). "
                    "Give one of them another tool_schema.function.name"
                )
            self._entries[entry.tool.name] = entry

    @property
    def names(self) -> list[str]:
        """Names in the order declared."""
        return list(self._entries)

    @property
    def entries(self) -> list[ToolEntry]:
        """The tools with their schemas, in the order declared."""
        return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[BaseTool]:
        return (entry.tool for entry in self._entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> BaseTool:
        return self._entries[name].tool

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """OpenAI tool schemas for a chat template, every JSON-Schema keyword kept; a fresh copy.

        Args:
            names: which tools, in this order; None = all.
        """
        return [copy.deepcopy(self._entries[name].schema) for name in (self.names if names is None else names)]

    def check_call(self, name: str, arguments: Any) -> None:
        """Raises:
        ToolCallError: unknown tool, or arguments that its schema refuses; the text is written for the model.
        """
        if name not in self._entries:
            hint = "".join(f" Did you mean {c!r}?" for c in difflib.get_close_matches(str(name), self.names, n=1))
            known = f"Available: {listing(self.names)}." if self._entries else "There are no tools."
            raise ToolCallError(f"unknown tool {_short(name)}.{hint} {known}")
        if not isinstance(arguments, dict):
            raise ToolCallError(f"arguments of {name} must be a JSON object, got {_short(arguments)}")
        entry = self._entries[name]
        errors = sorted(entry.arguments.errors(name, arguments), key=lambda e: [str(p) for p in e.absolute_path])
        if errors:
            reasons = "; ".join(_explain(error) for error in errors[:3])
            raise ToolCallError(f"wrong arguments for {name}: {reasons}. Expected {_signature(entry.schema)}")

    def converted(self, name: str, arguments: Any) -> tuple[Any, int]:
        """Arguments whose only mistake is another simple type (a number where text is asked for, "3" where a whole
        number is), as the schema wants them; a copy.

        Returns:
            The arguments, and how many values were converted; 0 and the arguments as they are where a conversion
            loses something, or does not make them right.
        """
        if name not in self._entries or not isinstance(arguments, dict):
            return arguments, 0
        schema, count = self._entries[name].arguments, 0
        errors = schema.errors(name, arguments)
        changed = copy.deepcopy(arguments)
        for error in errors:
            kinds = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
            if error.validator != "type" or not error.absolute_path:
                return arguments, 0
            found = next((v for kind in kinds if (v := _as_kind(error.instance, kind)) is not None), None)
            if found is None:
                return arguments, 0
            *parents, last = error.absolute_path
            place: Any = changed
            for part in parents:
                place = place[part]
            place[last] = found
            count += 1
        return (arguments, 0) if not count or schema.errors(name, changed) else (changed, count)

    def of_row(self, extra_info: Mapping[str, Any], row: Mapping[str, Any]) -> ToolSet:
        """The tools of a row of the data.

        Args:
            extra_info: the row's.
            row: all its columns.

        Raises:
            DataError: as `for_row`.
        """
        return self.for_row(
            extra_info.get("tools_kwargs"),
            need_tools_kwargs=extra_info.get("need_tools_kwargs"),
            tool_selection=extra_info.get("tool_selection"),
            prompt_tools=extra_info.get("prompt_tools"),
        )

    def for_row(
        self,
        tools_kwargs: Mapping[str, Any] | None = None,
        *,
        need_tools_kwargs: bool | None = False,
        tool_selection: Sequence[str] | None = None,
        prompt_tools: Sequence[str] | None = None,
    ) -> ToolSet:
        """The tools that one row of the data may use; the tool objects are shared.

        Args:
            tools_kwargs: the row's `extra_info.tools_kwargs`; only checked here, `ToolExecutor.open` uses it.
            need_tools_kwargs: the row's `extra_info.need_tools_kwargs`.
            tool_selection: the row's `extra_info.tool_selection`: names; None = all tools.
            prompt_tools: the row's `extra_info.prompt_tools`: names of those that the prompt shows; only checked here.

        Raises:
            DataError: an unknown tool or key, another type, or `need_tools_kwargs` without any.
        """
        if not isinstance(need_tools_kwargs, bool | int | None):
            raise DataError(f"extra_info.need_tools_kwargs must be true or false, got {value_text(need_tools_kwargs)}")
        given = parse_row_kwargs(tools_kwargs, self.names)
        if need_tools_kwargs and not given:
            raise DataError(
                "extra_info.need_tools_kwargs is true but extra_info.tools_kwargs has nothing for any of "
                f"{listing(self.names)}. Got {tools_kwargs!r}"
            )
        chosen = self if tool_selection is None else self._chosen("tool_selection", tool_selection)
        if prompt_tools is not None:
            chosen._chosen("prompt_tools", prompt_tools)
        return chosen

    def _chosen(self, key: str, names: Any) -> ToolSet:
        """Those that `extra_info.KEY` of a row names."""
        if not isinstance(names, list | tuple):
            near = difflib.get_close_matches(names, self.names, n=1) if isinstance(names, str) else []
            raise DataError(
                f"extra_info.{key} must be a list of tool names (null = all), got {value_text(names)}"
                f"{f'; did you mean {near}?' if near else ''}. Configured: {listing(self.names)}"
            )
        for name in names:
            if not isinstance(name, str) or name not in self._entries:
                hint = suggest(str(name), self.names)
                raise DataError(f"extra_info.{key}: unknown tool {name!r}{hint}. Configured: {listing(self.names)}")
        return ToolSet(self._entries[name] for name in dict.fromkeys(names))


def parse_row_kwargs(tools_kwargs: Mapping[str, Any] | None, names: Sequence[str]) -> RowKwargs:
    """`extra_info.tools_kwargs` of one row without the nulls that parquet fills in.

    Raises:
        DataError: not a mapping, an unknown tool, or an unknown kind of arguments.
    """
    if tools_kwargs is None:
        return {}
    if not isinstance(tools_kwargs, Mapping):
        raise DataError(f"extra_info.tools_kwargs must be a mapping tool -> arguments, got {value_text(tools_kwargs)}")
    found: RowKwargs = {}
    for tool, kinds in without_nulls(tools_kwargs).items():
        where = f"extra_info.tools_kwargs.{tool}"
        if not isinstance(kinds, Mapping):
            raise DataError(f"{where} must be a mapping with {', '.join(ROW_KWARGS)}, got {kinds!r}")
        given = {kind: value for kind, value in kinds.items() if not isinstance(value, Mapping) or value}
        if not given:
            continue
        if tool not in names:
            raise DataError(f"{where}: unknown tool{suggest(tool, names)}. Configured: {listing(names)}")
        for kind, arguments in given.items():
            if kind not in ROW_KWARGS:
                raise DataError(
                    f"{where}: unknown key {kind!r}{suggest(kind, ROW_KWARGS)}. Known: {', '.join(ROW_KWARGS)}"
                )
            if not isinstance(arguments, Mapping):
                raise DataError(f"{where}.{kind} must be a mapping of arguments, got {arguments!r}")
        found[tool] = {kind: dict(arguments) for kind, arguments in given.items()}
    return found


def without_nulls(value: Any) -> Any:
    """Mappings without their None values, at every depth: parquet gives every row of a struct all of its fields."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _as_kind(value: Any, kind: str) -> Any:
    """A simple value as another simple JSON type; None where that would lose something."""
    if kind == "string" and isinstance(value, bool | int | float):
        return json.dumps(value)
    if kind == "boolean" and isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    if kind in ("integer", "number") and isinstance(value, str):
        # What JSON's grammar calls a number: Python reads more as one ("1_0", "infinity", digits of other scripts).
        written = _NUMBER.fullmatch(value.strip())
        if written is None or len(value) > _MAX_DIGITS:
            return None
        if kind == "integer":
            return None if written["rest"] else int(value)
        return number if math.isfinite(number := float(value)) else None
    return None


def _explain(error: ValidationError) -> str:
    if error.validator == "required":
        missing = next((n for n in error.validator_value if n not in error.instance), None)
        return f"missing argument {missing!r}" if not error.absolute_path else _short(error.message, 200)
    path = ".".join(str(p) for p in error.absolute_path)[:100]
    return (f"argument {path!r}: " if path else "") + error.message[:200]


def _signature(schema: dict[str, Any]) -> str:
    parameters = schema["function"].get("parameters") or {}
    required = parameters.get("required") or []
    parts = []
    for name, rule in (parameters.get("properties") or {}).items():
        kind = rule.get("type", "any") if isinstance(rule, dict) else "any"
        kind = " or ".join(kind) if isinstance(kind, list) else kind
        parts.append(f"{name}: {kind}" + ("" if name in required else " (optional)"))
    return "{" + ", ".join(parts) + "}"


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
