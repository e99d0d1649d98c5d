r"""Geometry3K: the share of the format and the right answer, as verl weighs them.

Answers are lengths, areas and angles: `90^\circ` is 90, `5 cm` is 5, `x = 3` is 3, and numbers with roots, fractions
and pi are equal where their values are, to a part in 10^9: `3\sqrt{2}` is `\sqrt{18}`, and not 4.24.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from verl_mt.extensions.compat.rewards.math_answer import final_answer, same_answer

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)

_UNITS = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\^\s*\{?\s*\\circ\s*\}?|\\circ|\\?%|\\?\$|\\[,!; ]"
    r"|(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es)?s?\s*(?:\^\d+)?",
    re.IGNORECASE,
)
_NAMED = re.compile(r"^\s*[A-Za-z]\s*=")
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|sqrt|pi|[-+*/()]")
_OF_TREE: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


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
    if answer is None:
        return 0.0
    pair = [_bare(text) for text in (answer, str(ground_truth))]
    values = [value_of(text) for text in pair]
    close = None not in values and math.isclose(*values, rel_tol=1e-9)  # type: ignore[arg-type]
    return float(close or same_answer(answer, str(ground_truth)) or same_answer(*pair))


def compute_score(predict_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """`(1 - format_score) * accuracy + format_score * format`."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)


def _bare(text: str) -> str:
    """Without units, the sign of degrees, and the name of what it is."""
    return _UNITS.sub("", _NAMED.sub("", text)).strip().lower()


def value_of(text: str) -> float | None:
    r"""The number that a short LaTeX expression stands for (`+ - * /`, `\frac`, `\sqrt`, `\pi`, `\cdot`, brackets; what
    stands side by side is multiplied); None of everything else."""
    if len(text) > 200:
        return None
    text = re.sub(r"\s|\\left|\\right|(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\[dt]?frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    before = None
    while text != before:  # from the inside outwards
        before = text
        text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
    for command, sign in ((r"\pi", "pi"), (r"\cdot", "*"), (r"\times", "*"), (r"\div", "/")):
        text = text.replace(command, sign)
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        return None
    written = ""
    for token in tokens:
        # 3sqrt(2) and 2(5) and (2)(5): the sign between factors is left out.
        written += "*" if re.search(r"[\d.)i]$", written) and token not in "+-*/)" else ""
        written += token
    try:
        return _number(ast.parse(written, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _number(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id == "pi":
        return math.pi
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        return math.sqrt(_number(node.args[0]))
    if isinstance(node, ast.BinOp) and type(node.op) in _OF_TREE:
        return _OF_TREE[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("not an expression that is known here")
