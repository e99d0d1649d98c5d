"""Gymnasium: an environment whose actions are the model's turns."""

from __future__ import annotations

import inspect
import re
from typing import Any

from verl_mt.data.user_values import bool_of, number_of
from verl_mt.environments.base import Environment
from verl_mt.errors import ConfigError, PluginError
from verl_mt.extensions.environments import wrapping
from verl_mt.plugins import load_object

_NUMBER = re.compile(r"-?\d+")


class Gymnasium(Environment):
    """`reset(seed=, options=)` returns (observation, info), `step(action)` (observation, reward, terminated, truncated,
    info). The score is the sum of the rewards. Each reward is its turn's score, too.

    The action is the model's text. If the action space is `Discrete`, it is the last whole number in the text; a text
    without one, or with one outside the space, is told so and costs no step. The observation is shown as text, or, with
    `render_mode="ansi"`, as `render()`.

    Args:
        env: a class, its dotted path or `file.py:Name`, or the id of a registered environment (`FrozenLake-v1`).
        config: arguments of its constructor.
    """

    def __init__(self, env: Any, **config: Any):
        self._env = _made(env, config)
        self._space: Any = getattr(self._env, "action_space", None)
        self._total = 0.0

    def reset(self, seed: Any = None, options: Any = None, **row: Any) -> str:
        """The first observation is the prompt. The row's columns `seed` and `options` are its arguments, where it takes
        them."""
        wanted = {"seed": seed, "options": options}
        taken = inspect.signature(self._env.reset).parameters.values()
        names = wanted if any(p.kind is p.VAR_KEYWORD for p in taken) else {p.name for p in taken}
        found = self._env.reset(**{k: v for k, v in wanted.items() if k in names and v is not None})
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"reset must return (observation, info), got {found!r:.80}")
        return self._shown(found[0])

    def reply(self, text: str) -> tuple[str, float]:
        """Take the action that the text says."""
        action: Any = text
        if type(self._space).__name__ == "Discrete":
            first, size = int(self._space.start), int(self._space.n)
            numbers = _NUMBER.findall(text)
            if not numbers or not first <= int(numbers[-1][:9]) < first + size:
                return f"That is no action. Write a whole number from {first} to {first + size - 1}.", 0.0
            action = int(numbers[-1])
        observation, reward, terminated, truncated, _ = self._env.step(action)
        gained = number_of(reward, "the reward")
        self._total += gained
        self.done = bool_of(terminated, "terminated") or bool_of(truncated, "truncated")
        return self._shown(observation), gained

    def score(self) -> float:
        """The sum of the rewards."""
        return self._total

    def close(self) -> None:
        """Close the environment, where it has a `close`."""
        if callable(close := getattr(self._env, "close", None)):
            close()

    def _shown(self, observation: Any) -> str:
        if getattr(self._env, "render_mode", None) == "ansi":
            return str(self._env.render())
        return str(observation)


def is_gymnasium(found: type) -> bool:
    """Whether a class is in Gymnasium's manner."""
    if any(base.__module__.partition(".")[0] == "gymnasium" for base in found.__mro__):
        return True
    reset, step = getattr(found, "reset", None), getattr(found, "step", None)
    if not callable(reset) or not callable(step):
        return False
    return bool({"seed", "options"} & set(inspect.signature(reset).parameters)) and len(_behind_self(step)) == 1


def around(found: type) -> type[Environment]:
    """An environment around a class in Gymnasium's manner."""
    return wrapping.around(Gymnasium, found)


def _behind_self(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)[1:]


def _made(env: Any, config: dict[str, Any]) -> Any:
    if isinstance(env, str) and ":" not in env and "." not in env:
        try:
            import gymnasium
        except ImportError as error:
            raise PluginError(f"the environment {env!r} needs the package gymnasium: pip install gymnasium") from error
        return gymnasium.make(env, **config)
    kind = load_object(env, what="environment.config.env") if isinstance(env, str) else env
    if not callable(kind):
        raise ConfigError(f"environment.config.env is {env!r}: give the class, or the id of a registered environment")
    return kind(**config)
