"""TextArena: games for one player, played in text."""

from __future__ import annotations

from typing import Any

from verl_mt.environments.base import Environment
from verl_mt.errors import PluginError


class TextArena(Environment):
    """The game's first observation is the prompt; each of the model's turns is an action. The score is the game's
    reward, 0 where the game is not over.

    Args:
        game: the game's id (`FrozenLake-v0`).
        config: further arguments of `textarena.make`.
    """

    def __init__(self, game: str, **config: Any):
        try:
            import textarena
        except ImportError as error:
            raise PluginError(f"textarena cannot be imported ({error}): pip install textarena") from error
        # The raw variant gives what is new; the others repeat the whole game in every turn.
        self._env = textarena.make(f"{game}-raw", **config)
        self._actions = textarena.ObservationType.PLAYER_ACTION
        self._reward = 0.0

    def reset(self, seed: int, **row: Any) -> str:
        """Begin the game of this seed."""
        self._env.reset(num_players=1, seed=seed)
        return self._seen()

    def reply(self, text: str) -> str:
        """Play."""
        self.done, _ = self._env.step(text)
        seen = self._seen()
        if self.done:
            rewards, _ = self._env.close()
            self._reward = float((rewards or {}).get(0, 0.0))
        return seen

    def score(self) -> float:
        """The game's reward."""
        return self._reward

    def _seen(self) -> str:
        """What the game says since the last turn."""
        _, observations = self._env.get_observation()
        return "\n".join(text for _, text, kind in observations if kind is not self._actions)
