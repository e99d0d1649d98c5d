"""A real OpenEnv server for the tests: `openenv_server.py KIND` prints its port, and runs until it is killed."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Say(Action):
    message: str


class Walk(Action):
    """Walk on the grid."""

    east: int
    north: int


class Seen(Observation):
    text: str = ""
    left: int | None = None


class Guess(Environment):
    """A number from 1 to 9, in three guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, top: int = 9, **kwargs: Any) -> Seen:
        self.number, self.left, self.others = random.Random(seed).randint(1, top), 3, sorted(kwargs)
        return Seen(text=f"Guess a number from 1 to {top}. {self.others}")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Seen:  # type: ignore[override]
        if action.message == "die":
            os._exit(1)
        self.left -= 1
        right = action.message.strip() == str(self.number)
        return Seen(text="right" if right else "wrong", reward=float(right), done=right or not self.left)

    @property
    def state(self) -> State:
        return State(step_count=3 - self.left)


class Grid(Guess):
    def step(self, action: Walk, timeout_s: float | None = None, **kwargs: Any) -> Seen:  # type: ignore[override]
        self.left -= 1
        return Seen(text="moved", left=action.east + action.north, reward=0.25, done=self.left == 0)


class Shop(MCPEnvironment):
    """Its tools are MCP tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self.basket: list[str] = []

        @server.tool
        def add(item: str) -> str:
            """Put something into the basket.

            Args:
                item: what
            """
            if item == "slow":
                time.sleep(1.0)
            if item == "gold":
                raise ValueError("no gold here")
            self.basket.append(item)
            return ", ".join(self.basket)

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.basket.clear()
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        seen.reward = float(len(self.basket) == 2)
        seen.done = len(self.basket) == 3
        return seen

    @property
    def state(self) -> State:
        return State(step_count=len(self.basket))


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "guess": (Guess, Say, Seen),
    "grid": (Grid, Walk, Seen),
    "shop": (Shop, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    app = create_app(*KINDS[sys.argv[1]], env_name=sys.argv[1], max_concurrent_envs=64)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
