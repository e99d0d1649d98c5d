"""Exact match of a short answer in `<answer>` tags: the reward of Search-R1 (Jin et al. 2025, arXiv:2503.09516).

It reads what the *model* wrote: an `<answer>` inside a retrieved document or a thought is no answer.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_NOT_ANSWERS = re.compile(r"<(information|think)>.*?(?:</\1>|\Z)", re.DOTALL)
_INFORMATION = re.compile(r"<information>(.*?)(?:</information>|\Z)", re.DOTALL)

_CHATML = "<|im_start|>assistant\n"

_INSIDE = r"(?:(?!</?(?:think|search|information|answer)>).)*"
_THINK, _SEARCH, _RESULT, _FINAL = (
    rf"<{tag}>{_INSIDE}</{tag}>\s*" for tag in ("think", "search", "information", "answer")
)
_WITH_RESULTS = re.compile(rf"\s*{_THINK}(?:{_SEARCH}{_RESULT}{_THINK})*{_FINAL}(?:<\|im_end\|>\s*)?", re.DOTALL)
_WITHOUT_RESULTS = re.compile(rf"\s*{_THINK}(?:{_SEARCH}{_THINK})*{_FINAL}(?:<\|im_end\|>\s*)?", re.DOTALL)

# A point stays where it belongs to a numeral: 3.14, .5
_STRIPPED = re.compile(rf"(?!(?<=\d)\.(?=\d)|(?<![^\s$+-])\.(?=\d))[{re.escape(string.punctuation)}]")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    format_score: float = 0.0,
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
) -> float:
    """Score of one conversation.

    A right answer scores 1, less `structure_format_score` where the structure is broken. Anything else scores

    - with a valid structure: `structure_format_score`, plus `retrieval_score` if a target stands in what was retrieved;
    - with a broken one: `final_format_score` if there is an answer, else 0;

    and at least `format_score` if there is an answer. The structure is think, any number of (search, result, think),
    answer, with nothing but white space between.

    Args:
        solution_str: what the model wrote. Results in it (`<information>`) are not the model's words, and neither is a
            ChatML prompt before it.
        ground_truth: a target, several, or a dict that holds them under `target` or `ground_truth`; any may match.
        extra_info: its `messages` may hold tool messages: then these are what was retrieved, and results that stand in
            `solution_str` were made up by the model.

    Raises:
        ValueError: no target.
    """
    targets = targets_of(ground_truth)
    text = _response(solution_str)
    results = _tool_results(extra_info)
    answer = extract_answer(text)
    valid = has_valid_structure(text, results_elsewhere=bool(results))
    if answer is not None and is_match(answer, targets):
        return 1.0 if valid else 1.0 - structure_format_score
    if valid:
        retrieved = "\n".join(results or _INFORMATION.findall(text))
        partial = structure_format_score + (retrieval_score if _stands_in(retrieved, targets) else 0.0)
    else:
        partial = final_format_score if answer is not None else 0.0
    return max(partial, format_score) if answer is not None else partial


def compute_scores(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    format_score: float = 0.0,
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
) -> dict[str, float]:
    """`compute_score`, with the part of the score for form and search as `format`, where these are paid for."""
    paid = {
        "format_score": format_score,
        "structure_format_score": structure_format_score,
        "final_format_score": final_format_score,
        "retrieval_score": retrieval_score,
    }
    total = compute_score(solution_str, ground_truth, extra_info, **paid)
    if not any(paid.values()):
        return {"score": total}
    return {"score": total, "format": total - compute_score(solution_str, ground_truth, extra_info)}


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation (decimal points stay), articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", _STRIPPED.sub("", text.lower())).split())


def is_match(answer: str, targets: Iterable[str]) -> bool:
    """True if the normalised answer equals a normalised target. An empty one never matches."""
    normalized = normalize(answer)
    return bool(normalized) and any(normalize(target) == normalized for target in targets)


def extract_answer(text: str) -> str | None:
    """The model's last `<answer>`, stripped; None if it gave none outside thoughts and retrieved text."""
    found = _ANSWER.findall(_NOT_ANSWERS.sub(" ", text))
    return found[-1].strip() if found else None


def has_valid_structure(text: str, *, results_elsewhere: bool = False) -> bool:
    """Whether `text` is think, (search, result, think)*, answer; `results_elsewhere`: the results are not in it."""
    return (_WITHOUT_RESULTS if results_elsewhere else _WITH_RESULTS).fullmatch(text) is not None


def targets_of(ground_truth: Any) -> list[str]:
    """The answers that count as right.

    Raises:
        ValueError: there is none.
    """
    if isinstance(ground_truth, Mapping):
        key = next((k for k in ("target", "ground_truth") if k in ground_truth), None)
        if key is None:
            raise ValueError(f"a ground truth dict needs 'target' or 'ground_truth'; it has {sorted(ground_truth)}")
        return targets_of(ground_truth[key])
    if hasattr(ground_truth, "tolist"):
        ground_truth = ground_truth.tolist()
    if isinstance(ground_truth, list | tuple | set):
        targets = [str(target) for target in ground_truth]
    else:
        targets = [] if ground_truth is None else [str(ground_truth)]
    if not targets:
        raise ValueError(f"the row has no target to match: ground_truth is {ground_truth!r}")
    return targets


def _response(text: str) -> str:
    return text.partition(_CHATML)[2] if _CHATML in text else text


def _tool_results(extra_info: Mapping[str, Any] | None) -> list[str]:
    messages = (extra_info or {}).get("messages") or []
    return [str(m.get("content") or "") for m in messages if m.get("role") == "tool"]


def _stands_in(text: str, targets: Iterable[str]) -> bool:
    haystack = f" {normalize(text)} "
    return any(f" {needle} " in haystack for needle in map(normalize, targets) if needle)
