"""Calling the code of plug-in authors, so that it can neither block nor outlive its caller.

- A plain function runs in a daemon thread, which never keeps the process alive.
- Async methods of one plug-in object share one event loop in a daemon thread. A client or a lock that is bound to that
  loop stays valid, however often the caller starts a new loop.

Every call has a deadline. Its caller gets `CallTimeout` in time, whatever the code does. A call that blocks inside
`async def` (the usual mistake) stops the loop that it shares. When a deadline fires on such a loop, later calls get a
new one. Other calls on the blocked loop go on if it comes free before their deadlines. If not, they fail with
`LoopBlocked`, which names the blocking call. No call is moved or made twice, because it may have had effects.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from verl_mt.errors import error_text
from verl_mt.plugins import keep_default_dtype

logger = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_S = 0.5
"""Seconds without a new execution, after a call on it timed out, that make a loop blocked."""
_MAX_HANGING = 256
"""Threads of one name that may hang before no other is started."""
_HANGING: dict[str, list[threading.Thread]] = {}
"""Name -> threads whose callers stopped waiting."""


class CallTimeout(Exception):
    """A call did not end before its deadline. (A `TimeoutError` of the user's own code stays a `TimeoutError`.)"""


class LoopBlocked(CallTimeout):
    """The event loop of a late call was blocked, and not by the call's own task.

    It was blocked by another call of the same object, or by a task that a call has made.
    """


class NotAnException(RuntimeError):
    """Foreign code raised a `BaseException` (a SystemExit, a bare subclass); it is the `__cause__`."""


def is_async_callable(function: Any) -> bool:
    """True for `async def` functions and objects with an `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class UserCode:
    """Calls methods of one plug-in object.

    Methods that the object inherits unchanged from `base`, and all methods of an object with `runs_inline = True`,
    run on the caller's loop without a thread: they are known not to block.

    Args:
        target: the plug-in object.
        base: the base class of its kind (BaseTool, BaseInteraction).
        name: for thread names, errors and the log.
    """

    def __init__(self, target: object, base: type, name: str):
        self._target, self._base, self._name = target, base, name
        self._lock = threading.Lock()
        self._loop_thread: _LoopThread | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Threads and loops stay in their process; a copy starts its own.
        return {**self.__dict__, "_lock": None, "_loop_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __del__(self) -> None:
        if (loop_thread := self.__dict__.get("_loop_thread")) is not None:
            loop_thread.retire()

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout_s: float) -> Any:
        """`target.method(*args, **kwargs)`, awaited where it is awaitable.

        Runs on the caller's loop. Waits for a thread or for the object's loop, at most `timeout_s`.

        Raises:
            CallTimeout: after `timeout_s` seconds. Async code is cancelled. A thread cannot be and is left behind.
            LoopBlocked: the same, because another call blocked the event loop.
            Exception: what the method raised (what is no Exception, such as SystemExit, comes as `NotAnException`).
        """
        function = getattr(self._target, method)
        inherited = getattr(type(self._target), method, None) is getattr(self._base, method, None)
        if inherited or getattr(self._target, "runs_inline", False):
            return (await _with_deadline(_run(function, args, kwargs), timeout_s)).unwrap()
        return await self.run(function, args, kwargs, timeout_s=timeout_s)

    async def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout_s: float,
        thread: OwnThread | None = None,
    ) -> Any:
        """`function(*args, **kwargs)`, awaited where it is awaitable, off the caller's loop. Raises as `call` does.

        Args:
            thread: where a plain function runs; None = in a thread of its own.
        """
        call = _Call(f"{getattr(function, '__name__', type(function).__name__)} of {self._name}")
        try:
            outcome = await _with_deadline(self._outcome(call, function, args, kwargs, thread), timeout_s)
        except CallTimeout as late:
            raise await _explained(late, call) from None
        finally:
            if call.loop_thread is not None:
                call.loop_thread.leave(call)
        return outcome.unwrap()

    async def _outcome(
        self,
        call: _Call,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        thread: OwnThread | None,
    ) -> _Outcome:
        """Runs on the caller's loop. Waits for the object's loop, or for a thread and then for what it returned."""
        if is_async_callable(function):
            return await self._on_loop(call, functools.partial(function, *args, **kwargs))
        outcome = await _in_thread(function, args, kwargs, self._name, thread)
        return await self._on_loop(call, lambda: outcome.value) if inspect.isawaitable(outcome.value) else outcome

    async def _on_loop(self, call: _Call, work: Callable[[], Any]) -> _Outcome:
        """Runs on the caller's loop. Waits for `work` on the object's loop."""
        with self._lock:
            thread = self._loop_thread
            # After a fork the thread object is there but not alive.
            if thread is None or not thread.is_alive() or thread.is_blocked():
                thread = self._loop_thread = _LoopThread(self._name)
            reply = thread.begin(call, work)
        try:
            return await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            call.given_up = True
            thread.wake()
            raise


@dataclass(eq=False)
class _Call:
    label: str
    loop_thread: _LoopThread | None = None
    task: asyncio.Task[Any] | None = None
    given_up: bool = False


class _LoopThread(threading.Thread):
    """An event loop in a daemon thread. It ends when it is retired and its last call is over."""

    def __init__(self, name: str):
        super().__init__(daemon=True, name=name)
        _check_hanging(name)
        self.loop = asyncio.new_event_loop()
        self.blocker: _Call | None = None
        """Set once it is blocked."""
        self.woken_s: float | None = None
        """When it was woken, until it looks."""
        self._calls: set[_Call] = set()
        self._retired, self._over = False, asyncio.Event()
        self.start()

    def run(self) -> None:
        """Runs in this thread. Waits for the end, then cancels what user code left on the loop."""
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._over.wait())

    def begin(self, call: _Call, work: Callable[[], Any]) -> concurrent.futures.Future[_Outcome]:
        """Runs on the caller's loop and waits for nothing. Cancelling the future cancels `work`."""
        call.loop_thread = self
        self._calls.add(call)
        return asyncio.run_coroutine_threadsafe(self._body(call, work), self.loop)

    async def _body(self, call: _Call, work: Callable[[], Any]) -> _Outcome:
        """Runs on this loop. Waits for the user's code, which does not begin once the caller has stopped waiting."""
        call.task = asyncio.current_task()
        try:
            return _Outcome() if call.given_up else await _run(work, (), {})
        except asyncio.CancelledError as error:  # the caller has given up, or the user's code cancelled this task
            return _Outcome(error=_as_exception(error))

    def leave(self, call: _Call) -> None:
        """Runs on the caller's loop, which waits for this call no more."""
        self._calls.discard(call)
        if self._retired:
            self.wake()

    def retire(self) -> None:
        """Runs in any thread. No call begins here any more."""
        self._retired = True
        self.wake()

    def wake(self) -> None:
        """Runs in any thread. Makes the loop look whether it is over, which it does at once unless it is blocked."""
        self.woken_s = self.woken_s or time.monotonic()
        try:
            self.loop.call_soon_threadsafe(self._look)
        except RuntimeError:  # it has ended
            self.woken_s = None

    def _look(self) -> None:
        """Runs on this loop and waits for nothing."""
        self.woken_s = None
        if self._retired and not self._calls:
            self._over.set()

    def is_blocked(self) -> bool:
        """Runs on the caller's loop and waits for nothing. A loop that has once been blocked is so for ever."""
        if self.blocker is None and time.monotonic() - (self.woken_s or math.inf) >= _GRACE_S:
            task = asyncio.current_task(self.loop)
            code = _Call(f"code of {self.name}")  # a callback, or a task that a call has made
            self.blocker = next((call for call in self._calls if task and call.task is task), code)
            logger.warning(
                "%s blocked its event loop. %d other calls share that loop and may fail. Write the method as a plain "
                "`def` (it then runs in a thread), or await asyncio.to_thread(...).",
                self.blocker.label, len(self._calls - {self.blocker}),
            )  # fmt: skip
            _HANGING.setdefault(self.name, []).append(self)
            self.retire()
        return self.blocker is not None


async def _explained(late: CallTimeout, call: _Call) -> CallTimeout:
    """Runs on the caller's loop, after a deadline. Waits until the call's loop has looked up, at most `_GRACE_S`."""
    thread = call.loop_thread
    while thread is not None and thread.woken_s is not None and not thread.is_blocked():
        await asyncio.sleep(_GRACE_S / 50)
    if thread is None or thread.blocker is None:
        return late
    kind = CallTimeout if thread.blocker is call else LoopBlocked
    return kind(f"{late}: {thread.blocker.label} blocked its event loop")


@dataclass(frozen=True)
class _Outcome:
    """What a call returned or raised, on its way to another thread."""

    value: Any = None
    error: Exception | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def user_code_of(target: Any, base: type, name: str) -> UserCode:
    """The one `UserCode` of a plug-in object, made at first use and kept on it."""
    code = target.__dict__.get("_user_code")
    if code is None:
        code = target.__dict__.setdefault("_user_code", UserCode(target, base, name))
    return code


_CLOSING = "closing"


def closing_task(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that frees what user code holds. `end_tasks` waits for it and does not cancel it. Runs on the caller's
    loop and waits for nothing."""
    return asyncio.create_task(coroutine, name=_CLOSING)


async def end_tasks(tasks: Callable[[], Iterable[asyncio.Future[Any]]]) -> None:
    """Cancel tasks and let them run their `finally` blocks. Runs on the tasks' loop. Waits until none is left.

    No task is cancelled twice: a second cancellation would break into its `finally`.

    Args:
        tasks: those that are there now; asked again until all of them are done.
    """
    while running := [task for task in tasks() if not task.done()]:
        for task in running:
            if isinstance(task, asyncio.Task) and not task.cancelling() and task.get_name() != _CLOSING:
                task.cancel()
        await asyncio.wait(running)
        for task in running:
            if not task.cancelled():
                task.exception()  # who gave up does not ask for it


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]] = WeakKeyDictionary()
"""Event loop -> who waits in `fair_turn`."""


async def fair_turn() -> None:
    """Return when it is the caller's turn: one caller per pass of its event loop, in the order in which they came.

    Thousands of conversations may have work at the same moment, such as tokenizing tool results. Without turns the
    loop would do all of it before it looks at sockets and clocks again. Runs on the caller's loop. Waits for callers
    that came earlier.
    """
    loop = asyncio.get_running_loop()
    queue = _QUEUES.setdefault(loop, deque())
    queue.append(turn := loop.create_future())
    if len(queue) == 1:
        loop.call_soon(_next_turn, loop, queue)
    await turn


def _next_turn(loop: asyncio.AbstractEventLoop, queue: deque[asyncio.Future[None]]) -> None:
    """Runs on the loop and waits for nothing. The first in the queue stays there until its work is done."""
    while queue and queue[0].done():
        queue.popleft()
    if queue:
        queue[0].set_result(None)
        loop.call_soon(_next_turn, loop, queue)


async def in_daemon_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a blocking function in a daemon thread: it neither blocks the loop nor keeps the process alive.

    Runs on the caller's loop. Waits for the thread.

    Raises:
        CallTimeout: too many earlier calls of functions of this name still run, though their callers have given up.
        Exception: what the function raised.
    """
    return (await _in_thread(function, args, kwargs, getattr(function, "__name__", "user code"))).unwrap()


async def _with_deadline(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Runs on the caller's loop. Waits for the coroutine, at most `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s) as scope:
            return await coroutine
    except TimeoutError:
        if scope.expired():
            raise CallTimeout(f"timed out after {timeout_s:g} s") from None
        raise


class OwnThread:
    """A daemon thread for the plain calls of one object, which run one after the other.

    What they open (a SQLite connection, a browser) stays in its thread. The thread starts with the first call.

    Args:
        name: of the thread, for the log.
    """

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def put(self, job: Callable[[], None]) -> None:
        """Run a job after the earlier ones. Runs on the caller's loop and waits for nothing.

        Raises:
            CallTimeout: the thread has not started yet, and too many of its name hang.
        """
        if not self.started:
            _check_hanging(self._thread.name)
            self._thread.start()
        self._jobs.put(job)

    def end(self, *, hangs: bool = False) -> None:
        """End the thread after the last job. Runs on the caller's loop and waits for nothing.

        Args:
            hangs: it may still run a job that its caller has given up.
        """
        self._jobs.put(None)
        if hangs:
            _HANGING.setdefault(self._thread.name, []).append(self._thread)

    def _run(self) -> None:
        """Runs in this thread. Waits for jobs."""
        while (job := self._jobs.get()) is not None:
            job()


async def _in_thread(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str, own: OwnThread | None = None
) -> _Outcome:
    """Runs on the caller's loop. Waits for a thread, which is left behind if the caller gives up."""
    if own is None:
        _check_hanging(name)
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    reply: asyncio.Future[_Outcome] = loop.create_future()

    def answer(outcome: _Outcome) -> None:
        """Runs on the caller's loop."""
        if not reply.done():
            reply.set_result(outcome)

    def work() -> None:
        """Runs in the thread. Waits for the user's code, which does not begin once the caller has stopped waiting."""
        if reply.cancelled():
            return
        try:
            outcome = _Outcome(value=context.run(function, *args, **kwargs))
        except BaseException as error:
            outcome = _Outcome(error=_as_exception(error))
        keep_default_dtype(function)
        with contextlib.suppress(RuntimeError):  # the caller's loop has ended
            loop.call_soon_threadsafe(answer, outcome)

    if own is not None:  # whoever ends it knows whether it hangs
        own.put(work)
        return await reply
    thread = threading.Thread(target=work, daemon=True, name=name)
    thread.start()
    try:
        return await reply
    except asyncio.CancelledError:
        _HANGING.setdefault(name, []).append(thread)
        raise


def _check_hanging(name: str) -> None:
    """Raise `CallTimeout` if `_MAX_HANGING` threads of this name hang: more could exhaust the machine."""
    if name in _HANGING:
        _HANGING[name] = [thread for thread in _HANGING[name] if thread.is_alive()]
        if (count := len(_HANGING[name])) >= _MAX_HANGING:
            raise CallTimeout(
                f"not started: {count} earlier calls of {name} passed their deadlines and still run. Set a timeout in "
                "its code"
            )


async def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome:
    """Runs on the caller's loop or on the object's. Waits for the user's code. Raises only a cancellation."""
    try:
        value = function(*args, **kwargs)
        return _Outcome(value=await value if inspect.isawaitable(value) else value)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _Outcome(error=_as_exception(error))
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            raise
        return _Outcome(error=NotAnException("raised KeyboardInterrupt"))
    except BaseException as error:
        return _Outcome(error=_as_exception(error))
    finally:
        keep_default_dtype(function)


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    wrapped = NotAnException(f"raised {error_text(error, named=True)}")
    wrapped.__cause__ = error
    return wrapped
