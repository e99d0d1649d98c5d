r"""Geometry3K: the share of the format and the right answer, as verl weighs them."""

from __future__ import annotations

import re
from typing import Any

from verl_mt.rewards.math_answer import final_answer, same_answer

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    r"""1.0 for reasoning in `<think>` tags with a `\boxed{}` behind it, else 0.0."""
    return float(_FORMAT.fullmatch(predict_str.strip()) is not None)


def acc_reward(predict_str: str, ground_truth: Any, use_boxed: bool = True) -> float:
    r"""1.0 where the answer is the ground truth, as a number or as a text.

    Args:
        predict_str: a solution, whose last `\boxed{}` counts; with `use_boxed=False` the answer itself.
    """
    boxed = "\\boxed{" in predict_str
    answer = final_answer(predict_str) if boxed else None if use_boxed else predict_str
    return float(answer is not None and same_answer(answer, str(ground_truth)))


def compute_score(predict_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """`(1 - format_score) * accuracy + format_score * format`."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)
