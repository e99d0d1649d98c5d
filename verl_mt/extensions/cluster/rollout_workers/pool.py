"""The rollout workers of a run, as the trainer's process sees them: started, dealt groups, watched, ended.

`RolloutPool.run` stands where `RolloutRunner.run` does: the same plans, the same groups.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mt.chat.sanity import Finding
from verl_mt.data.requests import GenerationRequest
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.errors import WorkerError
from verl_mt.extensions.cluster.loop_lag import METRIC, p99_ms
from verl_mt.extensions.cluster.rollout_workers.dealer import MAX_LOST, Dealer, Job, cause_of
from verl_mt.extensions.cluster.rollout_workers.links import Link, WorkerGone
from verl_mt.extensions.cluster.rollout_workers.worker import WorkerSetup, sendable
from verl_mt.rollout.runner import RolloutPlan, RolloutProgress, RolloutRunner, failed_group

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_GOODBYE_S = 10.0


@dataclass(eq=False)
class _Running:
    """A plan on its way."""

    plan: RolloutPlan
    """Without its prompts."""
    arrived: asyncio.Queue[TrajectoryGroup | Exception] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class _Place:
    """One worker through all lives of its process."""

    setup: WorkerSetup
    link: Link | None = None
    """To its process, when that is ready."""
    pid: int | None = None
    """On its machine; None = it is away."""
    news: Any = None
    """What its engine heard last."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    asked: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Requests of its conversations that came to this process."""
    sessions: set[str] = field(default_factory=set)
    """The engine's, open for them."""


class RolloutPool:
    """Drives the conversations of plans in other processes.

    Args:
        runner: the trainer's own; its engine has the weights, and its sanity check's counts are the run's.
        setups: one per worker.
        connect: begins a worker's process.
        capacity: conversations that live at once in a worker; None = all that it is dealt.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        setups: Sequence[WorkerSetup],
        connect: Callable[[], Link],
        capacity: int | None = None,
    ):
        self.progress = RolloutProgress()
        self._engine, self._sanity = runner.context.engine, runner.context.sanity
        self._connect = connect
        self._places = [_Place(setup) for setup in setups]
        self._dealer = Dealer(capacity)
        self._plans: dict[str, _Running] = {}
        self._leaving: dict[tuple[int, str], asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: Exception | None = None
        self._was_broken = asyncio.Event()
        self._unready_deaths = self._failed_in_a_row = 0
        self._restarts = self._groups_restarted = 0
        self._lags_s: dict[int, list[float]] = {}
        """Number of a worker -> see `LoopLag.take`."""

    async def start(self) -> None:
        """Begin all workers, and wait until they are ready.

        Raises:
            VerlMTError: what one of them could not make.
        """
        for number in range(len(self._places)):
            self._in_background(self._keep(number))
        self._in_background(self._look())
        await self._unless_broken(asyncio.gather(*(place.ready.wait() for place in self._places)))

    async def run(self, plan: RolloutPlan) -> AsyncGenerator[TrajectoryGroup]:
        """See `RolloutRunner.run`.

        Raises:
            WorkerError: workers end with one group after the other.
        """
        self.progress.begin(len(plan.prompts) * plan.episodes_per_prompt)
        running = self._plans[plan.name] = _Running(replace(plan, prompts=(), positions=None))
        left = len(plan.prompts)
        try:
            if self._broken is not None:
                raise self._broken
            for place in self._places:
                self._begin(place, running)
            each = plan.episodes_per_prompt
            self._dealer.add(Job(plan.name, k, prompt, each) for k, prompt in plan.placed)
            self._deal()
            while left:
                arrived = await running.arrived.get()
                if isinstance(arrived, Exception):
                    raise arrived
                left -= 1
                yield arrived
        finally:
            del self._plans[plan.name]
            self._dealer.forget(plan.name)
            self.progress.end()
            await self._leave(plan.name, wait=left > 0)

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the workers, on their machines; None for one that is away."""
        return [place.pid for place in self._places]

    def metrics(self) -> dict[str, float]:
        """`rollout/worker_restarts`: workers lost and restarted since the run began; `rollout/groups_restarted`:
        unfinished groups that were lost with them and began again elsewhere; `rollout/event_loop_lag_p99_ms`: of the
        worker whose event loop was late the most, since the last call."""
        late = [p99_ms(lags) for lags in self._lags_s.values()]
        self._lags_s.clear()
        return {
            "rollout/worker_restarts": float(self._restarts),
            "rollout/groups_restarted": float(self._groups_restarted),
            **({METRIC: max(late)} if late else {}),
        }

    async def close(self) -> None:
        """End all workers. Idempotent."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What is said to workers

    def _begin(self, place: _Place, running: _Running) -> None:
        if place.link is not None:
            self._tell_news(place, self._engine.news())
            place.link.send(("begin", running.plan))

    def _deal(self) -> None:
        for number, job in self._dealer.deal():
            link, prompt = self._places[number].link, job.prompt
            assert link is not None
            link.send(("group", *job.key, replace(prompt, toolset=None), prompt.toolset is not None))

    async def _leave(self, plan: str, *, wait: bool) -> None:
        """Nobody waits for this plan's groups any more; what runs of them ends first."""
        over = []
        for number, place in enumerate(self._places):
            if place.link is not None:
                over.append(self._leaving.setdefault((number, plan), asyncio.Event()))
                place.link.send(("cancel", plan))
        if wait:
            await asyncio.gather(*(event.wait() for event in over))

    def _tell_news(self, place: _Place, news: Any) -> None:
        if place.link is not None and place.news != news:
            place.news = news
            place.link.send(("news", news))

    async def _look(self) -> None:
        """Engines come and go while workers sample."""
        while True:
            await asyncio.sleep(_LOOK_S)
            news = self._engine.news()
            for place in self._places:
                self._tell_news(place, news)

    # A worker's lives

    async def _keep(self, number: int) -> None:
        while True:
            place = self._places[number]
            link = self._connect()
            try:
                place.news = self._engine.news()
                link.send(("setup", place.setup, place.news))
                while True:
                    kind, *rest = await link.receive()
                    if kind == "ready":
                        place.link = link
                    getattr(self, f"_on_{kind}")(number, *rest)
            except WorkerGone as gone:
                reason = str(gone)
            finally:
                was_ready = self._lost(number)
                await link.end(0.0 if asyncio.current_task().cancelling() == 0 else _GOODBYE_S)  # type: ignore[union-attr]
            if self._broken is not None:
                return
            self._restarts += 1
            self._unready_deaths = 0 if was_ready else self._unready_deaths + 1
            log.warning("rollout worker %d is gone and restarts: %s", number, reason)
            if self._unready_deaths >= MAX_LOST:
                self._break(WorkerError(f"rollout workers end before they are ready, {MAX_LOST} of them: {reason}"))
                return

    def _lost(self, number: int) -> bool:
        """All that is to be undone when a worker's process is gone. Returns whether it had come to be ready."""
        place = self._places[number]
        was_ready, place.link, place.pid, place.news = place.link is not None, None, None, None
        for task in place.asked.values():
            task.cancel()
        for session in place.sessions:
            self._engine.close_session(session)
        place.sessions.clear()
        for key in [key for key in self._leaving if key[0] == number]:
            self._leaving.pop(key).set()
        again, failed = self._dealer.leave(number)
        self._groups_restarted += len(again)
        for job in failed:
            self._fail(job)
        self._deal()
        return was_ready

    def _fail(self, job: Job) -> None:
        """Its conversations failed. The run goes on, unless one group after the other does this."""
        cause = cause_of(job)
        log.warning("%s The group counts as failed", cause)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_LOST:
            self._break(WorkerError(f"{cause} {MAX_LOST} groups in a row failed like this"))
            return
        running = self._plans[job.plan]
        group = failed_group(running.plan, job.position, job.prompt, cause)
        self._count(group)
        running.arrived.put_nowait(group)

    def _break(self, error: Exception) -> None:
        """Nothing can be rolled out any more."""
        self._broken = self._broken or error
        self._was_broken.set()
        for running in self._plans.values():
            running.arrived.put_nowait(self._broken)

    async def _unless_broken(self, wanted: asyncio.Future[Any]) -> None:
        broken = asyncio.ensure_future(self._was_broken.wait())
        try:
            await asyncio.wait({wanted, broken}, return_when=asyncio.FIRST_COMPLETED)
            if self._broken is not None:
                raise self._broken
        finally:
            wanted.cancel()
            broken.cancel()
            # Looked at, so that Python does not tell the user of what was cancelled.
            await asyncio.gather(wanted, broken, return_exceptions=True)

    # What workers say

    def _on_ready(self, number: int, pid: int) -> None:
        place = self._places[number]
        place.pid = pid
        self._tell_news(place, self._engine.news())
        for running in self._plans.values():
            self._begin(place, running)
        self._dealer.join(number)
        place.ready.set()
        self._deal()

    def _on_failed(self, number: int, error: Exception) -> None:
        self._break(error)

    def _on_group(self, number: int, plan: str, position: int, packed: bytes, findings: list[Finding | None]) -> None:
        if self._dealer.finish(number, (plan, position)) is None:
            return
        group: TrajectoryGroup = pickle.loads(packed)
        self._failed_in_a_row = 0
        for finding in findings:
            self._sanity.observe(finding, plan)
        self._count(group)
        self._plans[plan].arrived.put_nowait(group)
        self._deal()

    def _on_error(self, number: int, plan: str, position: int, error: Exception) -> None:
        if self._dealer.finish(number, (plan, position)) is not None:
            self._plans[plan].arrived.put_nowait(error)

    def _on_cancelled(self, number: int, plan: str) -> None:
        if (event := self._leaving.pop((number, plan), None)) is not None:
            event.set()

    def _on_log(self, number: int, name: str, level: int, text: str) -> None:
        logging.getLogger(name).log(level, "rollout worker %d: %s", number, text)

    def _on_lag(self, number: int, lags_s: list[float]) -> None:
        self._lags_s.setdefault(number, []).extend(lags_s)

    def _on_said(self, number: int, word: Any) -> None:
        self._engine.hear(word)

    def _on_engine(self, number: int, method: str, session: str, *rest: Any) -> None:
        if method == "abort":
            self._in_background(self._engine.abort(session))
            return
        sessions = self._places[number].sessions
        (sessions.add if method == "open_session" else sessions.discard)(session)
        getattr(self._engine, method)(session, *rest)

    def _on_ask(self, number: int, request_number: int, request: GenerationRequest) -> None:
        place = self._places[number]
        task = self._in_background(self._answer(place, request_number, request))
        place.asked[request_number] = task
        task.add_done_callback(lambda done: place.asked.pop(request_number, None))

    def _on_drop(self, number: int, request_number: int) -> None:
        if (task := self._places[number].asked.get(request_number)) is not None:
            task.cancel()

    async def _answer(self, place: _Place, number: int, request: GenerationRequest) -> None:
        link, output, failure = place.link, None, None
        try:
            output = await self._engine.generate(request)
        except Exception as error:
            failure = sendable(error)
        if link is not None and link is place.link:
            link.send(("answer", number, output, failure))

    # Counts

    def _count(self, group: TrajectoryGroup) -> None:
        self.progress.num_finished += len(group.trajectories)
        for trajectory in group.trajectories:
            self.progress.num_sampled_tokens += trajectory.num_sampled_tokens
            self.progress.num_tool_calls += len(trajectory.tool_calls)

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(sendable(error))
