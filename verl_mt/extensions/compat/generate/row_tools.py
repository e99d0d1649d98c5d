"""Tools that a row brings along in its metadata, for generate functions that describe and run them themselves.

slime's rows hold `metadata.tools = [{name, description, parameters}]`, parameters as a JSON Schema or in short
(`{"query": "string"}`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_mt.errors import DataError
from verl_mt.plugins import listing, suggest

_TYPES = ("string", "integer", "number", "boolean", "array", "object")


class RowTools(Mapping[str, dict[str, Any]]):
    """Name -> tool, `{name, description, parameters}` with the parameters as a JSON Schema.

    Args:
        metadata: `sample.metadata`; without `tools` there are none.

    Raises:
        DataError: names the tool and what is wrong with it.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        self._tools: dict[str, dict[str, Any]] = {}
        for place, tool in enumerate(metadata.get("tools") or []):
            name = tool.get("name") if isinstance(tool, dict) else None
            if not isinstance(name, str) or not name:
                raise DataError(
                    f"metadata.tools[{place}]: expected {{name, description, parameters}}, got {tool!r:.120}"
                )
            if name in self._tools:
                raise DataError(f"metadata.tools[{place}]: a second tool is named {name!r}")
            parameters = json_schema(tool.get("parameters") or {}, f"metadata.tools[{place}] ({name}).parameters")
            self._tools[name] = {**tool, "description": tool.get("description") or "", "parameters": parameters}

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """As chat templates want them: `[{"type": "function", "function": {...}}]`."""
        return [{"type": "function", "function": dict(tool)} for tool in self.values()]

    def describe(self) -> str:
        """One line per tool, for a system prompt that the function writes; empty without tools."""
        return "\n".join(f"- {name}: {tool['description']}" for name, tool in self.items())

    def refusal(self, name: str) -> str | None:
        """What the model is told when it calls a tool that its row does not have; None where it has it."""
        if name in self._tools:
            return None
        return f"<error>tool {name!r} is not available here{suggest(name, self)}. Available: {listing(self)}</error>"


def json_schema(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Parameters as a JSON Schema of type object; the short form makes every parameter required.

    Raises:
        DataError: a type that JSON Schema does not have.
    """
    if parameters.get("type") == "object" or "properties" in parameters:
        return {"type": "object", **parameters}
    properties: dict[str, Any] = {}
    for name, kind in parameters.items():
        schema = {"type": kind} if isinstance(kind, str) else kind
        if not isinstance(schema, dict) or schema.get("type") not in _TYPES:
            raise DataError(f"{where}.{name}: expected one of {', '.join(_TYPES)} or a JSON Schema, got {kind!r}")
        properties[name] = schema
    return {"type": "object", "properties": properties, "required": list(properties)}
