"""Demonstrations for the warm start: question -> tool call -> tool response -> `#### N`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from verl_mt.config_paths import configs_root
from verl_mt.tiny.problems import SYSTEM, Problem, generate

Message = dict[str, Any]


def tool_schemas() -> list[dict[str, Any]]:
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
