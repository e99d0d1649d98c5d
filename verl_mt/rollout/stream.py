"""Plans that run beside the trainer: `RolloutStream` starts them in a thread of its own and hands over their groups."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.rollout.runner import RolloutPlan, RolloutProgress, RolloutRunner

T = TypeVar("T")


class RollsOut(Protocol):
    """What drives the conversations of plans: the runner in this process, or rollout workers."""

    progress: RolloutProgress

    def run(self, plan: RolloutPlan) -> AsyncIterator[TrajectoryGroup]:
        """See `RolloutRunner.run`."""


class Pool(RollsOut, Protocol):
    """Rollout workers (`verl_mt/rollout_workers`)."""

    def metrics(self) -> dict[str, float]:
        """What was lost with workers."""

    async def close(self) -> None:
        """End them."""


class RolloutStream:
    """Starts plans and hands over their groups.

    Plans may be started ahead of the one that is collected. A trainer that starts a plan and collects it before the
    weights change is synchronous.
    """

    def __init__(self, runner: RolloutRunner):
        self.runner = runner
        self.pool: Pool | None = None
        """Workers that drive the conversations in the runner's place."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._running: dict[str, tuple[Future[None], queue.Queue[TrajectoryGroup | None], int]] = {}

    @property
    def progress(self) -> RolloutProgress:
        """Of the rollout in flight."""
        return (self.pool or self.runner).progress

    def metrics(self) -> dict[str, float]:
        """What was lost with rollout workers; nothing where there are none."""
        return {} if self.pool is None else self.pool.metrics()

    def call(self, coroutine: Coroutine[Any, Any, T], while_waiting: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine on the rollout's loop and wait for it (weight updates, closing).

        `while_waiting` is called a few times a second; what it raises cancels the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return self._wait(future, while_waiting)
        except BaseException:
            future.cancel()
            raise

    def start(self, plan: RolloutPlan) -> None:
        """Begin to roll out a plan; returns at once."""
        groups: queue.Queue[TrajectoryGroup | None] = queue.Queue()
        future = asyncio.run_coroutine_threadsafe(self._produce(plan, groups), self._loop)
        self._running[plan.name] = (future, groups, len(plan.prompts))

    def started(self, name: str) -> bool:
        """Whether a plan of that name is running or waits to be collected."""
        return name in self._running

    def collect(
        self,
        name: str,
        while_waiting: Callable[[], None] = lambda: None,
        on_group: Callable[[TrajectoryGroup], None] = lambda group: None,
    ) -> list[TrajectoryGroup]:
        """All groups of a plan, in the order of its prompts. Raises what the rollout raised.

        `while_waiting` is called a few times a second (a display, a check for Ctrl-C), `on_group` with each group when
        it is finished; what they raise cancels the plan.
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
                on_group(group)
                collected.append(group)
        except BaseException:
            future.cancel()
            raise
        self._wait(future)
        # Groups arrive as they finish, which a clock decides; batches may not depend on one.
        return sorted(collected, key=lambda g: g.prompt_id)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what runs, close the tools, run `last` (the engine's `close`) and end the thread. Idempotent."""
        for future, _, _ in self._running.values():
            future.cancel()
        self._running.clear()
        if not self._thread.is_alive():
            return
        try:
            self.call(_drain())
            if self.pool is not None:
                self.call(self.pool.close())
            if self.runner.tools is not None:
                self.call(self.runner.tools.close())
        finally:
            self._end(last)

    def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """The thread ends whatever is raised: what it asks of (Ray, for one) is taken down next."""
        try:
            if last is not None:
                self.call(last())
            self.call(_drain())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _produce(self, plan: RolloutPlan, groups: queue.Queue[TrajectoryGroup | None]) -> None:
        try:
            async for group in (self.pool or self.runner).run(plan):
                groups.put(group)
        finally:
            groups.put(None)

    @staticmethod
    def _wait(future: Future[T], while_waiting: Callable[[], None] = lambda: None) -> T:
        while True:
            while_waiting()
            try:
                return future.result(timeout=0.2)  # short, so that a signal is handled between two waits
            except TimeoutError:
                if future.done():  # the coroutine's own, not that of the wait
                    raise


async def _drain() -> None:
    """Let cancelled tasks run their `finally` blocks."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
