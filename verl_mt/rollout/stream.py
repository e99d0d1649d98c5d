"""Plans that run beside the trainer: `RolloutStream` starts them in another thread and collects their groups."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.rollout.runner import RolloutPlan, RolloutProgress, RolloutRunner
from verl_mt.user_code import end_tasks

T = TypeVar("T")


class RollsOut(Protocol):
    """What drives the conversations of plans: the runner in this process, or rollout workers."""

    progress: RolloutProgress

    def run(self, plan: RolloutPlan) -> AsyncGenerator[TrajectoryGroup]:
        """See `RolloutRunner.run`."""


class Pool(RollsOut, Protocol):
    """Rollout workers (an extension)."""

    def metrics(self) -> dict[str, float]:
        """What was lost with workers."""

    async def close(self) -> None:
        """End them."""


Choice = Callable[[Sequence[TrajectoryGroup]], list[TrajectoryGroup] | None]
"""Of the groups that are finished and were not collected, in the order in which they finished: those that are wanted
now, or None as long as they are not there."""


@dataclass(eq=False)
class _Running:
    """A plan on its way."""

    plan: RolloutPlan
    open: set[str]
    """Ids of the prompts whose groups were not collected."""
    task: asyncio.Task[Any] | None = None
    """Of the rollout's loop, as soon as it has begun."""
    future: Future[None] = field(default_factory=Future)


class RolloutStream:
    """Starts plans and collects their groups.

    Methods run in the trainer's main thread. Coroutines run on the event loop of the thread `rollout`.

    Plans may be started ahead of the one that is collected. A trainer that starts a plan and collects it before the
    weights change is synchronous.
    """

    def __init__(self, runner: RolloutRunner):
        self.runner = runner
        self.keep: Callable[[RolloutPlan, TrajectoryGroup], object] | None = None
        """Called in a thread with each finished group of a plan, before it can be collected."""
        self.arrived: Callable[[TrajectoryGroup], object] = lambda group: None
        """Called by who collects with each group of any plan that has arrived meanwhile."""
        self.pool: Pool | None = None
        """Workers that drive the conversations in the runner's place."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._running: dict[str, _Running] = {}
        self._arrivals: queue.SimpleQueue[tuple[_Running, TrajectoryGroup]] = queue.SimpleQueue()
        self._finished: list[tuple[_Running, TrajectoryGroup]] = []

    @property
    def progress(self) -> RolloutProgress:
        """Of the rollout in flight."""
        return (self.pool or self.runner).progress

    def metrics(self) -> dict[str, float]:
        """What was lost with rollout workers; nothing where there are none."""
        return {} if self.pool is None else self.pool.metrics()

    def call(self, coroutine: Coroutine[Any, Any, T], while_waiting: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine on the rollout's loop and wait for it (weight updates, closing).

        Runs in the trainer's main thread. Waits for the coroutine.

        `while_waiting` is called a few times a second; what it raises cancels the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return self._wait(future, while_waiting)
        except BaseException:
            future.cancel()
            raise

    def start(self, plan: RolloutPlan, finished: Sequence[TrajectoryGroup] = ()) -> None:
        """Begin to roll out a plan; returns at once. Runs in the trainer's main thread and waits for nothing.

        Args:
            finished: groups of it that were rolled out before; only the others begin.
        """
        running = self._running[plan.name] = _Running(plan, set(plan.prompt_ids))
        self._finished += [(running, group) for group in finished]
        left = plan.only(running.open - {group.prompt_id for group in finished})
        running.future = asyncio.run_coroutine_threadsafe(self._produce(running, left), self._loop)

    def started(self, name: str) -> bool:
        """Whether a plan of that name is running or waits to be collected."""
        return name in self._running

    def stop(self) -> None:
        """Stop all plans whose groups were not collected. Runs in the trainer's main thread. Waits until the plans'
        tasks have ended."""
        given_up = list(self._running.values())
        for running in given_up:
            self._forget(running)
        self.call(_ended(given_up))

    def collect(self, name: str, while_waiting: Callable[[], None] = lambda: None) -> list[TrajectoryGroup]:
        """All groups of a plan, in the order of its prompts. Raises what the rollout raised.

        Runs in the trainer's main thread. Waits for groups from the rollout's loop.

        `while_waiting` is called a few times a second (a display, a check for Ctrl-C); what it raises cancels the plan.
        """
        running = self._running[name]

        def whole(finished: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup] | None:
            own = [group for group in finished if group.prompt_id in running.open]
            return own if len(own) == len(running.open) else None

        try:
            return self.collect_some(whole, while_waiting, of=(name,))
        except BaseException:
            self._forget(running)
            raise

    def collect_some(
        self, choose: Choice, while_waiting: Callable[[], None] = lambda: None, *, of: Sequence[str] | None = None
    ) -> list[TrajectoryGroup]:
        """The groups that `choose` takes, as soon as it takes some, in the order of their ids: that in which they
        arrive is a clock's, and batches may not depend on one.

        Runs in the trainer's main thread. Waits for groups from the rollout's loop.

        Args:
            choose: looks at what is finished of all plans.
            while_waiting: as for `collect`.
            of: the plans that are waited for, None = all: what their rollouts raised is raised.
        """
        while_waiting()
        while (chosen := choose([group for _, group in self._finished])) is None:
            self._take_arrivals()
            while_waiting()
            for name in self._running if of is None else of:
                if (future := self._running[name].future).done():
                    future.result()
        self._hand_over({group.prompt_id for group in chosen})
        return sorted(chosen, key=lambda group: group.prompt_id)

    def _take_arrivals(self) -> None:
        """Wait a moment for some, and take those that are there. Runs in the trainer's main thread."""
        try:
            arrived = [self._arrivals.get(timeout=0.1)]
            while not self._arrivals.empty():
                arrived.append(self._arrivals.get())
        except queue.Empty:
            return
        for running, group in arrived:
            if self._running.get(running.plan.name) is running:
                self._finished.append((running, group))
                self.arrived(group)

    def _hand_over(self, ids: set[str]) -> None:
        self._finished = [(running, group) for running, group in self._finished if group.prompt_id not in ids]
        for running in list(self._running.values()):
            running.open -= ids
            if not running.open:
                self._wait(running.future)
                del self._running[running.plan.name]

    def _forget(self, running: _Running) -> None:
        self._running.pop(running.plan.name, None)
        self._finished = [found for found in self._finished if found[0] is not running]
        running.future.cancel()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what runs, close the tools, run `last` (the engine's `close`) and end the thread. Idempotent. Runs in
        the trainer's main thread. Waits for the coroutines and for the thread `rollout`."""
        for running in list(self._running.values()):
            self._forget(running)
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
        """The thread ends whatever is raised: what it asks of (Ray, for one) is taken down next. Runs in the trainer's
        main thread. Waits for `last` and for the thread `rollout`."""
        try:
            if last is not None:
                self.call(last())
            self.call(_drain())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _produce(self, running: _Running, plan: RolloutPlan) -> None:
        """Runs on the rollout's loop. Waits for groups, and for `keep` in a thread."""
        running.task = asyncio.current_task()
        if not plan.prompts:
            return
        async with contextlib.aclosing((self.pool or self.runner).run(plan)) as groups:
            async for group in groups:
                if self.keep is not None:
                    await _uncut(asyncio.to_thread(self.keep, plan, group))
                self._arrivals.put((running, group))

    @staticmethod
    def _wait(future: Future[T], while_waiting: Callable[[], None] = lambda: None) -> T:
        """Runs in the trainer's main thread. Waits for a coroutine on the rollout's loop."""
        while True:
            while_waiting()
            try:
                return future.result(timeout=0.2)  # short, so that a signal is handled between two waits
            except TimeoutError:
                if future.done():  # the coroutine's own, not that of the wait
                    raise


async def _uncut(coroutine: Coroutine[Any, Any, T]) -> T:
    """To its end; who is cancelled meanwhile is so afterwards. Runs on the rollout's loop."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _ended(given_up: Sequence[_Running]) -> None:
    """Cancelled ones have run their `finally` blocks. On the rollout's loop, where whoever was about to begin has."""
    if tasks := [r.task for r in given_up if r.task is not None]:
        await asyncio.wait(tasks)  # `gather` would cancel them a second time if it is cancelled itself


async def _drain() -> None:
    """Cancel what still runs, and let it free what it holds. Runs on the rollout's loop."""
    own = asyncio.current_task()
    await end_tasks(lambda: [task for task in asyncio.all_tasks() if task is not own])
