"""Demonstrations for the warm start: question -> tool call -> tool response -> `#### N`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from verl_mt.config_paths import configs_root
from verl_mt.tiny.problems import SYSTEM, Problem, generate

Message = dict[str, Any]


@lru_cache
def tool_schemas() -> list[Any]:
    """The schemas of `tools_configs/calculator.yaml`, as chat templates get them."""
    declared = yaml.safe_load((configs_root() / "tools_configs" / "calculator.yaml").read_text())
    return [tool["tool_schema"] for tool in declared["tools"]]


def prompt_messages(problem: Problem) -> list[Message]:
    """What the model is given."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]


def demonstration(problem: Problem) -> list[Message]:
    """The whole conversation of a perfect solver."""
    call = {"name": "calculator", "arguments": {"expression": problem.expression}}
    return [
        *prompt_messages(problem),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "calculator", "content": str(problem.answer)},
        {"role": "assistant", "content": f"#### {problem.answer}"},
    ]


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """Endless demonstrations; their problems come from the `warm_start` split, which nothing else uses."""
    return (demonstration(problem) for problem in generate(seed, "warm_start"))


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
    """The conversation as text, the tools shown."""
    text = tokenizer.apply_chat_template(
        messages, tools=tool_schemas(), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(text, str)
    return text
