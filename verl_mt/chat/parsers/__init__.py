"""Tool parsers: from the text of an assistant turn to calls. They need no tokenizer, engine or server.

Example:
    >>> get_parser("hermes").parse('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>').calls
    [ToolCall(name='f', arguments={'x': 1}, id='')]
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, tool_names
from verl_mt.chat.parsers.control_tokens import DeepSeekDsmlParser, DeepSeekParser, HarmonyParser, KimiK2Parser
from verl_mt.chat.parsers.json_calls import HermesParser, Llama3JsonParser, MistralParser
from verl_mt.chat.parsers.prompted import ReactParser, SearchR1Parser
from verl_mt.chat.parsers.tagged import GlmParser, Qwen3CoderParser, SeedOssParser
from verl_mt.errors import PluginError
from verl_mt.plugins import Registry, load_object

__all__ = [
    "DeepSeekDsmlParser",
    "DeepSeekParser",
    "FoundCalls",
    "GlmParser",
    "HarmonyParser",
    "HermesParser",
    "KimiK2Parser",
    "Llama3JsonParser",
    "MistralParser",
    "Qwen3CoderParser",
    "ReactParser",
    "SearchR1Parser",
    "SeedOssParser",
    "ToolParser",
    "aliases",
    "get_parser",
    "is_registered",
    "tool_names",
    "tool_parsers",
]

tool_parsers: Registry[type[ToolParser]] = Registry(
    "tool parser",
    {
        "hermes": HermesParser,
        "qwen": HermesParser,
        "qwen3_coder": Qwen3CoderParser,
        "llama3_json": Llama3JsonParser,
        "mistral": MistralParser,
        "deepseek_v3": DeepSeekParser,
        "deepseek_v32": DeepSeekDsmlParser,
        "kimi_k2": KimiK2Parser,
        "glm45": GlmParser,
        "gpt_oss": HarmonyParser,
        "seed_oss": SeedOssParser,
        "react": ReactParser,
        "search_r1": SearchR1Parser,
    },
    group="verl_mt.tool_parsers",
)

aliases: dict[str, str] = {
    "qwen25": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "qwen3_5": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "llama3": "llama3_json",
    "deepseek": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v32",
    "deepseek_v4": "deepseek_v32",
    "kimi": "kimi_k2",
    "glm": "glm45",
    "glm47": "glm45",
    "harmony": "gpt_oss",
    "openai": "gpt_oss",
    "gptoss": "gpt_oss",
}
"""What verl, SGLang and vLLM call these parsers. A hyphen may stand for an underscore."""
_MOVED = re.compile(
    r"verl_mt\.chat\.parsers\.(?:glm|harmony|hermes|llama3_json|mistral|qwen3_coder|react|search_r1|sectioned)[.:](\w+)"
)
"""Modules that each held the parsers of one family."""


def get_parser(
    name_or_dotted_path: str, *, runs_calls_in_unclosed_reasoning: bool | None = None, **kwargs: Any
) -> ToolParser:
    """The parser of that name, made with `kwargs`.

    Args:
        name_or_dotted_path: a registered name, one of `aliases`, a dotted path or `file.py:Name`.
        runs_calls_in_unclosed_reasoning: see `ToolParser`; None = as its class says.

    Raises:
        PluginError: unknown name (lists what exists), not a `ToolParser`, or arguments that it does not take.
    """
    name_or_dotted_path = _canonical(name_or_dotted_path)
    if moved := _MOVED.fullmatch(str(name_or_dotted_path)):
        now = f"{__name__}.{moved[1]}"
        warnings.warn(f"{name_or_dotted_path} is deprecated: use {now}", DeprecationWarning, stacklevel=2)
        name_or_dotted_path = now
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
    return plain if plain in tool_parsers else aliases.get(plain, name)
