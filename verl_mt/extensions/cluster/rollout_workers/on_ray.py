"""Rollout workers as Ray actors: Ray places them, carries what they say, and tells when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from typing import Any

import ray
from ray.exceptions import RayError

from verl_mt.errors import WorkerError, error_text
from verl_mt.extensions.cluster.rollout_workers.links import Link, WorkerGone
from verl_mt.extensions.cluster.rollout_workers.worker import live, sendable
from verl_mt.extensions.cluster.workers.engine_hosts import Answers, how_it_ended
from verl_mt.extensions.cluster.workers.ray_group import forwarded_environment

_CALLS_AT_ONCE = 1000


class WorkerActor:
    """The process of a worker. Its methods are coroutines, on one event loop with the worker's."""

    def __init__(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # on another machine it need not exist
            os.chdir(folder)
        self._inbox: asyncio.Queue[tuple[Any, ...]] | None = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._life: asyncio.Task[None] | None = None
        self._told: dict[int, bytes] = {}
        self._num_heard = 0

    async def tell(self, number: int, message: bytes) -> None:
        """What the pool says, numbered from 0: calls of an actor with an event loop may begin in another order. Runs on
        the actor's loop and waits for nothing."""
        if self._inbox is None:
            self._inbox = asyncio.Queue()
            self._life = asyncio.ensure_future(live(self._inbox, self._sender(asyncio.get_running_loop())))
        self._told[number] = message
        while (following := self._told.pop(self._num_heard, None)) is not None:
            self._num_heard += 1
            self._inbox.put_nowait(pickle.loads(following))

    async def hear(self) -> list[bytes]:
        """What the worker has to say, as soon as there is something. Runs on the actor's loop. Waits for the worker."""
        said = [await self._outbox.get()]
        while not self._outbox.empty():
            said.append(self._outbox.get_nowait())
        return said

    async def over(self) -> None:
        """Return when it has closed all that it opened. Runs on the actor's loop."""
        if self._life is not None:
            await self._life

    def _sender(self, loop: asyncio.AbstractEventLoop) -> Any:
        def send(message: tuple[Any, ...]) -> None:
            """Runs in any thread of the actor and waits for nothing."""
            try:
                frame = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                frame = pickle.dumps(("failed", sendable(error)))
            loop.call_soon_threadsafe(self._outbox.put_nowait, frame)

        return send


class RayLink(Link):
    """An actor somewhere on the cluster. It asks for no CPU of Ray's: those are the ranks' and the engines'."""

    def __init__(self) -> None:
        environment = {"env_vars": forwarded_environment(os.environ)}
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _CALLS_AT_ONCE, "runtime_env": environment}
        self._actor: Any = ray.remote(WorkerActor).options(**options, scheduling_strategy="SPREAD").remote(os.getcwd())
        self._heard: list[bytes] = []
        self._num_said = 0
        self._answers = Answers()
        self._ended = False
        self._refused: Exception | None = None

    @property
    def actor(self) -> Any:
        """Its handle."""
        return self._actor

    def send(self, message: tuple[Any, ...]) -> None:
        """Runs on the rollout's loop and waits for nothing."""
        if self._ended or not ray.is_initialized():
            return
        try:
            frame = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            self._refused = WorkerError(f"a rollout worker cannot be told {message[0]!r}: {error_text(error)}")
            return
        self._call("tell", self._num_said, frame)
        self._num_said += 1

    async def receive(self) -> tuple[Any, ...]:
        """Runs on the rollout's loop. Waits for the actor, by Ray."""
        if self._refused is not None:
            return "failed", self._refused
        while not self._heard:
            try:
                self._heard = await asyncio.shield(self._call("hear"))
            except RayError as error:
                reason = how_it_ended(error) or error_text(error, named=True)
                raise WorkerGone(f"its Ray actor ended: {reason}") from error
        return pickle.loads(self._heard.pop(0))

    async def end(self, grace_s: float) -> None:
        """Runs on the rollout's loop. Waits for the actor, at most `grace_s`."""
        if self._ended or not ray.is_initialized():
            return
        self.send(("end",))
        self._ended = True
        if grace_s:
            await asyncio.wait({self._call("over")}, timeout=grace_s)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
        await self._answers.last()

    def _call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """Runs on the rollout's loop and waits for nothing."""
        return self._answers.to(getattr(self._actor, method).remote(*args))
