"""Calling a user's function: in a thread if it is synchronous, always with a deadline, never raising into the batch."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
import traceback
from collections.abc import Callable
from typing import Any

from verl_mt.rewards.contract import FailureKind


class CallFailed(Exception):
    """A call that raised or was late."""

    def __init__(self, kind: FailureKind, problem: str, traceback_text: str):
        super().__init__(problem)
        self.kind = kind
        self.problem = problem
        self.traceback_text = traceback_text


def is_async_callable(function: Any) -> bool:
    """True for `async def` functions and objects with an `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call_with_deadline(work: Callable[[], Any], *, is_async: bool, timeout_s: float) -> Any:
    """The result of `work()`.

    A synchronous call runs in a daemon thread of its own: Python cannot stop a thread, so one that hangs is left
    behind, where it neither takes another call's place nor keeps the process from ending.

    Args:
        work: a call with all its arguments bound.
        is_async: `work()` gives a coroutine and is called in the event loop.
        timeout_s: deadline in seconds from now.

    Raises:
        CallFailed: it raised or was late.
    """
    task = asyncio.ensure_future(_run(work, is_async))
    # A call that was given up may still raise; asyncio would complain that nobody looked.
    task.add_done_callback(lambda t: t.cancelled() or t.exception())
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise CallFailed("timeout", f"gave no result within {timeout_s:g} s (reward.timeout_s)", "")
    if task.cancelled():
        raise CallFailed("raised", "raised CancelledError", "")
    return task.result()


async def _run(work: Callable[[], Any], is_async: bool) -> Any:
    value = await _in_thread(work) if not is_async else None
    try:
        if is_async:
            value = work()
        return await value if inspect.isawaitable(value) else value
    except (Exception, SystemExit) as error:
        raise _failed(error) from error


async def _in_thread(work: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, CallFailed | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(value: Any, failure: CallFailed | None) -> None:
        if not outcome.done():
            outcome.set_result((value, failure))

    def run() -> None:
        value, failure = None, None
        try:
            value = context.run(work)
        except BaseException as error:
            failure = _failed(error)
        # The loop may be closed by the time a late call ends; then nobody waits for it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, value, failure)

    threading.Thread(target=run, daemon=True, name="verl_mt-reward").start()
    value, failure = await outcome
    if failure is not None:
        raise failure
    return value


def _failed(error: BaseException) -> CallFailed:
    if isinstance(error, CallFailed):
        return error
    return CallFailed("raised", f"raised {type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
