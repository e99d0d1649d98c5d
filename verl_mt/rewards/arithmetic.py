"""The default task: did the model end with `#### N`, N the right integer? Nothing but the outcome counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_FINAL = re.compile(r"####[ \t]*(-?\d{1,30})\s*\Z")


def compute_score(
    solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Score of one conversation.

    Args:
        solution_str: what the model wrote; used where `extra_info` has no messages.
        ground_truth: the integer, or its text.
        extra_info: with `messages`, the last assistant turn is scored and not what stands before it.

    Returns:
        `score`: 1.0 iff the last assistant turn ends with `#### N` and N is right, else 0.0.
        `first_answer`: the same for the first turn that ends with `#### N`; differs only where a checker asked again.

    Raises:
        ValueError: a ground truth that is no integer.
    """
    truth = int(str(ground_truth).strip())
    turns = _sampled_turns(extra_info or {}) or [solution_str]
    answers = [_answer(turn) for turn in turns]
    first = next((answer for answer in answers if answer is not None), None)
    return {"score": float(answers[-1] == truth), "first_answer": float(first == truth)}


def _sampled_turns(extra_info: Mapping[str, Any]) -> list[str]:
    """Texts of the turns that the model sampled, not examples of the prompt; a turn with a call is blank."""
    turns = [m for m in extra_info.get("messages") or [] if m.get("role") == "assistant"]
    num_turns = extra_info.get("assistant_turns", len(turns))
    return ["" if m.get("tool_calls") else str(m.get("content") or "") for m in turns[len(turns) - num_turns :]]


def _answer(turn: str) -> int | None:
    match = _FINAL.search(turn)
    return int(match[1]) if match else None
