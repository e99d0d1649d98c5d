"""Demonstrations for the warm start: question -> search -> passage -> the fact, restated, and the answer."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase
from world import SYSTEM, Question

from verl_mt.tools.search_client import format_documents

Message = dict[str, Any]


@lru_cache
def tool_schemas() -> list[Any]:
    """The schemas of `tools.yaml`, as chat templates get them."""
    declared = yaml.safe_load(Path(__file__).with_name("tools.yaml").read_text())
    return [tool["tool_schema"] for tool in declared["tools"]]


def prompt_messages(question: Question) -> list[Message]:
    """What the model is given."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]


def observation(question: Question) -> str:
    """What the search tool answers where it finds the right passage."""
    return format_documents([question.box.passage])


def demonstration(question: Question) -> list[Message]:
    """The whole conversation of a perfect solver."""
    call = {"name": "search", "arguments": {"query": question.query}}
    final = f"There are {question.box.thing} {question.answer}. <answer>{question.answer}</answer>"
    return [
        *prompt_messages(question),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "search", "content": observation(question)},
        {"role": "assistant", "content": final},
    ]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
    """The conversation as text, the tool shown."""
    text = tokenizer.apply_chat_template(
        messages, tools=tool_schemas(), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(text, str)
    return text
