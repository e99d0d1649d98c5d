"""How long the event loop of the conversations is held: `rollout/event_loop_lag_p99_ms`.

A task sleeps and measures how late it wakes up. While the loop is held, no answer of an engine is taken and no tool's
result is read. This time counts as decoding or tool time in the rollout rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from verl_mt.trainer.step_hook import HookParts, StepHook, TrainStep

METRIC = "rollout/event_loop_lag_p99_ms"
_EVERY_S = 0.05


class LoopLag:
    """Measures the loop on which `watch` runs.

    Args:
        busy: whether conversations run. Nothing is measured while none do.
    """

    def __init__(self, busy: Callable[[], Any]):
        self._busy = busy
        self._lags_s: list[float] = []

    async def watch(self) -> None:
        """Runs on the measured loop, until it is cancelled. Waits for its clock."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            if self._busy():
                late = max(0.0, loop.time() - due)
                # A loop that is held for a second keeps twenty wake-ups waiting, not one.
                # In place: `+=` would bring a list back that `take` has just handed out in another thread.
                self._lags_s.extend(late - k * _EVERY_S for k in range(int(late / _EVERY_S) + 1))

    def take(self) -> list[float]:
        """Seconds by which each wake-up since the last call was late. Runs in any thread and waits for nothing."""
        taken, self._lags_s = self._lags_s, []
        return taken


def p99_ms(lags_s: list[float]) -> float:
    """The 99th percentile of lags in seconds, in milliseconds."""
    return sorted(lags_s)[int(0.99 * (len(lags_s) - 1))] * 1000.0


class LoopLagHook(StepHook):
    """Adds the metric to each step whose conversations run in the trainer's process. Rollout workers measure their own
    loops (`RolloutPool.metrics`).

    Args:
        lag: of the rollout's loop.
    """

    def __init__(self, lag: LoopLag):
        self._lag = lag
        self._watching: asyncio.Future[None] | None = None

    @classmethod
    def of(cls, parts: HookParts) -> LoopLagHook | None:
        """None where rollout workers drive the conversations, or saved rollouts are read."""
        stream = parts.source.stream
        if stream.pool is not None or parts.config.trainer.debug_mode == "train_only":
            return None
        lag = LoopLag(lambda: stream.progress.num_plans)

        async def begin() -> None:
            """Runs on the rollout's loop and waits for nothing. The stream cancels the task when it closes."""
            hook._watching = asyncio.ensure_future(lag.watch())

        hook = cls(lag)
        stream.call(begin())
        return hook

    def after_update(self, step: TrainStep) -> None:
        if lags := self._lag.take():
            step.metrics[METRIC] = p99_ms(lags)
