"""Keeps apart what trajectories do at a server that remembers something between calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from verl_mt.extensions.toolbox.mcp_client.connection import McpConnection

StateKept = Literal["none", "session", "argument"]
"""What a server remembers between calls: nothing, something per connection, or something per value of an argument."""


@dataclass
class _Trajectory:
    connection: McpConnection
    arguments: dict[str, Any]
    instances: set[str] = field(default_factory=set)
    """Of tools of this server that are not released yet."""


class TrajectoryStates:
    """One server's states, shared by all its tools.

    Args:
        shared: the connection that asked for the tools.
        kept: `session`: each trajectory gets a connection of its own; `argument`: a key of its own.
        argument: its name, with `kept="argument"`.
    """

    def __init__(self, shared: McpConnection, kept: StateKept, argument: str | None = None):
        self.shared = shared
        self._kept, self._argument = kept, argument
        self._live: dict[str, _Trajectory] = {}

    def enter(self, trajectory: str, instance_id: str) -> tuple[McpConnection, dict[str, Any]]:
        """The connection of a trajectory, and arguments that each of its calls gets."""
        if trajectory not in self._live:
            own = self.shared.private() if self._kept == "session" else self.shared
            # Not the trajectory's id: an attempt that begins again must not find what the first one left.
            key = {self._argument: uuid4().hex} if self._argument is not None else {}
            self._live[trajectory] = _Trajectory(own, key)
        state = self._live[trajectory]
        state.instances.add(instance_id)
        return state.connection, state.arguments

    async def leave(self, trajectory: str, instance_id: str) -> None:
        """An instance is released. The last one of its trajectory ends the trajectory's own connection."""
        state = self._live.get(trajectory)
        if state is None:
            return
        state.instances.discard(instance_id)
        if not state.instances:
            del self._live[trajectory]
            if state.connection is not self.shared:
                await state.connection.close()

    async def close(self) -> None:
        """End all connections."""
        own = [state.connection for state in self._live.values()]
        await asyncio.gather(*(connection.close() for connection in {self.shared, *own}))
