"""`LockStepEngine`: one batch of turns after the other, around any engine (`rollout.mode=sync`).

Nobody's next turn begins before everybody's turn is done and every tool has answered. It is slower than sampling as
soon as something is asked for (the default) and gives the same trajectories; what waits is easier to watch.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.engines.base import InferenceEngine, PauseMode, WeightUpdate


class LockStepEngine(InferenceEngine):
    """Holds requests back until every open session waits for one; then all are sampled together.

    Args:
        engine: samples. Whatever this class does not do itself is its own.
    """

    def __init__(self, engine: InferenceEngine):
        self.engine = engine
        self.capabilities = replace(engine.capabilities, lock_step=True)
        self._open: set[str] = set()
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[GenerationOutput]]] = []
        self._batch: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self.engine.version

    async def start(self) -> None:
        await self.engine.start()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        place = (request, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._begin_if_complete()
        try:
            return await place[1]
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

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

    async def release_memory(self) -> None:
        await self.engine.release_memory()

    async def resume_memory(self) -> None:
        await self.engine.resume_memory()

    def open_session(self, session_id: str, order: int) -> None:
        self._open.add(session_id)
        self.engine.open_session(session_id, order)

    def close_session(self, session_id: str) -> None:
        self._open.discard(session_id)
        self.engine.close_session(session_id)
        self._begin_if_complete()

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    async def close(self) -> None:
        await self.engine.close()

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)

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
