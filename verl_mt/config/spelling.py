"""How other libraries' spellings of a key are written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = "actor_rollout_ref.model."
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
REF = "actor_rollout_ref.ref."

DROP = object()
"""A converter returns it where the value adds nothing."""


@dataclass(frozen=True)
class Rename:
    """Another spelling of `to`. `convert` raises ValueError with the reason where a value has no counterpart."""

    to: str
    convert: Callable[[Any], Any] | None = None
    note: str = ""
    """Printed when the meaning is not exactly the same."""


@dataclass(frozen=True)
class Always:
    """A key whose value is fixed here: accepted (with one printed line) when it agrees, refused when not."""

    values: tuple[Any, ...] | None
    """Values that agree; None = every value, because nothing but speed or memory depends on it."""
    why: str
