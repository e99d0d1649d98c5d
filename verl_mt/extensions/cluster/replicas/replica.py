"""One engine through all of its lives: started, watched, and after a death started again with the current weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from verl_mt.engines.base import WeightUpdate
from verl_mt.errors import EngineError, EngineGoneError, VerlMTError
from verl_mt.extensions.cluster.replicas.clients import Client
from verl_mt.extensions.cluster.replicas.load import Progress, Seats
from verl_mt.extensions.cluster.replicas.weight_sender import WeightSender

log = logging.getLogger(__name__)

_MAX_DEATHS_IN_A_ROW = 3
"""A launched engine that dies this often without a finished request is not started again."""
_RETRY_S = 2.0


class Replica:
    """Keeps one engine alive.

    Args:
        make: a client for the next life.
        sender: has the current weights for a new life.
        timeout_s: deadline of a start.
        is_ours: it is our process, which a new life starts anew. Another's server is waited for.
        name: among the others, the same in all of its lives.
        kind: of the engine, for messages.
        may_start: set while the device's memory is the engines'; a new life waits for it.
        takes: requests that the engine decodes at once, where it does not tell itself.
    """

    def __init__(
        self,
        make: Callable[[], Client],
        sender: WeightSender,
        *,
        timeout_s: float,
        is_ours: bool,
        name: str = "engine",
        kind: str = "SGLang",
        may_start: asyncio.Event | None = None,
        settled: asyncio.Event | None = None,
        takes: int = 256,
    ):
        self.name = name
        self._what = f"the {kind} engine"
        self.released: set[str] = set()
        """Kinds of device memory that this process has freed: `weights`, `kv_cache`."""
        self._may_start = may_start
        self._settled = settled
        self.reading = asyncio.Lock()
        """Held while a restarted engine gets its weights."""
        self.num_restarts = 0
        self.outstanding = 0
        """Tokens that the requests on their way may still take, prompts included."""
        self.num_sampled = 0
        """Tokens, in all of its lives."""
        self.seats = Seats(takes)
        self.progress = Progress()
        self.is_ours = is_ours
        self.sender = sender
        self.holds: WeightUpdate | None = None
        """The weights it serves; None = those of the model's files."""
        self.lock = asyncio.Lock()
        """Held while weights are sent."""
        self.has_served = False
        """Whether a request was finished in this life."""
        self._make = make
        self._timeout_s = timeout_s
        self._client: Client | None = None
        self._ready = asyncio.Event()
        self._failure: str | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """It serves now."""
        self._look()
        return self._ready.is_set() and self._failure is None

    @property
    def serving(self) -> Client | None:
        """The engine, if it serves now."""
        return self._client if self.is_ready else None

    @property
    def pid(self) -> int | None:
        """Of the engine's main process, if it is ours."""
        return None if self._client is None else self._client.pid

    async def start(self) -> None:
        """The first life.

        Raises:
            ConfigError: it cannot be started.
        """
        await self._live()
        self._supervisor = asyncio.ensure_future(self._supervise())

    def start_later(self, reason: str) -> None:
        """The first life did not begin, or is not waited for: try again until one does.

        Args:
            reason: why not; the error of a replica that is given up names it.
        """
        self._supervisor = asyncio.ensure_future(self._supervise(reason))

    @property
    def is_given_up(self) -> bool:
        """It will not serve any more."""
        return self._failure is not None

    async def ready(self, timeout_s: float | None) -> Client:
        """The engine, once it serves. Runs on the rollout's loop.

        Raises:
            EngineGoneError: it does not in time, or will not any more.
        """
        self._look()
        try:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        except TimeoutError:
            raise EngineGoneError(
                f"{self._what} is being restarted and was not ready within {timeout_s or 0:.0f} s"
            ) from None
        if self._failure is not None:
            raise EngineGoneError(self._failure)
        assert self._client is not None
        return self._client

    async def close(self) -> None:
        """End it. Idempotent."""
        self._fail(f"{self._what} is closed")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        if self._client is not None:
            await self._client.stop()

    async def _live(self) -> None:
        """A new life, up to its first readiness."""
        self.has_served, self.holds, self.released = False, None, set()
        client = self._client = self._make()
        try:
            async with self.lock:
                await client.start(self._timeout_s)
                if client.takes is not None:
                    self.seats.resize(client.takes)
                self.holds = await self._take_weights(client)
        except BaseException:
            await client.stop()
            raise
        self._ready.set()

    async def _take_weights(self, client: Client) -> WeightUpdate | None:
        """Those of the last update; while the policy changes, those of the next one."""
        while True:
            if self._settled is not None and self.sender.current is not None:
                await self._settled.wait()
            async with self.reading:
                if self._settled is None or self._settled.is_set() or self.sender.current is None:
                    return await self.sender.refresh(client)

    async def _supervise(self, reason: str | None = None) -> None:
        try:
            await self._watch(reason)
        except Exception as error:
            log.exception("watching %s failed", self._what)
            self._fail(f"{self._what} could not be started anew: {error!r}")

    async def _watch(self, reason: str | None) -> None:
        """`reason` = why no life has begun yet; None = it lives."""
        deaths, lived = 0, reason is None
        while self._failure is None:
            if reason is None:
                assert self._client is not None
                reason = await self._client.wait_gone()
                self._ready.clear()
                await self._client.stop()
                log.warning("%s lost, starting it anew: %s", self._what.removeprefix("the "), reason)
            # A life that finished a request was no failed start: an engine that dies once an hour is not given up.
            deaths = 1 if self.has_served else deaths + 1
            while not self._ready.is_set():
                if self.is_ours and deaths >= _MAX_DEATHS_IN_A_ROW:
                    reason = f"{self._what} ended {deaths} times without finishing a request; last: {reason}"
                    log.error("%s is given up: %s", self.name, reason)
                    self._fail(reason)
                    return
                if self._may_start is not None:
                    # It would take its whole share of the memory that training has now.
                    await self._may_start.wait()
                try:
                    await self._live()
                    self.num_restarts += lived
                except VerlMTError as error:
                    deaths, reason = deaths + 1, str(error)
                    if isinstance(error, EngineError) and not isinstance(error, EngineGoneError):
                        log.warning(
                            "%s: the current weights could not be sent: %s", self._what.removeprefix("the "), error
                        )
                    await asyncio.sleep(_RETRY_S)
            reason, lived = None, True

    def _look(self) -> None:
        """Notice a dead engine before a caller gets it. The supervisor may not have run yet."""
        if self._client is not None and self._client.is_gone and self._failure is None:
            self._ready.clear()

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self._ready.set()
