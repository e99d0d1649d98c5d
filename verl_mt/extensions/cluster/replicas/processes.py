"""Processes that run an engine: how they are started and ended, and the frames that are exchanged with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mt.extensions.cluster.replicas import shared_memory

_TAIL_LINES = 15
_DYING_S = 5.0
"""How long killed processes may take to disappear. Where nothing reaps orphans they never do."""
_LENGTH = struct.Struct(">Q")
"""Before each message: its length."""


class ChildProcess:
    """A command in a separate process group, its output in a file.

    A terminal's Ctrl-C does not reach it.

    Args:
        command: to run.
        descriptor: that the process inherits.
        environment: all variables of the process.
        kind: of the engine; a part of the log's name.
    """

    def __init__(self, command: list[str], descriptor: int, environment: Mapping[str, str], kind: str = "engine"):
        self._ending = threading.Lock()
        self._is_over = False
        shared_memory.sweep()  # what killed runs left
        with tempfile.NamedTemporaryFile(prefix=f"verl_mt-{kind.lower()}-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self._popen = subprocess.Popen(
                command,
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environment),
            )

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._popen.pid

    @property
    def ended(self) -> bool:
        """Whether the process itself is no more. Its children may be."""
        return self._popen.poll() is not None

    def describe(self) -> str:
        """How it ended, and if it wrote about an exception, the end of that; else the last error that it logged."""
        code = self._popen.poll()
        how = "is running" if code is None else f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        starts = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
        errors = [line for line in lines if "ERROR" in line]
        last = "\n  ".join(lines[starts[-1] :][-_TAIL_LINES:] if starts else errors[-1:])
        return f"process {self.pid}: {how}; log {self.log}" + (f"; the last error there:\n  {last}" if last else "")

    def mark_shared_memory(self) -> None:
        """What the group has in /dev/shm now is removed with it."""
        shared_memory.mark_group(self.pid)

    def end(self, wait_s: float, *, keep_log: bool = False) -> None:
        """Give it `wait_s` seconds to end by itself, then kill it; kill what it left behind. Blocks; idempotent. Runs
        in any thread."""
        with self._ending:
            if self._is_over:
                return
            self._is_over = True
            deadline = time.monotonic() + wait_s
            while not self.ended and time.monotonic() < deadline:
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                # An engine's own children outlive a process that crashed, and hold the GPU's memory. The group exists
                # as long as it has a member, so its id cannot have been given to anyone else.
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
            _wait_for_group(self.pid)
            shared_memory.sweep()
            if not keep_log:
                self.log.unlink(missing_ok=True)


def _wait_for_group(number: int) -> None:
    """Wait until the killed processes are gone and their memory is free."""
    deadline = time.monotonic() + _DYING_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(number, 0)
            time.sleep(0.02)


@dataclass(frozen=True)
class ProcessGroup:
    """Tells a `ChildProcess` from those of other machines, and from who got its number later; can be sent there."""

    machine: str
    pid: int
    begun: str | None
    """When its leader began, in the kernel's ticks."""

    @classmethod
    def of(cls, process: ChildProcess) -> ProcessGroup:
        """For who may outlive the process's parent."""
        return cls(_machine(), process.pid, shared_memory.began(process.pid))

    def end(self) -> None:
        """Kill what is left of it, if it was on this machine, and wait until that is gone. Runs in any thread."""
        # A number is not given anew while the group has a member, with or without its leader.
        if self.machine != _machine() or shared_memory.began(self.pid) not in (None, self.begun):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
            _wait_for_group(self.pid)


def _machine() -> str:
    """Name of the space of process numbers: one boot of one kernel, and one container."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def encode(message: Any) -> bytes:
    """One frame between client and engine process: a length, then a pickle.

    Both ends are ours and the socket has no name, so nobody else can put a pickle in.
    """
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message; None when the other end is closed. Runs on the reader's loop. Waits for the other process."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def read_blocking(connection: socket.socket) -> Any:
    """The next message, for a process that has no event loop yet. Waits for the other process.

    Raises:
        EOFError: the other end is closed.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Waits for the other process."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the other end closed the connection")
        data += part
    return data
