"""Which adapter takes a class of another library."""

from __future__ import annotations

from typing import Any

from verl_mt.environments.base import Environment
from verl_mt.extensions.environments import gym, trl


def as_environment(found: Any) -> type[Environment] | None:
    """An environment class around a class of another library that names itself; None where no adapter takes it.

    Gymnasium's (a subclass of `gymnasium.Env`, or `step` beside a `reset` with `seed` or `options`) and TRL's
    (`environment_factory`: `reset`, and methods with docstrings).
    """
    if not isinstance(found, type):
        return None
    if gym.is_gymnasium(found):
        return gym.around(found)
    return trl.around(found) if trl.is_factory(found) else None
