"""A class of another library under its own name, so that errors lead to its source."""

from __future__ import annotations

import inspect
from typing import Any

from verl_mt.environments.base import Environment


def around(base: type[Environment], found: type, **members: Any) -> type[Environment]:
    """A subclass of the adapter `base` for the class `found`: its name, place and constructor's arguments."""

    def __init__(self: Any, **config: Any) -> None:
        base.__init__(self, found, **config)  # type: ignore[call-arg]

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = inspect.Signature([own]) if found.__init__ is object.__init__ else inspect.signature(found.__init__)  # type: ignore[misc]
    __init__.__signature__ = taken  # type: ignore[attr-defined]
    place = {"__module__": found.__module__, "__qualname__": found.__qualname__, "__doc__": found.__doc__}
    return type(found.__name__, (base,), {**place, "__init__": __init__, **members})
