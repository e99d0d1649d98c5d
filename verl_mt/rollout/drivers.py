"""Rollout drivers: who decides what happens next in a conversation.

A rollout driver leads one episode to its end. It chooses requests and answers. Only the episode's `RolloutSession`
appends tokens. The runner opens and closes everything around it, and attributes what a driver raises: an engine that
went away starts the trajectory again, anything else marks it FAILED.

A further driver is a folder of its own, a key of the config that asks for it, and a line in `DRIVERS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from verl_mt.chat.parsers.base import ToolParser
from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import Config
from verl_mt.data.trajectory import Trajectory
from verl_mt.interactions.session import InteractionSession
from verl_mt.plugins import load_object
from verl_mt.rewards.contract import RunState
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
    run: RunState = RunState()
    """Where the training run stands; for rewards."""


@dataclass
class Episode:
    """One try at one conversation, as a driver gets it."""

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
    """Set by a driver of which several trajectories come; None = the session's own."""


class RolloutDriver(Protocol):
    """One object per run, shared by all episodes; they run at the same time on one event loop."""

    async def run(self, episode: Episode) -> None:
        """Drive the episode until its session has ended (`session.ended`).

        Raises:
            EngineGoneError: the engine went away; the trajectory starts again.
            Exception: anything else fails this trajectory, and no other.
        """


class ToolLoopDriver:
    """The default: tool calls are answered, then the interaction, if there is one, reacts."""

    async def run(self, episode: Episode) -> None:
        await run_tool_loop(episode.session, episode.tools, episode.interaction)


DRIVERS = {
    "agent_function_path": "verl_mt.rollout.agent.driver:build",
    "custom_generate_function_path": "verl_mt.rollout.generate.driver:build",
    "multi_turn.scheduler": "verl_mt.rollout.schedulers.driver:build",
}
"""Key under `actor_rollout_ref.rollout` that asks for a driver -> its factory, `build(config, parts) -> RolloutDriver`.

If several are set, the first one decides. A factory is named by its path, so a run imports only its own driver.
"""


@dataclass(frozen=True)
class DriverParts:
    """What a factory may build its driver from, beside the config."""

    args: Any
    """What functions of slime's kind are given."""
    parser: ToolParser
    media: frozenset[str] = frozenset()
    """What model and engine take beside text."""


def has_own_loop(rollout: RolloutConfig) -> bool:
    """Whether a loop of the user's drives the conversations, and not the tool loop."""
    return any(attrgetter(key)(rollout) is not None for key in DRIVERS)


def build_driver(config: Config, parts: DriverParts) -> RolloutDriver:
    """Who drives the conversations: the one place that decides it."""
    rollout = config.actor_rollout_ref.rollout
    for key, factory in DRIVERS.items():
        if attrgetter(key)(rollout) is not None:
            driver: RolloutDriver = load_object(factory, what=f"actor_rollout_ref.rollout.{key}")(config, parts)
            return driver
    return ToolLoopDriver()
