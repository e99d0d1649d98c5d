"""Calling the code of plug-in authors, so that it can neither block nor outlive what waits for it.

Async methods of one plug-in object share one event loop in a daemon thread of its own, so that what they bind to a loop
(an HTTP client, a lock) stays valid however often the caller starts a new loop. Sync methods run in daemon threads,
which never keep a process alive.

A call that blocks inside `async def` (the usual mistake) stops that shared loop. It fails alone, at its own deadline:

- a call that had not begun runs elsewhere, and its time counts from there;
- a call that was under way cannot be moved. It waits for the loop to come free (`_PATIENCE_S`), and then has its whole
  time again. It is never made twice, for it may have had effects; only where the caller says that calls may be repeated
  (rewards) is it made again;
- from then on every call of that object has a loop and a thread of its own.

A deadline counts the time in which the loop could serve the call: where it fires although the loop is free, what other
code, or a machine that stood still, took of the call's time is given back to it, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import math
import selectors
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_mt.errors import error_text
from verl_mt.plugins import keep_default_dtype

logger = logging.getLogger(__name__)

_GRACE_S = 0.5
"""A loop that does not answer for so long, after a deadline fired on it, is blocked."""
_BEGIN_S = 60.0
"""A call with a later deadline than this, or none, that has not begun by then asks whether its loop is blocked."""
_PATIENCE_S = 60.0
"""How long a call that is under way waits for a loop that others, one after the other, block past their deadlines."""


class CallTimeout(Exception):
    """The deadline of a call fired. (A `TimeoutError` that the user's own code raised stays a `TimeoutError`.)"""


class NotAnException(RuntimeError):
    """Foreign code raised a `BaseException` (a SystemExit, a bare subclass); it is the `__cause__`."""


@dataclass
class HeldUp:
    """Time that calls lost to other code; their deadlines do not count it, and no deadline of several calls should."""

    seconds: float = 0.0


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
        name: for thread names and the log.
        repeatable: a call may be made twice; one that another call holds up is made again.
    """

    def __init__(self, target: object, base: type, name: str, *, repeatable: bool = False):
        self._target, self._base, self._name, self._repeatable = target, base, name, repeatable
        self._lock = threading.Lock()
        self._loop_thread: _LoopThread | None = None
        self._blocks = False
        """A call has blocked the shared loop."""

    def __getstate__(self) -> dict[str, Any]:
        # Threads and loops stay in their process; a copy starts its own.
        return {**self.__dict__, "_lock": None, "_loop_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __del__(self) -> None:
        if (loop_thread := self.__dict__.get("_loop_thread")) is not None:
            loop_thread.retire()

    async def call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout_s: float,
        held_up: HeldUp | None = None,
    ) -> Any:
        """`target.method(*args, **kwargs)`, awaited where it is awaitable. `held_up` gets what it lost to others.

        Raises:
            CallTimeout: after `timeout_s` seconds. Async code is cancelled; a thread cannot be, it is left behind.
            Exception: what the method raised (what is no Exception, such as SystemExit, comes as `NotAnException`).
        """
        function = getattr(self._target, method)
        if self._inline(method):
            return (await _with_deadline(_run(function, args, kwargs), timeout_s)).unwrap()
        return await self.run(function, args, kwargs, timeout_s=timeout_s, held_up=held_up)

    async def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout_s: float,
        held_up: HeldUp | None = None,
    ) -> Any:
        """`function(*args, **kwargs)`, awaited where it is awaitable, off the caller's loop. Raises as `call` does."""
        if is_async_callable(function):
            work = functools.partial(function, *args, **kwargs)
            return await self._on_loop(work, timeout_s, held_up, repeatable=self._repeatable)
        outcome = await _with_deadline(_in_thread(function, args, kwargs, self._name), timeout_s)
        value = outcome.unwrap()
        if inspect.isawaitable(value):
            return await self._on_loop(lambda: value, timeout_s, held_up, repeatable=False)
        return value

    def _inline(self, method: str) -> bool:
        own, inherited = getattr(type(self._target), method, None), getattr(self._base, method, None)
        return own is inherited or bool(getattr(self._target, "runs_inline", False))

    async def _on_loop(
        self, work: Callable[[], Any], timeout_s: float, held_up: HeldUp | None, *, repeatable: bool
    ) -> Any:
        asked_s, late = time.monotonic(), CallTimeout(f"timed out after {timeout_s:g} s")
        call, given_back = self._begin(work), False
        try:
            while not await call.replies_within(timeout_s):
                # Asked before the beat, which needs half a second: by then the loop may execute somebody else.
                blocks = call.blocks(timeout_s)
                if await call.loop_thread.answers():
                    # The loop is free. Either the call has not begun because the machine is slow, and waits on; or it
                    # is late, by its own doing or because others had the loop. Time is given back once only, or a
                    # loop that is always a little busy would let a call go on for ever.
                    if call.is_late(timeout_s):
                        if blocks or given_back or not call.gets_back(timeout_s):
                            raise late
                        given_back = True
                    continue
                if not call.loop_thread.shared:
                    # A loop of its own: nobody else can hold it up, so it is the call that blocks.
                    if call.is_late(timeout_s):
                        raise late
                    continue
                # The shared loop is blocked. Whose fault that is decides what becomes of this call: looked at again,
                # for it may have begun, and begun to block, while the beat was waited for.
                self._replace(call.loop_thread)
                blocks = blocks or call.blocks(timeout_s)
                if call.withdraw() or (repeatable and not blocks):
                    call.end()
                    call = self._begin(work)
                elif blocks or not await call.comes_free(timeout_s):
                    raise late
            return call.reply.future.result().unwrap()
        finally:
            call.end()
            if held_up is not None:
                held_up.seconds += call.held_up_s(asked_s)

    def _begin(self, work: Callable[[], Any]) -> _Call:
        with self._lock:
            loop_thread = self._loop_thread
            # After a fork the thread object is there but not alive.
            if loop_thread is None or not loop_thread.thread.is_alive():
                loop_thread = _LoopThread(self._name, shared=not self._blocks)
                self._loop_thread = loop_thread if loop_thread.shared else None
            call = _Call(loop_thread, work)
        if not loop_thread.shared:
            loop_thread.retire()
        return call

    def _replace(self, loop_thread: _LoopThread) -> None:
        """That loop_thread is blocked: no call is to begin on it any more, or to share another one."""
        with self._lock:
            if loop_thread is not self._loop_thread:
                return
            self._loop_thread, self._blocks = None, True
        loop_thread.retire()
        logger.warning(
            "%s blocks its event loop inside async code; from now on each of its calls gets a loop of its own. "
            "Write the method as a plain `def` (it then runs in a thread), or await asyncio.to_thread(...).",
            self._name,
        )


_CALL: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("verl_mt_user_call", default=None)


class _LoopThread:
    """An event loop in a daemon thread. It ends when it is retired and its last call is over."""

    def __init__(self, name: str, *, shared: bool):
        self.shared, self.clock = shared, _LoopClock()
        self.loop = asyncio.SelectorEventLoop(self.clock)
        self.loop.set_task_factory(self._new_task)
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.ref[_Call]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._num_calls, self._retired = 0, False
        self.thread = threading.Thread(target=_serve, args=(self.loop,), daemon=True, name=name)
        self.thread.start()

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended: nobody waits any more
            self.loop.call_soon_threadsafe(callback, *args)

    def enter(self) -> None:
        with self._lock:
            self._num_calls += 1

    def leave(self) -> None:
        with self._lock:
            self._num_calls -= 1
        self._stop_if_over()

    def retire(self) -> None:
        self._retired = True
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        if self._retired and self._num_calls == 0:
            self.post(self.loop.stop)

    async def answers(self) -> bool:
        beat = _Reply()
        self.post(beat.send, _Outcome())
        await asyncio.wait({beat.future}, timeout=_GRACE_S)
        return beat.future.done()

    def running(self) -> _Call | None:
        """The call whose code the loop executes now, in whatever task that call has made.

        Asked from another thread, so it is what was so a moment ago; `_Call.blocks` therefore also asks for how long.
        """
        task = asyncio.current_task(self.loop)
        owner = None if task is None else self._owners.get(task)
        return None if owner is None else owner()

    # A call's code may make tasks of its own (gather, wait_for); each carries the call's context and so its name.
    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        if (call := _CALL.get()) is not None:
            self._owners[task] = weakref.ref(call)
        return task


class _Call:
    """One call on a loop_thread."""

    def __init__(self, loop_thread: _LoopThread, work: Callable[[], Any]):
        self.loop_thread, self.reply, self._work = loop_thread, _Reply(), work
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[_Outcome] | None = None
        self._lock = threading.Lock()
        self._begun_s: float | None = None
        self._lost_s = 0.0
        """What its loop had lost when it began."""
        self._patience_ends_s: float | None = None
        self._over = False
        loop_thread.enter()
        loop_thread.post(self._context.run, self._start)

    def _start(self) -> None:
        if not self._over:
            _CALL.set(self)
            self._task = self.loop_thread.loop.create_task(self._body())
            self._task.add_done_callback(lambda done: None if done.cancelled() else self.reply.send(done.result()))

    async def _body(self) -> _Outcome:
        # Under the lock that `withdraw` takes: a call begins, or is withdrawn and begins elsewhere, and never both.
        with self._lock:
            if self._over:
                return _Outcome()
            self._lost_s, self._begun_s = self.loop_thread.clock.lost_s(), time.monotonic()
        return await _run(self._work, (), {})

    async def replies_within(self, timeout_s: float) -> bool:
        """Wait for it until it is late; where it has not begun, until it should have."""
        await asyncio.wait({self.reply.future}, timeout=min(timeout_s, _BEGIN_S))
        while not self.reply.future.done() and self._begun_s is not None and not self.is_late(timeout_s):
            await asyncio.wait({self.reply.future}, timeout=self._begun_s + timeout_s - time.monotonic())
        return self.reply.future.done()

    def held_up_s(self, asked_s: float) -> float:
        """From when it was asked for until its time began."""
        return (time.monotonic() if self._begun_s is None else self._begun_s) - asked_s

    def is_late(self, timeout_s: float) -> bool:
        return self._begun_s is not None and time.monotonic() - self._begun_s >= timeout_s

    def gets_back(self, timeout_s: float) -> bool:
        """Count anew without the time that its loop has lost since it began; whether it is in time then."""
        if self._begun_s is not None:
            self._begun_s = min(self._begun_s + self.loop_thread.clock.lost_s() - self._lost_s, time.monotonic())
        return not self.is_late(timeout_s)

    def blocks(self, timeout_s: float) -> bool:
        """Whether it is late and its loop executes it, not just for a moment."""
        return (
            self.is_late(timeout_s)
            and self.loop_thread.running() is self
            and self.loop_thread.clock.busy_s() >= _GRACE_S / 2
        )

    async def comes_free(self, timeout_s: float) -> bool:
        """Wait for its loop to go on; its time begins anew. False where it is the next to block it for so long."""
        beat, ends = _Reply(), self._patience_ends_s or time.monotonic() + _PATIENCE_S
        self._patience_ends_s = ends
        since_s = None if self.is_late(timeout_s) else self._begun_s
        self.loop_thread.post(beat.send, _Outcome())
        while not beat.future.done() and time.monotonic() < ends:
            mine, looked_s = self.loop_thread.running() is self, time.monotonic()
            await asyncio.wait({beat.future}, timeout=min(_GRACE_S, timeout_s / 4))
            if mine and time.monotonic() - (since_s := since_s or looked_s) >= timeout_s:
                return False
        self._begun_s = time.monotonic()
        return beat.future.done()

    def withdraw(self) -> bool:
        """End it if it has not begun; whether that is so."""
        with self._lock:
            if self._begun_s is not None or self._over:
                return False
            self._over = True
        self.loop_thread.leave()
        return True

    def end(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            if self._over:
                return
            self._over = True
        if not self.reply.future.done():
            self.loop_thread.post(lambda: self._task.cancel() if self._task is not None else None)
        self.loop_thread.leave()


@dataclass(frozen=True)
class _Outcome:
    """What a call returned or raised, on its way to another thread."""

    value: Any = None
    error: Exception | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class _Reply:
    """A future of the loop that waits, answered from another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[_Outcome] = self._loop.create_future()

    def send(self, outcome: _Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: _Outcome) -> None:
        if not self.future.done():
            self.future.set_result(outcome)


class _LoopClock(selectors.DefaultSelector):
    """A loop's selector, which counts the time in which the loop served nobody who waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0.0, time.monotonic()
        """Lost seconds, and the time after which all time is lost again: the loop executes code or wakes too late."""

    def lost_s(self) -> float:
        lost_s, since = self._count
        return lost_s + max(0.0, time.monotonic() - since)

    def busy_s(self) -> float:
        """For how long the loop has executed code without a look at what else is due."""
        return max(0.0, time.monotonic() - self._count[1])

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._count = self.lost_s(), math.inf if timeout is None else time.monotonic() + max(timeout, 0.0)
        ready = super().select(timeout)
        self._count = self.lost_s(), time.monotonic()
        return ready


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel what is left on it."""
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


def user_code_of(target: Any, base: type, name: str) -> UserCode:
    """The one `UserCode` of a plug-in object, made at first use and kept on it."""
    code = target.__dict__.get("_user_code")
    if code is None:
        code = target.__dict__.setdefault("_user_code", UserCode(target, base, name))
    return code


async def in_daemon_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a blocking function in a daemon thread: it neither blocks the loop nor keeps the process alive.

    Raises:
        Exception: what the function raised.
    """
    return (await _in_thread(function, args, kwargs, getattr(function, "__name__", "user code"))).unwrap()


async def _with_deadline(awaitable: Any, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            raise CallTimeout(f"timed out after {timeout_s:g} s") from None
        raise


async def _in_thread(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> _Outcome:
    reply, context = _Reply(), contextvars.copy_context()

    def work() -> None:
        try:
            outcome = _Outcome(value=context.run(function, *args, **kwargs))
        except BaseException as error:
            outcome = _Outcome(error=_as_exception(error))
        keep_default_dtype(function)
        reply.send(outcome)

    threading.Thread(target=work, daemon=True, name=name).start()
    return await reply.future


async def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome:
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
