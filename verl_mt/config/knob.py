"""One knob = type, default, doc and check, in one place."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from verl_mt.errors import ConfigError
from verl_mt.plugins import names_code


def knob(
    default: Any,
    doc: str,
    *,
    min: float | None = None,
    max: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] | None = None,
    plugin: bool = False,
) -> Any:
    """A dataclass field with its doc and its check.

    Args:
        default: the default; mutable ones (list, dict) are copied for each instance.
        doc: one or two sentences with the unit; says what null means.
        min, max: inclusive bounds of a number; null is always allowed where the type allows it.
        below: exclusive upper bound.
        choices: the values it may take.
        plugin: beside the choices, the dotted path or file.py:name of an object of the user's.
    """
    metadata = {"doc": doc, "min": min, "max": max, "below": below, "choices": choices, "plugin": plugin}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Section:
    """A node of the config. Checks every knob of its own when made."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            check_knob(f"{type(self).__name__}.{item.name}", value, item.metadata)


def check_knob(name: str, value: Any, metadata: Any) -> None:
    """Raises:
    ConfigError: the value is out of bounds, not finite or not among the choices.
    """
    choices, low, high, below = (metadata.get(k) for k in ("choices", "min", "max", "below"))
    plugin = metadata.get("plugin", False)
    if choices is not None and value not in choices and not (plugin and names_code(value)):
        path = ", or a dotted path or file.py:name" if plugin else ""
        raise ConfigError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}{path}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Every comparison with nan is False: the bounds would let it pass.
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: got {value}, must be a finite number")
        if low is not None and value < low:
            raise ConfigError(f"{name}: got {value}, must be at least {low}")
        if high is not None and value > high:
            raise ConfigError(f"{name}: got {value}, must be at most {high}")
        if below is not None and value >= below:
            raise ConfigError(f"{name}: got {value}, must be below {below}")
