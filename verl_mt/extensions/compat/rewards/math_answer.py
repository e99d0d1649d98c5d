r"""Is the final answer of a mathematical solution the right one?

An answer is looked for in `<answer>...</answer>`, then `\boxed{...}`, then behind `####`, then as the last number; the
last one of its kind counts. Two answers are the same if they are equal as numbers (1/2, 0.5 and \frac{1}{2} are), or as
texts without white space, `$`, and a final period.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from verl_mt.errors import PluginError
from verl_mt.extensions.compat.rewards.orm import ORM

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


class FinalAnswer(ORM):
    """`math_answer`: 1.0 where the completion ends in the answer of the column `solution`, by this file's own rule."""

    def __call__(  # type: ignore[override]
        self, completions: list[str], solution: list[Any], **kwargs: Any
    ) -> list[float]:
        return [float(is_right(text, truth)) for text, truth in zip(completions, solution)]


class MathAccuracy(ORM):
    r"""`accuracy`, ms-swift's: 1.0 where math-verify finds the completion's answer equal to the solution's.

    Both are looked for in `<answer>...</answer>`, else in the whole text; a completion without the tags must mark its
    answer as LaTeX (`\boxed{...}`, `$...$`). A solution that math-verify cannot read gives 0.0.

    Raises:
        PluginError: on making one where the package math-verify is not installed.
    """

    def __init__(self, args: Any = None, **kwargs: Any):
        super().__init__(args, **kwargs)
        if importlib.util.find_spec("math_verify") is None:
            raise PluginError(
                "reward accuracy compares answers with the package math-verify, which is not installed: "
                "pip install 'verl_mt[math]'. Without it, reward.path=math_answer compares numbers and texts"
            )

    def __call__(  # type: ignore[override]
        self, completions: list[str], solution: list[Any], **kwargs: Any
    ) -> list[float]:
        return [self._score(text, str(truth)) for text, truth in zip(completions, solution)]

    def _score(self, text: str, solution: str) -> float:
        from math_verify import parse, verify

        # Its own deadlines are signals, which only a main thread may set; the reward's deadline is around all of it.
        gold = parse(_tagged(solution) or solution, extraction_mode="first_match", parsing_timeout=None)
        if not gold:
            return 0.0
        answer = _tagged(text)
        if answer is not None:
            found = parse(answer, extraction_mode="first_match", parsing_timeout=None)
        else:
            found = parse(text, [self._latex()], extraction_mode="first_match", parsing_timeout=None)
        return float(verify(gold, found, timeout_seconds=None))

    @staticmethod
    def _latex() -> Any:
        """Answers that are marked as LaTeX, a box before anything else."""
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig

        normal = NormalizationConfig(nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True)
        return LatexExtractionConfig(
            normalization_config=normal, boxed_match_priority=0, try_extract_without_anchor=False
        )


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


def _tagged(text: str) -> str | None:
    """What stands in the first `<answer>...</answer>`."""
    found = _ANSWER.search(text)
    return None if found is None else found.group(1).strip()


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
