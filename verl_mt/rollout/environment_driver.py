"""The rollout driver of environments: the tool loop around one object per trajectory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from verl_mt.data.conversation import Message
from verl_mt.environments.kinds import EnvironmentTools, Kind, place_of
from verl_mt.environments.session import EnvironmentSession
from verl_mt.errors import DataError, UserCodeError
from verl_mt.rollout.drivers import Episode, RolloutDriver
from verl_mt.rollout.prompts import ends_with_user
from verl_mt.rollout.tool_loop import run_tool_loop

log = logging.getLogger(__name__)


class EnvironmentDriver(RolloutDriver):
    """Makes the row's environment, resets it, runs the tool loop in it, asks for its score and closes it.

    What came of it is in `rollout_infos`: `environment: {name, done, score}`.

    Args:
        tools: of the run, with its environments.
        max_prompt_length: longest prompt in tokens, with what `reset` adds.
    """

    def __init__(self, tools: EnvironmentTools, max_prompt_length: int):
        self._tools, self._max_prompt_length = tools, max_prompt_length
        self._begins: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def run(self, episode: Episode) -> None:
        """Runs on the rollout's loop. Waits for the engine and for the environment."""
        session, row = episode.session, episode.prompt.row
        trajectory = session.trajectory
        kind = self._tools.kind_of(row.raw)
        environment = EnvironmentSession(kind, trajectory.trajectory_id)
        if episode.tools is not None:
            episode.tools.agent_data._environment = environment
        try:
            # One begins in each turn of the loop: 2,000 at once would hold it for seconds.
            async with self._begins.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                await asyncio.sleep(0)
            self._begin(episode, await environment.start(row.raw), kind)
            interaction = environment if kind.replies else episode.interaction
            await run_tool_loop(session, episode.tools, interaction, environment)
            trajectory.info["environment"] = await environment.outcome()
        finally:
            trajectory.time_spans += environment.time_spans
            try:
                await environment.close()
            except UserCodeError as error:
                session.count("environment_close_errors", 1)
                log.warning("%s", error)

    def _begin(self, episode: Episode, said: str | list[Message] | None, kind: Kind) -> None:
        """Start the session with what `reset` returned.

        Raises:
            DataError: there is no prompt, or it is too long.
        """
        prompt, session = episode.prompt, episode.session
        if said is None and prompt.ids:
            return
        messages, num_trusted = opening(prompt.messages, said)
        if not ends_with_user(messages):
            raise DataError(
                f"{place_of(kind.cls, kind.cls.reset)} returned {said!r:.80}, and {prompt.row.place} has no prompt. "
                "Return a text, or add the column prompt"
            )
        trusted, arrived, chat = messages[:num_trusted], messages[num_trusted:], session.context.chat
        ids = chat.mixed_prompt_ids(trusted, arrived, prompt.tools or None, num_foreign=len(arrived))
        if len(ids) > self._max_prompt_length:
            raise DataError(
                f"{place_of(kind.cls, kind.cls.reset)} made a prompt of {len(ids)} tokens, data.max_prompt_length is "
                f"{self._max_prompt_length}. Raise it, or return a shorter text"
            )
        session.start(ids, messages, prompt.tools, num_trusted=num_trusted)


def opening(given: Sequence[Message], said: str | list[Message] | None) -> tuple[list[Message], int]:
    """The first messages of a conversation, and how many of them, the first ones, are the data set's as they are.

    Args:
        given: the row's messages.
        said: what `reset` returned.
    """
    if said is None or said == "":
        return list(given), len(given)
    if isinstance(said, list):
        kept = [] if said and said[0]["role"] == "system" else [m for m in given[:1] if m["role"] == "system"]
        return [*kept, *said], len(kept)
    last = given[-1] if given else {}
    if last.get("role") == "user":
        before = last["content"]
        parts = f"{before}\n\n{said}" if isinstance(before, str) else [*before, {"type": "text", "text": said}]
        return [*given[:-1], {**last, "content": parts}], len(given) - 1
    return [*given, {"role": "user", "content": said}], len(given)
