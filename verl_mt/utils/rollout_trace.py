"""The names of verl's rollout tracing, so that a verl tool's import line works.

verl_mt records every tool call, generation and reward of a trajectory itself (`Trajectory.time_spans`, in the rollout
rows and the timeline), so the decorator has nothing to add.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(func: F) -> F:
    """Marks a method that verl traces; here the method itself, since its calls are recorded anyway."""
    return func
