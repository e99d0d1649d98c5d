"""Tool parsers: from the text of an assistant turn to calls. They need no tokenizer, engine or server.

Example:
    >>> get_parser("hermes").parse('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>').calls
    [ToolCall(name='f', arguments={'x': 1}, id='')]
"""

from __future__ import annotations

from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, tool_names
from verl_mt.chat.parsers.json_calls import HermesParser
from verl_mt.chat.parsers.prompted import ReactParser, SearchR1Parser
from verl_mt.errors import PluginError
from verl_mt.extension_points import own
from verl_mt.plugins import Registry, load_object

__all__ = [
    "FoundCalls",
    "HermesParser",
    "ReactParser",
    "SearchR1Parser",
    "ToolParser",
    "aliases",
    "get_parser",
    "is_registered",
    "tool_names",
    "tool_parsers",
]

_GROUP = "verl_mt.tool_parsers"
tool_parsers: Registry[type[ToolParser]] = Registry(
    "tool parser",
    {"hermes": HermesParser, "qwen": HermesParser, "react": ReactParser, "search_r1": SearchR1Parser},
    group=_GROUP,
)


def __getattr__(name: str) -> Any:
    """The parsers of extensions under documented paths: `verl_mt.chat.parsers.GlmParser`."""
    for parser, path in own(_GROUP).items():
        if path.rpartition(":")[2] == name:
            return tool_parsers[parser]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def aliases() -> dict[str, str]:
    """What verl, SGLang and vLLM call the parsers -> their names here."""
    found: dict[str, str] = {}
    for name in tool_parsers.names():
        for other in tool_parsers.find(name).other_names:
            found.setdefault(other, name)
    return found


def get_parser(
    name_or_dotted_path: str, *, runs_calls_in_unclosed_reasoning: bool | None = None, **kwargs: Any
) -> ToolParser:
    """The parser of that name, made with `kwargs`.

    Args:
        name_or_dotted_path: a registered name, one of `aliases()`, a dotted path or `file.py:Name`.
        runs_calls_in_unclosed_reasoning: see `ToolParser`; None = as its class says.

    Raises:
        PluginError: unknown name (lists what exists), not a `ToolParser`, or arguments that it does not take.
    """
    name_or_dotted_path = _canonical(name_or_dotted_path)
    target = load_object(name_or_dotted_path, what="tool_parser", registry=tool_parsers)
    if not (isinstance(target, type) and issubclass(target, ToolParser)):
        raise PluginError(
            f"tool_parser {name_or_dotted_path!r}: expected a subclass of verl_mt.chat.parsers.ToolParser, "
            f"got {target!r}"
        )
    try:
        parser = target(**kwargs)
    except TypeError as error:
        raise PluginError(f"tool_parser {name_or_dotted_path!r} with arguments {sorted(kwargs)}: {error}") from error
    if runs_calls_in_unclosed_reasoning is not None:
        parser.runs_calls_in_unclosed_reasoning = runs_calls_in_unclosed_reasoning
    return parser


def is_registered(name: str) -> bool:
    """Whether it names one of `tool_parsers`, by an alias or not; a path does not."""
    return _canonical(name) in tool_parsers


def _canonical(name: str) -> str:
    """The registered name that `name` means; a path, or what is not known, as it is."""
    if not isinstance(name, str) or name in tool_parsers or "." in name or ":" in name:
        return name
    plain = name.lower().replace("-", "_")
    return plain if plain in tool_parsers else aliases().get(plain, name)
