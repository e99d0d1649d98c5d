r"""Is the final answer of a mathematical solution the right one?

An answer is looked for in `<answer>...</answer>`, then `\boxed{...}`, then behind `####`, then as the last number; the
last one of its kind counts. Two answers are the same if they are equal as numbers (1/2, 0.5 and \frac{1}{2} are), or as
texts without white space, `$`, and a final period.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from verl_mt.rewards.adapters import ORM

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARKED = re.compile(r"####\s*(.+)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
MAX_CHARS = 100
"""A longer answer is no number."""


def final_answer(text: str) -> str | None:
    """The answer that a solution ends in; None if it has none."""
    tagged = _ANSWER.findall(text)
    inner = tagged[-1] if tagged else text
    boxed = _last_boxed(inner)
    if boxed is not None:
        return boxed
    if tagged:
        return inner.strip()
    marked = _MARKED.findall(text)
    if marked:
        return marked[-1].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same_answer(one: str, other: str) -> bool:
    """Equal as numbers, or as texts up to white space and dressing."""
    left, right = _as_number(one), _as_number(other)
    if left is not None and right is not None:
        return left == right
    return _plain(one) == _plain(other) != ""


def is_right(text: str, solution: Any) -> bool:
    """Whether a solution ends in the answer that `solution` (an answer, or a worked solution) ends in."""
    answer = final_answer(text)
    target = str(solution)
    truth = target if _as_number(target) is not None else final_answer(target)
    return answer is not None and same_answer(answer, target if truth is None else truth)


class MathAccuracy(ORM):
    """ms-swift's `accuracy`: 1.0 where the completion ends in the answer of the column `solution`."""

    def __call__(  # type: ignore[override]
        self, completions: list[str], solution: list[Any], **kwargs: Any
    ) -> list[float]:
        return [float(is_right(text, truth)) for text, truth in zip(completions, solution)]


class MultiTurnThinkingTips(ORM):
    """The accuracy of a trajectory's last turn, whatever number of records it became.

    `trajectory_inputs` holds, for each trajectory, its records in order: the row's columns, and the `messages` that
    the record has seen.
    """

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        scores = []
        for name in kwargs["request_id"]:
            last: Mapping[str, Any] = kwargs["trajectory_inputs"][name][-1]
            scores.append(float(is_right(str(last["messages"][-1]["content"]), last["solution"])))
        return scores


class GymReward(ORM):
    """The sum of what an environment gave (`gym_scheduler` puts it into `rollout_infos`)."""

    def __call__(  # type: ignore[override]
        self, completions: list[str], rollout_infos: list[Mapping[str, Any]], **kwargs: Any
    ) -> list[float]:
        return [float(infos["total_reward"]) for infos in rollout_infos]


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def _plain(text: str) -> str:
    return re.sub(r"[\s$]|\\[()]|\\left|\\right", "", text).rstrip(".")


def _as_number(text: str) -> Fraction | None:
    plain = _FRACTION.sub(r"\1/\2", _plain(text)).replace(",", "")
    if len(plain) > MAX_CHARS or not re.fullmatch(r"[-+]?\d*\.?\d+(/\d+)?", plain):
        return None
    top, _, bottom = plain.partition("/")
    return None if bottom and int(bottom) == 0 else Fraction(top) / Fraction(bottom or "1")
