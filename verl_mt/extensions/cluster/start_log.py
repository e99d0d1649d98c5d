"""A line for each phase of a start: what a person sees before the first step.

The lines are records of the logger `verl_mt.start`, level INFO. The command `verl-mt train` prints them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from verl_mt.bounds import MAX_PAGE_CHARACTERS, printable
from verl_mt.config.schema import Config

start_log = logging.getLogger("verl_mt.start")
_EVERY_S = 30.0
"""A phase that takes longer says so again and again."""


class _Line(logging.Formatter):
    """A record as a terminal may get it."""

    def format(self, record: logging.LogRecord) -> str:
        return f"verl_mt: {printable(record.getMessage(), MAX_PAGE_CHARACTERS)}"


class _Terminal(logging.StreamHandler[TextIO]):
    """Says again and again that the first phase is not over, until the next line comes."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Line())
        self.first_is_over = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        if not hasattr(record, "again"):
            self.first_is_over.set()
        super().emit(record)


def show(config: Config) -> None:
    """Print the lines of a run that starts engines or ranks in other processes, the first one now. Runs in the
    trainer's main thread, before anything slow is imported."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    here = trainer.placement == "inline" and rollout.name in ("local", "scripted")
    if here or trainer.dry_run or "console" not in trainer.logger:
        return
    start_log.setLevel(logging.INFO)
    start_log.propagate = False
    terminal = _Terminal()
    start_log.handlers[:] = [terminal]
    start_log.info("starting with rollout.name=%s, trainer.placement=%s", rollout.name, trainer.placement)
    terminal.first_is_over.clear()
    _repeat("reading configuration, rows and model", terminal.first_is_over)


class _Starts(Protocol):
    """A replica."""

    async def start(self) -> None: ...


@contextmanager
def phase(doing: str) -> Iterator[None]:
    """Say what begins, and every `_EVERY_S` that it is not over. Runs in the trainer's main thread; a thread says the
    latter."""
    start_log.info("%s", doing)
    over = threading.Event()
    thread = _repeat(doing, over)
    try:
        yield
    finally:
        over.set()
        thread.join()


def _repeat(doing: str, over: threading.Event) -> threading.Thread:
    """Say every `_EVERY_S` that it is not over. Runs on the caller's thread and starts one. Waits for nothing."""
    begun = time.monotonic()

    def repeat() -> None:
        """Runs in a thread. Waits for the end of the phase."""
        while not over.wait(_EVERY_S):
            text = f"{doing}: not done after {time.monotonic() - begun:.0f} s"
            start_log.info("%s", text, extra={"again": True})

    thread = threading.Thread(target=repeat, name="start lines", daemon=True)
    thread.start()
    return thread


async def start_all(replicas: Sequence[_Starts], kind: str) -> list[BaseException | None]:
    """Start all of them at once, and say of each when it is ready. Returns the error of each that failed. Runs on the
    rollout's loop. Waits for all of them.

    Args:
        replicas: of one engine.
        kind: of the engine, for the lines.
    """
    begun, total, ready = time.monotonic(), len(replicas), 0
    start_log.info("starting %s: %d engine%s", kind, total, "s" if total > 1 else "")

    def tell() -> None:
        start_log.info("%s: %d of %d engines ready after %.0f s", kind, ready, total, time.monotonic() - begun)

    async def started(replica: _Starts) -> None:
        nonlocal ready
        await replica.start()
        ready += 1
        tell()

    waiting = {asyncio.ensure_future(started(replica)): number for number, replica in enumerate(replicas)}
    try:
        while not all(task.done() for task in waiting):
            done, _ = await asyncio.wait(waiting, timeout=_EVERY_S)
            if len(done) < total:
                tell()
    finally:
        for task in waiting:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    return list(results)
