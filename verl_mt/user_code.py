"""Calling the code of plug-in authors, so that it can neither block nor outlive what waits for it.

Async methods of one plug-in object run on one event loop in a daemon thread of its own: a tool that blocks inside
`async def` (the usual mistake) holds up only itself, and what it binds to a loop (an HTTP client, a lock) stays valid
however often the caller starts a new loop. Sync methods run in daemon threads, which never keep a process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_GRACE_S = 0.5
"""A loop that does not answer for so long, after a deadline fired on it, is blocked."""


class CallTimeout(Exception):
    """The deadline of a call fired. (A `TimeoutError` that the user's own code raised stays a `TimeoutError`.)"""


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: Exception | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class UserCode:
    """Calls methods of one plug-in object.

    Methods that the object inherits unchanged from `base`, and all methods of an object with `runs_inline = True`,
    run on the caller's loop without a thread: they are known not to block.

    Args:
        target: the plug-in object.
        base: the base class of its kind (BaseTool, BaseInteraction).
        name: for thread names and the log.
    """

    def __init__(self, target: object, base: type, name: str):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._target, self._base, self._name = target, base, name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Threads and loops stay in their process; a copy starts its own.
        return {**self.__dict__, "_lock": None, "_loop": None, "_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __del__(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout_s: float) -> Any:
        """`target.method(*args, **kwargs)`, awaited where it is awaitable.

        Raises:
            CallTimeout: after `timeout_s` seconds. Async code is cancelled; a thread cannot be, it is left behind.
            Exception: what the method raised (a SystemExit or KeyboardInterrupt comes back as RuntimeError).
        """
        function = getattr(self._target, method)
        if self._inline(method):
            return (await _with_deadline(_run(function, args, kwargs), timeout_s)).unwrap()
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            return await self._on_loop(function, args, kwargs, timeout_s)
        outcome = await _with_deadline(_in_thread(function, args, kwargs, self._name), timeout_s)
        value = outcome.unwrap()
        if inspect.isawaitable(value):
            return await self._on_loop(lambda: value, (), {}, timeout_s)
        return value

    def _inline(self, method: str) -> bool:
        own, inherited = getattr(type(self._target), method, None), getattr(self._base, method, None)
        return own is inherited or bool(getattr(self._target, "runs_inline", False))

    async def _on_loop(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        there, reply = self._running_loop(), _Reply()
        context, task = contextvars.copy_context(), None

        def start() -> None:
            nonlocal task
            if not reply.future.done():
                task = there.create_task(_run(function, args, kwargs), context=context)
                task.add_done_callback(lambda done: None if done.cancelled() else reply.send(done.result()))

        there.call_soon_threadsafe(start)
        try:
            return (await _with_deadline(reply.future, timeout_s)).unwrap()
        except CallTimeout:
            await self._replace_if_blocked(there)
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # that loop was replaced and is closed
                there.call_soon_threadsafe(lambda: task.cancel() if task is not None else None)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # After a fork the thread object is there but not alive.
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), daemon=True, name=self._name)
                self._thread.start()
            return self._loop

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        beat = _Reply()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(beat.send, _Outcome())
        with contextlib.suppress(CallTimeout):
            await _with_deadline(beat.future, _GRACE_S)
            return
        with self._lock:
            if loop is not self._loop:
                return
            self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        logger.warning(
            "%s blocks its event loop inside async code; later calls get a new one. "
            "Write the method as a plain `def` (it then runs in a thread), or await asyncio.to_thread(...).",
            self._name,
        )


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
            reply.send(_Outcome(value=context.run(function, *args, **kwargs)))
        except BaseException as error:
            reply.send(_Outcome(error=_as_exception(error)))

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
        return _Outcome(error=RuntimeError("raised KeyboardInterrupt"))
    except BaseException as error:
        return _Outcome(error=_as_exception(error))


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"raised {type(error).__name__}" + (f": {error}" if str(error) else ""))
    wrapped.__cause__ = error
    return wrapped
