"""The way to a rollout worker: `Link`, and `ProcessLink` to a process of this machine."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from verl_mt.errors import WorkerError, error_text

_MODULE = "verl_mt.rollout_workers.worker"
_DYING_S = 10.0


class WorkerGone(Exception):
    """The process at the other end ended; the text says how."""


class Link(abc.ABC):
    """One life of one worker. Messages are tuples that can be pickled."""

    @abc.abstractmethod
    def send(self, message: tuple[Any, ...]) -> None:
        """Say something; never waits. To a process that is gone nothing can be said, and `receive` says so. Runs on the
        rollout's loop."""

    @abc.abstractmethod
    async def receive(self) -> tuple[Any, ...]:
        """What it says next. Runs on the rollout's loop. Waits for the worker's process.

        Raises:
            WorkerGone: nothing any more.
        """

    @abc.abstractmethod
    async def end(self, grace_s: float) -> None:
        """Let it end by itself within `grace_s` seconds, or end it. Idempotent; never raises. Runs on the rollout's
        loop. Waits for the worker's process."""


class ProcessLink(Link):
    """A process of this machine, at the other end of a socket pair. It leads a new process group: Ctrl-C does
    not reach it, and what its tools left behind ends with it, also when this process is killed."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        # When this process is gone, however it ended, the guard's input is closed. The worker itself may be importing,
        # or in code that lets no other thread run; the kernel's signal (PR_SET_PDEATHSIG) leaves a worker's children.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._connection = Connection(ours.detach())
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()
        self._outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="rollout worker, reading", daemon=True)
        self._writer = threading.Thread(target=self._write, name="rollout worker, writing", daemon=True)
        self._reader.start()
        self._writer.start()
        self._ended = False

    @property
    def pid(self) -> int:
        """Of the worker."""
        return self._process.pid

    def send(self, message: tuple[Any, ...]) -> None:
        self._outbox.put(message)

    async def receive(self) -> tuple[Any, ...]:
        """Runs on the rollout's loop. Waits for the reading thread."""
        message = await self._inbox.get()
        if message is None:
            raise WorkerGone(await asyncio.to_thread(self._how))
        return message

    async def end(self, grace_s: float) -> None:
        """Runs on the rollout's loop. Waits for the process, in a thread."""
        if not self._ended:
            self._ended = True
            self.send(("end",))
            self._outbox.put(None)
            await asyncio.to_thread(self._end, grace_s)

    def _read(self) -> None:
        """Runs in the reading thread, until the process ends. Waits for the worker's socket.

        A message that was cut off by the process's end is none.
        """
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._tell(pickle.loads(self._connection.recv_bytes()))
        self._tell(None)

    def _tell(self, message: tuple[Any, ...] | None) -> None:
        """Runs in the reading or the writing thread and waits for nothing."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)

    def _write(self) -> None:
        """Runs in the writing thread. Waits for messages, and until the worker's socket takes them."""
        try:
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            return  # the process is gone; who reads finds out
        except Exception as error:
            what = message and message[0]
            self._tell(("failed", WorkerError(f"a rollout worker cannot be told {what!r}: {error_text(error)}")))

    def _how(self) -> str:
        """How the process ended; one that only hung up is ended. Runs in a thread. Waits for the process, at most
        `_DYING_S`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_S)
        code = self._process.poll()
        if code is None:
            return f"process {self.pid} hung up"
        return f"process {self.pid} " + (f"got {signal.Signals(-code).name}" if code < 0 else f"exited with {code}")

    def _end(self, grace_s: float) -> None:
        """Runs in a thread. Waits for the process and both threads."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if grace_s:
                self._process.wait(grace_s)
        self._guard.kill()
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        deadline = time.monotonic() + _DYING_S
        with contextlib.suppress(ProcessLookupError):
            # The group exists as long as it has a member, so its id cannot have been given to anyone else.
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.02)
        self._process.wait()
        self._reader.join(_DYING_S)
        self._writer.join(_DYING_S)
        # Who still used the descriptor would say its words to the next worker, which may get the same number.
        if not (self._reader.is_alive() or self._writer.is_alive()):
            self._connection.close()
