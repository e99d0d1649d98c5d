"""Rollouts in the background: a thread with one event loop, and queues of finished groups for the trainer."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner

T = TypeVar("T")


class RolloutStream:
    """Starts plans and hands over their groups.

    Plans may be started ahead of the one that is collected; the trainer starts a plan and collects it before the
    weights change, which is synchronous training.
    """

    def __init__(self, runner: RolloutRunner):
        self.runner = runner
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._running: dict[str, tuple[Future[None], queue.Queue[TrajectoryGroup | None], int]] = {}

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the rollout's loop and wait for it (weight updates, closing)."""
        return self._wait(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def start(self, plan: RolloutPlan) -> None:
        """Begin to roll out a plan; returns at once."""
        groups: queue.Queue[TrajectoryGroup | None] = queue.Queue()
        future = asyncio.run_coroutine_threadsafe(self._produce(plan, groups), self._loop)
        self._running[plan.name] = (future, groups, len(plan.prompts))

    def started(self, name: str) -> bool:
        """Whether a plan of that name is running or waits to be collected."""
        return name in self._running

    def collect(self, name: str, while_waiting: Callable[[], None] = lambda: None) -> list[TrajectoryGroup]:
        """All groups of a plan, in the order of its prompts. Raises what the rollout raised.

        `while_waiting` is called a few times a second (a display, a check for Ctrl-C); what it raises cancels the plan.
        """
        future, groups, count = self._running.pop(name)
        collected: list[TrajectoryGroup] = []
        try:
            while len(collected) < count:
                while_waiting()
                try:
                    group = groups.get(timeout=0.1)
                except queue.Empty:
                    continue
                if group is None:
                    break
                collected.append(group)
        except BaseException:
            future.cancel()
            raise
        self._wait(future)
        return sorted(collected, key=lambda g: g.prompt_id)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what runs, close the tools, run `last` (the engine's `close`) and end the thread. Idempotent."""
        for future, _, _ in self._running.values():
            future.cancel()
        self._running.clear()
        if self._thread.is_alive():
            self._wait(asyncio.run_coroutine_threadsafe(_drain(), self._loop))
            if self.runner.tools is not None:
                self.call(self.runner.tools.close())
            if last is not None:
                self.call(last())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _produce(self, plan: RolloutPlan, groups: queue.Queue[TrajectoryGroup | None]) -> None:
        try:
            async for group in self.runner.run(plan):
                groups.put(group)
        finally:
            groups.put(None)

    @staticmethod
    def _wait(future: Future[T]) -> T:
        while True:
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                if future.done():
                    raise


async def _drain() -> None:
    """Let cancelled tasks run their `finally` blocks."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
