"""The decorator that tools written for verl carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(function: F) -> F:
    """Returns the function unchanged: a pass-through for verl's decorator of this name.

    Nothing is lost by it: verl_mt records calls, results and times of every tool itself, in the rollout rows, and
    `actor_rollout_ref.rollout.trace.backend` makes spans of them (docs/tracking.md).
    """
    return function
