"""Doors: who decides what happens next in a conversation.

A door drives one episode to its end. It chooses what is asked and answered; only the episode's `RolloutSession`
appends tokens. The runner opens and closes everything around it, and attributes what a door raises: an engine that
went away starts the trajectory again, anything else marks it FAILED.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verl_mt.data.trajectory import Trajectory
from verl_mt.interactions.session import InteractionSession
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.session import RolloutSession
from verl_mt.rollout.tool_loop import run_tool_loop
from verl_mt.tools.executor import ToolSession


@dataclass(frozen=True)
class Place:
    """Where an episode stands in its batch."""

    group: int = 0
    """Number of the prompt, from 0."""
    sample: int = 0
    """Number of the episode, from 0."""
    evaluation: bool = False


@dataclass
class Episode:
    """One try at one conversation, as a door gets it."""

    session: RolloutSession
    """Started: the first prompt is recorded."""
    prompt: Prompt
    """The row with all its columns (`prompt.row.raw`), its messages, tools and ids."""
    tools: ToolSession | None = None
    """Opened, and closed by the runner; None where no tools are configured."""
    interaction: InteractionSession | None = None
    """Started, and finished by the runner; None where none is configured."""
    place: Place = Place()
    outcome: list[Trajectory] | None = None
    """Set by a door of which several trajectories come; None = the session's own."""


class Door(Protocol):
    """One object per run, shared by all episodes; they run at the same time on one event loop."""

    async def run(self, episode: Episode) -> None:
        """Drive the episode until its session has ended (`session.ended`).

        Raises:
            EngineGoneError: the engine went away; the trajectory starts again.
            Exception: anything else fails this trajectory, and no other.
        """


class ToolLoopDoor:
    """The default: tool calls are answered, then the interaction, if there is one, reacts."""

    async def run(self, episode: Episode) -> None:
        await run_tool_loop(episode.session, episode.tools, episode.interaction)
