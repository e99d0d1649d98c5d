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
from typing import Protocol

from verl_mt.bounds import MAX_PAGE_CHARACTERS, printable
from verl_mt.config.schema import Config

start_log = logging.getLogger("verl_mt.start")
_EVERY_S = 30.0
"""A phase that takes longer says so again and again."""


class _Line(logging.Formatter):
    """A record as a terminal may get it."""

    def format(self, record: logging.LogRecord) -> str:
        return f"verl_mt: {printable(record.getMessage(), MAX_PAGE_CHARACTERS)}"


def show(config: Config) -> None:
    """Print the lines of a run that starts engines or ranks in other processes, the first one now. Runs in the
    trainer's main thread, before anything slow is imported."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    here = trainer.placement == "inline" and rollout.name in ("local", "scripted")
    if here or trainer.dry_run or "console" not in trainer.logger:
        return
    if not start_log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Line())
        start_log.addHandler(handler)
        start_log.setLevel(logging.INFO)
        start_log.propagate = False
    start_log.info("starting with rollout.name=%s, trainer.placement=%s", rollout.name, trainer.placement)


class _Starts(Protocol):
    """A replica."""

    async def start(self) -> None: ...


@contextmanager
def phase(doing: str) -> Iterator[None]:
    """Say what begins, and every `_EVERY_S` that it is not over. Runs in the trainer's main thread; a thread says the
    latter."""
    start_log.info("%s", doing)
    begun, over = time.monotonic(), threading.Event()

    def repeat() -> None:
        """Runs in a thread. Waits for the end of the phase."""
        while not over.wait(_EVERY_S):
            start_log.info("%s: not done after %.0f s", doing, time.monotonic() - begun)

    thread = threading.Thread(target=repeat, name="start lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
