"""Tool parsers: from the text of an assistant turn to calls. They need no tokenizer, engine or server.

Example:
    >>> get_parser("hermes").parse('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>').calls
    [ToolCall(name='f', arguments={'x': 1}, id='')]
"""

from __future__ import annotations

from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, tool_names
from verl_mt.chat.parsers.hermes import HermesParser
from verl_mt.chat.parsers.llama3_json import Llama3JsonParser
from verl_mt.chat.parsers.search_r1 import SearchR1Parser
from verl_mt.errors import PluginError
from verl_mt.plugins import Registry, load_object

__all__ = [
    "FoundCalls",
    "HermesParser",
    "Llama3JsonParser",
    "SearchR1Parser",
    "ToolParser",
    "get_parser",
    "tool_names",
    "tool_parsers",
]

tool_parsers: Registry[type[ToolParser]] = Registry(
    "tool parser",
    {
        "hermes": HermesParser,
        "qwen": HermesParser,
        "llama3_json": Llama3JsonParser,
        "search_r1": SearchR1Parser,
    },
)


def get_parser(name_or_dotted_path: str, **kwargs: Any) -> ToolParser:
    """The parser of that name, made with `kwargs`.

    Raises:
        PluginError: unknown name (lists what exists), not a `ToolParser`, or arguments that it does not take.
    """
    target = load_object(name_or_dotted_path, what="tool_parser", registry=tool_parsers)
    if not (isinstance(target, type) and issubclass(target, ToolParser)):
        raise PluginError(
            f"tool_parser {name_or_dotted_path!r}: expected a subclass of verl_mt.chat.parsers.ToolParser, "
            f"got {target!r}"
        )
    try:
        return target(**kwargs)
    except TypeError as error:
        raise PluginError(f"tool_parser {name_or_dotted_path!r} with arguments {sorted(kwargs)}: {error}") from error
