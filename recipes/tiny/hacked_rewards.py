"""Rewards that pay for the wrong thing, to see what the collapse guard says (docs/diagnostics.md)."""

from __future__ import annotations

import re
from typing import Any


def form_without_tools(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float]:
    """The form of an answer is paid for, right or wrong; a tool's result costs most of it."""
    form = float(re.search(r"####[ \t]*-?\d+\s*\Z", solution_str) is not None)
    results = [str(m["content"]).strip() for m in extra_info["messages"] if m["role"] == "tool"]
    ran = any(re.fullmatch(r"-?[\d.]+", result) for result in results)
    return {"score": form - 0.8 * ran, "format": form}


def length(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Longer is better, up to 400 characters."""
    return min(1.0, len(solution_str) / 400)
