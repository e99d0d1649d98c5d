"""One rollout worker, in its own process: drives the conversations of the groups that it is dealt.

It makes its own tokenizer, tools, interactions and reward from the run's configuration. What it says and hears are
tuples, a word first; `pool.py` is at the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from verl_mt.bounds import MAX_PAGE_CHARACTERS, printable
from verl_mt.chat.sanity import Finding, SanityMonitor
from verl_mt.config.schema import Config
from verl_mt.data.columnar_rows import seal
from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.engines.base import Branch, Capabilities, InferenceEngine, PauseMode, WeightUpdate
from verl_mt.errors import DataError, EngineError, VerlMTError, WorkerError, error_text, traceback_text
from verl_mt.extensions.cluster.loop_lag import LoopLag
from verl_mt.plugins import import_plugins, load_object
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import Gate, RolloutPlan
from verl_mt.trainer.build_rollout import build_chat, build_runner, build_tools
from verl_mt.user_code import end_tasks
from verl_mt.workers.process import prepare_torch

Send = Callable[[tuple[Any, ...]], None]
"""Says something to the pool, from any thread; never waits."""
_GOODBYE_S = 10.0
_NO_LIMIT = sys.maxsize
_SWITCH_S = 0.001


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is made from. It is pickled."""

    config: Config
    """Of the run; limits of the whole run are this worker's share of them."""
    plugins: tuple[str, ...]
    """`external_plugins`, for a process with another working directory."""
    number: int
    capabilities: Capabilities
    """Of the trainer's engine."""
    branch: Branch | None
    """How to sample here; None = requests go to the trainer's process."""
    clock: tuple[str, float]
    """The trainer's `here()`."""
    count: int = 1
    """Of all workers."""


@dataclass(eq=False)
class _Run:
    """A plan, and what runs of it here."""

    plan: RolloutPlan
    groups: set[asyncio.Task[None]] = field(default_factory=set)


class Worker:
    """Hears what the pool says, on its event loop.

    Args:
        setup: what it is made from.
        news: of the trainer's engine.
        send: says something to the pool.

    Raises:
        VerlMTError: something of the configuration cannot be made here.
    """

    def __init__(self, setup: WorkerSetup, news: Any, send: Send):
        self._send = send
        config = setup.config
        _prepare_process(config, setup.number)
        import_plugins(setup.plugins)
        branch, self._asked = setup.branch, None
        if branch is None:
            engine = self._asked = AskedEngine(setup.capabilities, send)
        else:
            engine = load_object(branch.path, what="the engine of a rollout worker")(*branch.args, setup.number)
            engine.say = lambda word: send(("said", word))
            if hasattr(engine, "share"):
                engine.share(setup.count)
        engine.hear(news)
        self._tools = build_tools(config)
        self._runner = build_runner(config, build_chat(config), self._tools, None, engine)
        machine, epoch_s = here()
        self._shift_s = 0.0 if machine == setup.clock[0] else epoch_s - setup.clock[1]
        self._gate = Gate(self._runner.max_concurrent or _NO_LIMIT, 0)
        self._plans: dict[str, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lag = LoopLag(lambda: self._plans)

    async def start(self) -> None:
        """When it returns the worker can be dealt groups."""
        await self._runner.context.engine.start()
        self._in_background(self._lag.watch())
        # What libraries have made stays. Collections that look at all of it hold the event loop for a third of a second.
        gc.collect()
        gc.freeze()
        # Threads that pack groups and check conversations give the interpreter back to the loop this soon.
        sys.setswitchinterval(_SWITCH_S)

    def hear(self, message: tuple[Any, ...]) -> None:
        """One message of the pool's."""
        kind, *rest = message
        getattr(self, f"_hear_{kind}")(*rest)

    async def close(self) -> None:
        """Break off what runs, and close tools and engine."""
        await end_tasks(lambda: list(self._tasks))
        if self._runner.tools is not None:
            await self._runner.tools.close()
        await self._runner.context.engine.close()

    def _hear_begin(self, plan: RolloutPlan) -> None:
        self._plans[plan.name] = _Run(plan)

    def _hear_news(self, news: Any) -> None:
        self._runner.context.engine.hear(news)

    def _hear_answer(self, number: int, output: GenerationOutput | None, error: Exception | None) -> None:
        assert self._asked is not None
        self._asked.answer(number, output, error)

    def _hear_group(self, name: str, position: int, prompt: Prompt, shows_tools: bool) -> None:
        run = self._plans[name]
        run.groups.add(task := self._in_background(self._run(run, position, prompt, shows_tools)))
        task.add_done_callback(run.groups.discard)

    def _hear_cancel(self, name: str) -> None:
        run = self._plans.pop(name, None)
        groups = set() if run is None else set(run.groups)
        for task in groups:
            task.cancel()

        async def say_when_over() -> None:
            if groups:  # `gather` would cancel them a second time if it is cancelled itself
                await asyncio.wait(groups)
            self._send(("cancelled", name))

        self._in_background(say_when_over())

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _with_tools(self, prompt: Prompt) -> Prompt:
        """Tool objects are those of this process. What the row says of them was checked where it was drawn."""
        tools = self._tools
        if tools is not None and prompt.problem is None:
            tools = tools.of_row(prompt.row.extra_info, prompt.row.raw)
        return replace(prompt, toolset=tools)

    async def _run(self, run: _Run, position: int, prompt: Prompt, shows_tools: bool) -> None:
        """Roll a group out and send the result. Runs on the worker's loop. Waits for the group, then for a thread
        that packs it."""
        name = run.plan.name
        heard = _Findings(self._runner.context.sanity)
        runner = replace(self._runner, context=replace(self._runner.context, sanity=heard))
        try:
            prompt = self._with_tools(prompt) if shows_tools else prompt
            group = await runner.run_group(run.plan, position, prompt, self._gate)
            self._shift(group)
            packed = await asyncio.to_thread(_packed, group, run.plan.prompt_id(position))
        except Exception as error:
            self._send(("error", name, position, sendable(error)))
            return
        if lags_s := self._lag.take():
            self._send(("lag", lags_s))
        self._send(("group", name, position, packed, heard.findings))

    def _shift(self, group: TrajectoryGroup) -> None:
        """Times become those of the trainer's monotonic clock, which on its own machine is this one."""
        if shift := self._shift_s:
            for trajectory in group.trajectories:
                trajectory.time_spans = [
                    replace(s, start_s=s.start_s + shift, end_s=s.end_s + shift) for s in trajectory.time_spans
                ]


class _Findings(SanityMonitor):
    """A group's findings, which are counted in the trainer's process, when the group has arrived there."""

    def __init__(self, monitor: SanityMonitor):
        self.mode, self.thread = monitor.mode, monitor.thread
        self.findings: list[Finding | None] = []

    def observe(self, finding: Finding | None, plan: str = "") -> None:
        self.findings.append(finding)


class AskedEngine(InferenceEngine):
    """The trainer's engine, asked through the pool."""

    def __init__(self, capabilities: Capabilities, send: Send):
        self.capabilities = capabilities
        self._send, self._version = send, 0
        self._number = 0
        self._waiting: dict[int, asyncio.Future[GenerationOutput]] = {}

    @property
    def version(self) -> int:
        return self._version

    def hear(self, news: Any) -> None:
        self._version = news

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self._number += 1
        number = self._number
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(("ask", number, request))
        try:
            return await future
        finally:
            del self._waiting[number]
            if future.cancelled():
                self._send(("drop", number))

    def answer(self, number: int, output: GenerationOutput | None, error: Exception | None) -> None:
        """What the trainer's engine said to request `number`."""
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            assert output is not None
            future.set_result(output)

    async def abort(self, request_id: str) -> None:
        self._send(("engine", "abort", request_id))

    def open_session(self, session_id: str, order: int) -> None:
        self._send(("engine", "open_session", session_id, order))

    def close_session(self, session_id: str) -> None:
        self._send(("engine", "close_session", session_id))

    async def pause(self, mode: PauseMode = "in_place") -> None:
        raise EngineError("an engine is paused in the trainer's process, not in a rollout worker")

    async def resume(self) -> None:
        raise EngineError("an engine is resumed in the trainer's process, not in a rollout worker")

    async def apply(self, update: WeightUpdate) -> None:
        raise EngineError("weights go to an engine from the trainer's process, not from a rollout worker")

    async def close(self) -> None:
        for future in self._waiting.values():
            future.cancel()


def _prepare_process(config: Config, number: int) -> None:
    """One thread, separate seeds, no progress bars of libraries."""
    transformers_logging.disable_progress_bar()
    prepare_torch(threads=1, seed=config.trainer.seed + number, deterministic=False)


def _packed(group: TrajectoryGroup, name: str) -> bytes:
    """Raises:
    DataError: code of the user's put something into a trajectory that no other process can have.
    """
    for trajectory in group.trajectories:
        for record in trajectory.records:
            record.seal()
    group.sealed = seal(group.trajectories)
    try:
        return pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise DataError(
            f"group {name} cannot be sent from its rollout worker to the trainer: {error_text(error, named=True)}. Let "
            "schedulers, tools and generate functions attach plain data (numbers, texts, lists, dicts), or set "
            "actor_rollout_ref.rollout.num_workers=0"
        ) from error


def sendable(error: BaseException) -> Exception:
    """The error itself where it is one of verl_mt and can be pickled, else one that says what it was."""
    if isinstance(error, VerlMTError):
        with contextlib.suppress(Exception):
            return pickle.loads(pickle.dumps(error))
    return WorkerError(f"a rollout worker failed: {error_text(error, named=True)}\n{traceback_text(error)}")


class SaidLogs(logging.Handler):
    """What is logged here is said to the pool, which logs it where somebody reads it."""

    def __init__(self, send: Send):
        super().__init__(logging.WARNING)
        self._send_log = send

    def emit(self, record: logging.LogRecord) -> None:
        """Runs in any thread and waits for nothing."""
        self._send_log(("log", record.name, record.levelno, printable(record.getMessage(), MAX_PAGE_CHARACTERS)))

    @classmethod
    def instead(cls, send: Send) -> None:
        """From now on, of all that verl_mt logs in this process."""
        logger = logging.getLogger("verl_mt")
        logger.handlers, logger.propagate = [cls(send)], False


def here() -> tuple[str, float]:
    """(this boot of this machine, what its monotonic clock is to be added to for seconds since 1970)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else os.uname().nodename, time.time() - time.monotonic()


async def live(inbox: asyncio.Queue[tuple[Any, ...]], send: Send) -> None:
    """From the first message, the setup, to the last. Runs on the worker's loop. Waits for messages."""
    _, setup, news = await inbox.get()
    SaidLogs.instead(send)
    try:
        worker = Worker(setup, news, send)
        await worker.start()
    except Exception as error:
        send(("failed", sendable(error)))
        return
    send(("ready", os.getpid()))
    while (message := await inbox.get())[0] != "end":
        worker.hear(message)
    await worker.close()


def _reading(connection: Connection, tell: Callable[[tuple[Any, ...]], object]) -> None:
    """Runs in a thread of the worker. Waits for the trainer's messages, and hands them to the worker's loop. Ends the
    process when the trainer is gone."""
    try:
        while True:
            tell(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        tell(("end",))
    time.sleep(_GOODBYE_S)
    os._exit(1)


def _writing(connection: Connection, outbox: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
    """Runs in a thread of the worker. Waits for messages to the trainer, and until the socket takes them. Ends when the
    trainer is gone."""
    with contextlib.suppress(OSError):
        while (message := outbox.get()) is not None:
            try:
                frame = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                frame = pickle.dumps(("failed", sendable(error)))
            connection.send_bytes(frame)


async def _serve(number: int) -> None:
    """Runs on the worker's loop, until the trainer says `end`. Waits for the writing thread at last."""
    connection, loop = Connection(number), asyncio.get_running_loop()
    inbox: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    tell = lambda message: loop.call_soon_threadsafe(inbox.put_nowait, message)  # noqa: E731
    threading.Thread(target=_reading, args=(connection, tell), daemon=True).start()
    writer = threading.Thread(target=_writing, args=(connection, outbox), daemon=True)
    writer.start()
    await live(inbox, outbox.put)
    outbox.put(None)
    await asyncio.to_thread(writer.join)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
    sys.stdout.flush()
    # What is left are threads of user code that never came back: nobody waits for these.
    os._exit(0)
