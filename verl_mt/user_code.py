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
        self._target, self._base, self._name = target, base, name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

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
        loop = self._running_loop()
        carrier = _carry(function, args, kwargs, contextvars.copy_context())
        future = asyncio.run_coroutine_threadsafe(carrier, loop)
        try:
            return (await _with_deadline(asyncio.wrap_future(future), timeout_s)).unwrap()
        except CallTimeout:
            await self._replace_if_blocked(loop)
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # After a fork the thread object is there but not alive.
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=self._name)
                self._thread.start()
            return self._loop

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            return
        beat = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        with contextlib.suppress(CallTimeout):
            await _with_deadline(asyncio.wrap_future(beat), _GRACE_S)
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
    except TimeoutError as error:
        if scope.expired():
            raise CallTimeout(f"timed out after {timeout_s:g} s") from error
        raise


async def _in_thread(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> _Outcome:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Outcome] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(outcome: _Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    def work() -> None:
        try:
            outcome = _Outcome(value=context.run(function, *args, **kwargs))
        except BaseException as error:
            outcome = _Outcome(error=_as_exception(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=work, daemon=True, name=name).start()
    return await future


async def _carry(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: contextvars.Context
) -> _Outcome:
    return await asyncio.get_running_loop().create_task(_run(function, args, kwargs), context=context)


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
