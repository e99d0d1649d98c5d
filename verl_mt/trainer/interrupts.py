"""What ends a run before its last step: Ctrl-C, SIGTERM, a full disk."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any

from verl_mt.data.run_files import NO_ROOM, disk_refused
from verl_mt.errors import CheckpointError
from verl_mt.trainer.run_log import RunLog


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
        self.exit_status = 0
        """Of a command that ends with the run: 130 after Ctrl-C, 143 after SIGTERM."""
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

    def check(self) -> None:
        """Raises:
        Interrupted: a stop was requested.
        """
        if self.requested.is_set():
            raise Interrupted

    @contextmanager
    def ending(self, log: RunLog, save: Callable[[], int]) -> Iterator[None]:
        """A run: a requested stop ends it with a checkpoint and without an error.

        Args:
            log: of the run, open.
            save: writes the checkpoint of the last finished step and returns that step's number.

        Raises:
            CheckpointError: the disk refused something; names the run's directory.
        """
        try:
            yield
        except Interrupted:
            step = save()
            self.exit_status = self._status()
            log.interrupted(step)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise CheckpointError(disk_refused(log.run.path, error)) from error

    def _status(self) -> int:
        """As a shell counts it: 128 and the number of the signal that came."""
        return 128 + self._number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between two bytecodes. Raises `Insisted` at the second signal."""
        self._number = number
        if self.requested.is_set():
            raise Insisted(self._status())
        self.requested.set()
