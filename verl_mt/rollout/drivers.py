"""Rollout drivers: who decides what happens next in a conversation.

A rollout driver leads one episode to its end. It chooses requests and answers. Only the episode's `RolloutSession`
appends tokens. The runner opens and closes everything around it, and attributes what a driver raises: an engine that
went away starts the trajectory again, anything else marks it FAILED.

To add a driver, subclass `RolloutDriver` in an extension, add a key of the config that asks for it, and an entry point
`verl_mt.rollout_drivers`. A driver that edits the conversation names another session in `session_class`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from verl_mt.chat.parsers.base import ToolParser
from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import Config
from verl_mt.data.trajectory import Trajectory
from verl_mt.errors import PluginError
from verl_mt.interactions.session import InteractionSession
from verl_mt.plugins import Registry, listing
from verl_mt.rewards.contract import Reward, RunState
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.session import RolloutSession
from verl_mt.rollout.tool_loop import run_tool_loop
from verl_mt.tools.executor import ToolSession

if TYPE_CHECKING:
    from verl_mt.chat.template import ChatTemplate


@dataclass(frozen=True)
class Place:
    """Where an episode stands in its batch."""

    group: int = 0
    """Number of the prompt, from 0."""
    sample: int = 0
    """Number of the episode, from 0."""
    evaluation: bool = False
    run: RunState = RunState()
    """Where the training run stands. For rewards."""


@dataclass
class Episode:
    """One try at one conversation, as a driver gets it."""

    session: RolloutSession
    """Started: the first prompt is recorded."""
    prompt: Prompt
    """The row with all its columns (`prompt.row.raw`), its messages, tools and ids."""
    tools: ToolSession | None = None
    """Opened, and closed by the runner. None where no tools are configured."""
    interaction: InteractionSession | None = None
    """Started, and finished by the runner. None where none is configured."""
    place: Place = Place()
    outcome: list[Trajectory] | None = None
    """Set by a driver of which several trajectories come. None = the session's own."""


class RolloutDriver(Protocol):
    """Subclass it. One object per run, shared by all episodes. They run at the same time on one event loop."""

    session_class: type[RolloutSession] = RolloutSession
    """The class of the sessions that this driver needs."""
    is_tool_loop: bool = False
    """Without tools and interactions, a conversation has one turn."""

    async def run(self, episode: Episode) -> None:
        """Drive the episode until its session has ended (`session.ended`).

        Runs on the rollout's loop. Waits for the engine and for user code.

        Raises:
            EngineGoneError: the engine went away. The trajectory starts again.
            Exception: anything else fails this trajectory, and no other.
        """


class ToolLoopDriver(RolloutDriver):
    """The default: tool calls are answered, then the interaction, if there is one, reacts."""

    is_tool_loop = True

    async def run(self, episode: Episode) -> None:
        await run_tool_loop(episode.session, episode.tools, episode.interaction)


DRIVERS: Registry[Callable[[Config, DriverParts], RolloutDriver]] = Registry(
    "rollout driver", group="verl_mt.rollout_drivers"
)
"""Key under `actor_rollout_ref.rollout` that asks for a driver -> its factory, `build(config, parts) -> RolloutDriver`.

If several are set, the first one decides. A run imports only its own driver.
"""


@dataclass(frozen=True)
class DriverParts:
    """What rollout drivers and rewards may be built from, beside the config."""

    parser: ToolParser | None = None
    media: frozenset[str] = frozenset()
    """What model and engine take beside text."""
    chat: ChatTemplate | None = None
    reward: Reward | None = None
    tool_schemas: Sequence[dict[str, Any]] = ()
    """Of the tools that the configuration names."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Objects that a driver and a reward of one library share, under their names."""


def has_own_loop(rollout: RolloutConfig) -> bool:
    """Whether a loop of the user's, or an environment, drives the conversations, and not the tool loop."""
    return rollout.environment.is_configured or _asked(rollout) is not None


def build_driver(config: Config, parts: DriverParts) -> RolloutDriver:
    """Who drives the conversations where no environment does."""
    rollout = config.actor_rollout_ref.rollout
    if (key := _asked(rollout)) is None:
        return ToolLoopDriver()
    driver = DRIVERS.find(key)(config, parts)
    if missing := [name for name in ("run", "session_class", "is_tool_loop") if not hasattr(driver, name)]:
        raise PluginError(
            f"actor_rollout_ref.rollout.{key}: its driver, a {type(driver).__name__}, has no {listing(missing)}: "
            "make it a subclass of RolloutDriver (verl_mt/rollout/drivers.py)"
        )
    return driver


def _asked(rollout: RolloutConfig) -> str | None:
    """The key that asks for a driver; None = none does."""
    for key in DRIVERS.names():
        try:
            value = attrgetter(key)(rollout)
        except AttributeError:
            raise PluginError(
                f"entry point {key!r} of verl_mt.rollout_drivers: there is no key actor_rollout_ref.rollout.{key}. Its "
                "package adds it by verl_mt.config_sections (verl_mt/config/extended.py)"
            ) from None
        if value is not None:
            return key
    return None
