"""Ctrl-C (and SIGTERM) end a run cleanly: the first asks, the second insists."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop; it saves a checkpoint and ends. Not an error."""


class Insisted(KeyboardInterrupt):
    """Asked a second time: the run ends here and now."""

    def __init__(self, exit_status: int):
        self.exit_status = exit_status


class Interrupts(AbstractContextManager["Interrupts"]):
    """While open, SIGINT and SIGTERM set `requested`; a second signal raises `Insisted` at once.

    Only the main thread of a process may handle signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._number: int = signal.SIGINT
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    @property
    def exit_status(self) -> int:
        """As a shell counts it: 128 and the number of the signal that came."""
        return 128 + self._number

    def check(self) -> None:
        """Raises:
        Interrupted: a stop was requested.
        """
        if self.requested.is_set():
            raise Interrupted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        if self.requested.is_set():
            raise Insisted(self.exit_status)
        self.requested.set()
