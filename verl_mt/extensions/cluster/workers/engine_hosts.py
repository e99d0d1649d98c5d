"""Places for engines, kept by Ray: a process beside ranks, in the group's own placement, or on other devices.

Only handles, requests and answers pass Ray; weights go from a rank to its engine through their machine's memory, or
from rank 0 to all of them by one broadcast.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from verl_mt.engines.base import EngineHost
from verl_mt.errors import EngineError, EngineGoneError, VerlMTError, error_text
from verl_mt.plugins import load_object

_CALLS_AT_ONCE = 100_000
"""Ray's own limit, 1000, would make requests wait in front of an engine that could take them."""
_LAST_ANSWERS_S = 5.0
"""How long calls of a process that was ended may take to come back as failed."""


class Answers:
    """Calls of one Ray actor that have not come back."""

    def __init__(self) -> None:
        self._pending: set[asyncio.Future[Any]] = set()

    def to(self, reference: Any) -> asyncio.Future[Any]:
        """What the call of this reference returns. Runs on the rollout's loop and waits for nothing: Ray resolves the
        future."""
        answer = asyncio.wrap_future(reference.future())
        self._pending.add(answer)
        answer.add_done_callback(self._came_back)
        return answer

    async def last(self) -> None:
        """Wait for the calls of an actor that was ended, also for those that nobody waits for any more: Ray ends this
        process if one comes back after its shutdown. Runs on the rollout's loop."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=_LAST_ANSWERS_S)

    def _came_back(self, answer: asyncio.Future[Any]) -> None:
        self._pending.discard(answer)
        if not answer.cancelled():
            answer.exception()  # of one that nobody waits for any more, it is nobody's


class Resident:
    """In the process beside the ranks: holds one object, and calls its coroutines."""

    def __init__(self) -> None:
        self._object: Any = None

    async def make(self, path: str, args: tuple[Any, ...]) -> None:
        """Makes the object, from its class's dotted path."""
        self._object = load_object(path, what="an engine beside the ranks")(*args)

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Runs on the actor's loop. Waits for the engine."""
        return await getattr(self._object, method)(*args)


class RayHost(EngineHost):
    """See `EngineHost`.

    Args:
        name: for messages.
        rank: the first of those that it stands beside; None = it has devices of its own, which Ray gives it.
        num_ranks: devices of the engine.
        devices: GPUs of the ranks beside it, where `rank` says which; None otherwise.
        options: of the Ray actor: where it is placed, on what, with what environment.
    """

    def __init__(
        self, name: str, rank: int | None, num_ranks: int, devices: tuple[str, ...] | None, options: Mapping[str, Any]
    ):
        self.name, self.rank, self.num_ranks, self.devices = name, rank, num_ranks, devices
        self.on_gpu = bool(devices) or bool(options.get("num_gpus"))
        self._options = {**options, "max_restarts": 0, "max_concurrency": _CALLS_AT_ONCE}
        self.resident: Any = None
        """Handle of the process; None = there is none."""
        self._answers = Answers()

    async def make(self, path: str, *args: Any) -> None:
        """Runs on the rollout's loop. Waits for the new actor."""
        await self.end()

        def submit() -> Any:
            self.resident = ray.remote(Resident).options(**self._options).remote()
            return self.resident.make.remote(path, args)

        await self._result(submit)

    async def call(self, method: str, *args: Any) -> Any:
        """Runs on the rollout's loop. Waits for the actor."""
        if self.resident is None:
            raise EngineGoneError(f"nothing runs beside {self.name}")
        return await self._result(lambda: self.resident.call.remote(method, args))

    def caller(self) -> Ask:
        if self.resident is None:
            raise EngineGoneError(f"nothing runs beside {self.name}")
        return Ask(self.resident)

    async def end(self) -> None:
        """Runs on the rollout's loop. Waits for calls that are still out, at most `_LAST_ANSWERS_S`."""
        resident, self.resident = self.resident, None
        if resident is not None and ray.is_initialized():
            with contextlib.suppress(RayError):
                ray.kill(resident)
        await self._answers.last()

    async def _result(self, submit: Callable[[], Any]) -> Any:
        if not ray.is_initialized():
            # Ray would start a cluster of its own for the asking.
            raise EngineGoneError(f"the Ray cluster with the engine beside {self.name} is closed")
        try:
            return await asyncio.shield(self._answers.to(submit()))
        except RayError as error:
            raise as_engine_error(error) from error
        except VerlMTError:
            raise
        except Exception as error:
            # Ray refuses to send anything to who is gone with no class of its own.
            raise EngineGoneError(error_text(error, named=True)) from error


@dataclass(frozen=True)
class Ask:
    """`EngineHost.call` for a rank, which waits for it. Equal where they ask the same process."""

    resident: Any

    def __call__(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Runs in a rank. Waits for the engine's actor, at most `timeout_s`.

        Raises:
        EngineError: see `EngineHost.call`.
        """
        try:
            return ray.get(self.resident.call.remote(method, args), timeout=timeout_s)
        except GetTimeoutError:
            reason = f"the process that holds the engine did not answer within {timeout_s:.0f} s"
            raise EngineGoneError(reason) from None
        except RayError as error:
            raise as_engine_error(error) from error

    async def later(self, method: str, *args: Any) -> Any:
        """The same for an event loop, in a process of Ray's.

        Runs on the loop of another actor. Waits for the engine's actor.

        Raises:
            EngineError: see `EngineHost.call`.
        """
        try:
            return await self.resident.call.remote(method, args)
        except RayError as error:
            raise as_engine_error(error) from error


def how_it_ended(error: Exception) -> str | None:
    """What Ray knows of a process that is gone; None where the error is another. What it suggests then is left out."""
    if isinstance(error, RayActorError):
        return str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
    # Ray ends processes before a machine has no memory left at all, and has an error of its own for their callers.
    return str(error).partition("\n")[0] if isinstance(error, OutOfMemoryError) else None


def as_engine_error(error: RayError) -> VerlMTError:
    """An error of verl_mt as it was raised there; the process's end as the engine's."""
    if (reason := how_it_ended(error)) is not None:
        return EngineGoneError(f"the process that holds the engine ended: {reason}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause if isinstance(cause, VerlMTError) else EngineError(error_text(cause, named=True))
