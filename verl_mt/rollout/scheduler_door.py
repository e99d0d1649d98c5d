"""The scheduler's door: a `MultiTurnScheduler` decides what is asked next."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from typing import Any

from verl_mt.errors import EngineError, EngineGoneError, UserCodeError, error_text
from verl_mt.rollout.doors import Episode
from verl_mt.rollout.schedulers.base import MultiTurnScheduler
from verl_mt.rollout.schedulers.conversation import Conversation, InferEngine, TrajectoryOver, request_config, running
from verl_mt.rollout.schedulers.outputs import take_outputs
from verl_mt.rollout.schedulers.request import make_request
from verl_mt.user_code import CallTimeout, user_code_of

log = logging.getLogger(__name__)

_NO_DEADLINE_S = float("inf")
_LOOK_S = 1.0
_UNHAPPY = ("error", "engine", "cancelled")


class SchedulerDoor:
    """Hands every episode to one scheduler.

    Args:
        scheduler: shared by all trajectories.
        timeout_s: deadline of each hook; of a custom `run`, of the time between two turns.
        media: kinds of media that the model takes.
    """

    def __init__(self, scheduler: MultiTurnScheduler, *, timeout_s: float = 60.0, media: frozenset[str] = frozenset()):
        self.scheduler, self.timeout_s, self.media = scheduler, timeout_s, media
        self._custom_run = type(scheduler).run is not MultiTurnScheduler.run
        name = type(scheduler).__name__
        self._code = user_code_of(scheduler, MultiTurnScheduler, f"scheduler {name}")

    async def run(self, episode: Episode) -> None:
        """Drive the episode to its end; `on_trajectory_end` is called once, whatever that is."""
        session = episode.session
        session.verbatim = True
        engine = getattr(self.scheduler, "infer_engine", None)
        if not isinstance(engine, InferEngine) or engine.chat is not session.context.chat:
            self.scheduler.infer_engine = InferEngine(session.context.chat)
        conversation = Conversation(
            session, self._code, type(self.scheduler).__name__, self.timeout_s, tools=episode.tools, media=self.media
        )
        conversation.request = make_request(episode)
        token = running.set(conversation)
        reason = "error"
        try:
            await self._drive(conversation)
            conversation.conclude(self.scheduler.max_turns)
            reason = str(session.trajectory.stop_reason)
        except EngineGoneError:
            reason = "engine"
            raise
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        finally:
            await self._end(conversation, reason)
            running.reset(token)

    async def _drive(self, conversation: Conversation) -> None:
        try:
            returned = await self._run(conversation)
        except TrajectoryOver:
            returned = None
        except Exception:
            if conversation.engine_error is not None:
                raise conversation.engine_error from None
            raise
        if conversation.engine_error is not None:
            raise conversation.engine_error
        if self._custom_run and returned is not None:
            take_outputs(conversation, returned)
        elif self._custom_run and not conversation.session.ended:
            raise conversation.error("run", "it returned None; return a RolloutOutput, or a list of them")

    async def _run(self, conversation: Conversation) -> Any:
        request, config = conversation.request, request_config(conversation.session)
        if not self._custom_run:
            return await self.scheduler.run(request, config)  # type: ignore[arg-type]
        conversation.waiting_since = time.monotonic()
        task = asyncio.ensure_future(self._code.call("run", (request, config), {}, timeout_s=_NO_DEADLINE_S))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=min(_LOOK_S, self.timeout_s))
                since = conversation.waiting_since
                if not task.done() and since is not None and time.monotonic() - since > self.timeout_s:
                    cause = CallTimeout(f"nothing was asked of the engine for {self.timeout_s:g} s")
                    raise conversation.error("run", str(cause)) from cause
            return await self._result(conversation, task)
        finally:
            task.cancel()

    @staticmethod
    async def _result(conversation: Conversation, task: asyncio.Future[Any]) -> Any:
        try:
            return await task
        except (TrajectoryOver, EngineError, UserCodeError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise conversation.error("run", error_text(error)) from error

    async def _end(self, conversation: Conversation, reason: str) -> None:
        """Goes on in the background if the rollout is cancelled."""
        request = conversation.request
        if type(self.scheduler).on_trajectory_end is MultiTurnScheduler.on_trajectory_end:
            return
        takes = inspect.signature(self.scheduler.on_trajectory_end).parameters.values()
        positional = [p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        args = (reason,) if len(positional) == 1 else (copy.copy(request), reason)
        call = conversation.hook("on_trajectory_end", *args)
        try:
            await asyncio.shield(asyncio.ensure_future(call))
        except UserCodeError as error:
            if reason not in _UNHAPPY:
                raise
            log.warning("%s", error)  # what ended the trajectory is what is reported of it
