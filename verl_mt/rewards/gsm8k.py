r"""GSM8K: is the final number the right one?

The parameters are those of verl's scorer. It differs where verl's gives 0 to a right answer: a trailing period, `$`,
thousands separators, spaces, bold or `\boxed{}` around the number do no harm, and numbers are compared as numbers.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

MAX_TAIL_CHARS = 300
"""The answer must be that close to the end, as in verl: text goes on after a final answer only by mistake."""

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIGN = r"[-+\u2212]?"
_MONEY = r"(?:\\?[$£€]\s?)?"
_VALUE = rf"(?P<sign>{_SIGN})\s?{_MONEY}(?P<inner>{_SIGN})(?P<number>{_NUMBER})"
# Not the beginning of 1.2.3, 1,00, 3/4, 2*3 or 2^3.
_END = r"(?![.,]?\d|\s?[/*^]\s?\(?\d)"
_DRESSING = r"(?:\\boxed\{|\\\(|\\text\{|\*|\$(?=\s?\\boxed)|[ \t])*"
_MARKED = re.compile(rf"(?:####{_DRESSING}|\\boxed\{{\s*){_VALUE}{_END}")
_ANY = re.compile(rf"(?<![\d.,\w])(?<!\d[/*^]){_VALUE}{_END}")


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    r"""Score of one solution.

    Args:
        solution_str: what the model wrote; only its last 300 characters count.
        ground_truth: the answer, a number or its text (`"1,000"`).
        method: `strict` wants `#### 42` or `\boxed{42}`, the last one counts; `flexible` takes the last number of the
            text where there is neither.
        format_score: for an answer that is there and wrong.
        score: for the right answer.

    Raises:
        ValueError: unknown method, or a ground truth that is no number.
    """
    truth = _as_number(ground_truth)
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if Decimal(answer) == truth else format_score


def compute_scores(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, float]:
    """`compute_score`, with the part of the score for the form alone as `format`, where that is paid for."""
    total = compute_score(solution_str, ground_truth, method, format_score, score)
    if not format_score:
        return {"score": total}
    outcome = compute_score(solution_str, ground_truth, method, 0.0, score)
    return {"score": total, "format": total - outcome}


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The final answer as a plain number (`-1000.5`), or None if there is none.

    Raises:
        ValueError: unknown method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be 'strict' or 'flexible', got {method!r}")
    start = max(0, len(solution_str) - MAX_TAIL_CHARS)
    found = list(_MARKED.finditer(solution_str, start))
    if not found and method == "flexible":
        found = list(_ANY.finditer(solution_str, start))
    return _plain(found[-1]) if found else None


def _plain(match: re.Match[str]) -> str:
    negative = match["sign"] in ("-", "\u2212") or match["inner"] in ("-", "\u2212")
    return ("-" if negative else "") + match["number"].replace(",", "")


def _as_number(ground_truth: Any) -> Decimal:
    match = re.fullmatch(rf"(?:####)?\s*{_VALUE}\s*\.?", str(ground_truth).strip())
    if match is None:
        raise ValueError(f"the ground truth of a GSM8K row must be a number, got {ground_truth!r:.80}")
    return Decimal(_plain(match))
