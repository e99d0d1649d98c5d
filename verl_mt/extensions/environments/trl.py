"""TRL: classes that are written for `environment_factory`, unchanged."""

from __future__ import annotations

import inspect
import types
from typing import Any

from verl_mt.environments.base import Environment
from verl_mt.errors import UserCodeError
from verl_mt.extensions.environments import wrapping
from verl_mt.tools.function_tool import from_json, rich_arguments, schema_of

_NO_TOOLS = ("reset", "get_reward", "close")


class FactoryEnvironment(Environment):
    """A class with `reset(**row) -> str | list of parts | None`, public methods as tools, and `get_reward()`, or an
    attribute `reward`, as the score.

    As in TRL, what `reset` returns is added to the row's last user message. Unlike TRL, an object is never used twice,
    and an attribute `done` that is True ends the conversation.

    Args:
        found: the class.
        config: arguments of its constructor.
    """

    def __init__(self, found: type, **config: Any):
        self._found = found(**config)

    def reset(self, **row: Any) -> Any:
        """What the class's own `reset` returns."""
        said = self._found.reset(**row)
        if isinstance(said, list) and not all(isinstance(part, dict) and "role" in part for part in said):
            prompt = row.get("prompt")
            shown = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
            last = shown.pop() if shown and shown[-1]["role"] == "user" else {"role": "user", "content": []}
            before = last["content"]
            parts = [{"type": "text", "text": before}] if isinstance(before, str) else list(before)
            return [*shown, {**last, "content": [*parts, *said]}]
        return said

    @property
    def done(self) -> bool:  # type: ignore[override]
        """Its attribute `done`, where that is True or False."""
        return getattr(self._found, "done", False) is True

    def call_tool(self, name: str, parameters: dict[str, Any]) -> Any:
        """Call the method."""
        kind = type(self._found)
        arguments = from_json(rich_arguments(types.MethodType(getattr(kind, name), kind)), parameters)
        return getattr(self._found, name)(**arguments)

    def score(self) -> Any:
        """`get_reward()`, else the attribute `reward`."""
        if hasattr(self._found, "get_reward"):
            return self._found.get_reward()
        if not hasattr(self._found, "reward"):
            name = type(self._found).__name__
            raise UserCodeError(
                f"{name} has neither get_reward() nor an attribute reward. Write one, or set reward.path"
            )
        return self._found.reward

    def close(self) -> Any:
        """Its own `close`, where it has one."""
        return close() if callable(close := getattr(self._found, "close", None)) else None


def is_factory(found: type) -> bool:
    """Whether a class is written for `environment_factory`."""
    return callable(getattr(found, "reset", None))


def around(found: type) -> type[Environment]:
    """An environment around such a class."""
    methods = [
        types.MethodType(method, found)
        for name, method in inspect.getmembers(found, inspect.isfunction)
        if not name.startswith("_") and name not in _NO_TOOLS
    ]

    def tool_schemas(cls: type, **config: Any) -> list[dict[str, Any]]:
        return [schema_of(method, f"{found.__module__}.{method.__qualname__}").to_template() for method in methods]

    return wrapping.around(FactoryEnvironment, found, tool_schemas=classmethod(tool_schemas))
