"""Around any engine: `LockStepEngine`, one batch of turns after the other; `WholeTurnsEngine`, whose turns are by one
version of the weights each, and `OneVersionEngine`, whose conversations are.

In lock step (`rollout.mode=sync`) nobody's next turn begins before everybody's turn is done and every tool has
answered. It is slower than sampling as soon as something is asked for (the default) and gives the same trajectories;
what waits is easier to watch.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.engines.base import InferenceEngine, PauseMode, WeightUpdate
from verl_mt.errors import WeightsReplacedError


class _Around(InferenceEngine):
    """Passes everything on.

    Args:
        engine: samples. Whatever a subclass does not do itself is its own; rollout workers ask it through this process.
    """

    def __init__(self, engine: InferenceEngine):
        self.engine = engine
        self.capabilities = engine.capabilities

    @property
    def version(self) -> int:
        return self.engine.version

    async def start(self) -> None:
        await self.engine.start()

    async def start_without_weights(self) -> bool:
        return await self.engine.start_without_weights()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        return await self.engine.generate(request)

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def pause(self, mode: PauseMode = "in_place") -> None:
        await self.engine.pause(mode)

    async def resume(self) -> None:
        await self.engine.resume()

    async def apply(self, update: WeightUpdate) -> None:
        await self.engine.apply(update)

    async def hold_updates(self) -> None:
        await self.engine.hold_updates()

    async def expect(self, update: WeightUpdate) -> None:
        await self.engine.expect(update)

    async def release_memory(self) -> None:
        await self.engine.release_memory()

    async def resume_memory(self) -> None:
        await self.engine.resume_memory()

    def open_session(self, session_id: str, order: int) -> None:
        self.engine.open_session(session_id, order)

    def close_session(self, session_id: str) -> None:
        self.engine.close_session(session_id)

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    async def close(self) -> None:
        await self.engine.close()

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)


class LockStepEngine(_Around):
    """Holds requests back until every open session waits for one; then all are sampled together."""

    def __init__(self, engine: InferenceEngine):
        super().__init__(engine)
        self.capabilities = replace(engine.capabilities, lock_step=True)
        self._open: set[str] = set()
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[GenerationOutput]]] = []
        self._batch: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        place = (request, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._begin_if_complete()
        try:
            return await place[1]
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def open_session(self, session_id: str, order: int) -> None:
        self._open.add(session_id)
        super().open_session(session_id, order)

    def close_session(self, session_id: str) -> None:
        self._open.discard(session_id)
        super().close_session(session_id)
        self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        # A closed session leaves `_open`, so that the last one to end does not hold back those that wait.
        waiting = {request.session_id for request, _ in self._waiting}
        if self._batch is None and waiting and waiting >= self._open:
            self._batch = asyncio.get_running_loop().create_task(self._sample_all())

    async def _sample_all(self) -> None:
        batch, self._waiting = self._waiting, []
        try:
            outputs = await asyncio.gather(*(self.engine.generate(r) for r, _ in batch), return_exceptions=True)
            for (_, future), output in zip(batch, outputs):
                if future.done():
                    continue
                if isinstance(output, BaseException):
                    future.set_exception(output)
                else:
                    future.set_result(output)
        finally:
            for _, future in batch:
                future.cancel()
            self._batch = None
            self._begin_if_complete()


class WholeTurnsEngine(_Around):
    """New weights wait for the turns that are being sampled, and turns that are asked for meanwhile for the weights
    (`rollout.on_update=finish_turn`): each turn is by one version. The longest turn delays the update."""

    def __init__(self, engine: InferenceEngine):
        super().__init__(engine)
        self._sampling = 0
        self._changed = asyncio.Condition()
        self._updates = 0

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updates)
            self._sampling += 1
        try:
            return await self.engine.generate(request)
        finally:
            await asyncio.shield(self._count(sampling=-1))

    async def apply(self, update: WeightUpdate) -> None:
        await self._count(updates=1)
        try:
            await self.engine.expect(update)
            async with self._changed:
                await self._changed.wait_for(lambda: not self._sampling)
            await self.engine.apply(update)
        finally:
            await self._count(updates=-1)

    async def _count(self, *, sampling: int = 0, updates: int = 0) -> None:
        async with self._changed:
            self._sampling += sampling
            self._updates += updates
            self._changed.notify_all()


class OneVersionEngine(WholeTurnsEngine):
    """New weights end the turns that are being sampled, and every conversation that has sampled begins again when it
    asks for its next one (`rollout.on_update=restart`): each is by one version."""

    def __init__(self, engine: InferenceEngine):
        super().__init__(engine)
        self._number = 0
        self._begun: dict[str, dict[str, int]] = {}
        """Session -> each attempt at its conversation -> number of the update before its first turn."""
        self._turns: set[asyncio.Future[GenerationOutput]] = set()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        attempt = request.request_id.rpartition("/")[0]
        begun = self._begun.setdefault(request.session_id, {}).setdefault(attempt, self._number)
        if begun == self._number:
            turn = asyncio.ensure_future(super().generate(request))
            self._turns.add(turn)
            try:
                return await turn
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if begun == self._number or (task is not None and task.cancelling()):
                    raise
            finally:
                self._turns.discard(turn)
        raise WeightsReplacedError(f"update {self._number} came while {request.session_id} was sampled")

    async def apply(self, update: WeightUpdate) -> None:
        self._number += 1
        for turn in list(self._turns):
            turn.cancel()
        await super().apply(update)

    def close_session(self, session_id: str) -> None:
        self._begun.pop(session_id, None)
        super().close_session(session_id)
