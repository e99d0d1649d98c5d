"""`AbsentEngine`: what stands in an engine's place where saved rollouts are trained on."""

from __future__ import annotations

from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.engines.base import Capabilities, InferenceEngine, PauseMode, WeightUpdate
from verl_mt.errors import EngineError


class AbsentEngine(InferenceEngine):
    """Takes weights and samples nothing."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            transports=frozenset({"in_place"}),
            deterministic=True,
            overlaps_training=True,
            media=frozenset({"images", "videos"}),
        )
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        raise EngineError(
            f"{request.request_id}: there is no engine, trainer.debug_mode=train_only trains on saved rollouts"
        )

    async def abort(self, request_id: str) -> None:
        """There are no requests."""

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Nothing is sampled anyway."""

    async def resume(self) -> None:
        """Nothing is sampled anyway."""

    async def apply(self, update: WeightUpdate) -> None:
        self._version = update.version

    async def close(self) -> None:
        """There is nothing to end."""
