"""Python interpreters that run model-written code, each in a separate, locked-in process (`jail.py`).

Isolation is Landlock for files, a seccomp allow-list for everything else, resource limits for memory, and a clock here:
no privileges, no container runtime and no installed program are needed, and it works in an ordinary container.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from verl_mt.errors import PluginError
from verl_mt.extensions.toolbox.sandbox.folders import new_folder, remove_folder, too_full
from verl_mt.extensions.toolbox.sandbox.policy import SandboxLimits, environment, readable_paths
from verl_mt.extensions.toolbox.sandbox.seccomp import build_filter

_JAIL = str(Path(__file__).with_name("jail.py"))
_START_S = 60.0
_LOOK_S = 0.05
"""How often the disk space of its files is checked while code runs. A look that takes long is a rare one."""
_MAX_REPLY = 4096
_FLOOD = 256
"""A process that prints this many times what is kept is killed: reading it would cost this process its time."""

_ESCAPES = """
import os, socket
witness = os.getcwd() + ".witness"
attempts = {
    "network": socket.socket,
    "process": lambda: os.fork() or os._exit(0),
    "file": lambda: os.open("../verl_mt_escaped", os.O_WRONLY | os.O_CREAT),
    "environment": lambda: open(f"/proc/{os.getppid()}/environ").read(),
    "reading": lambda: open(witness).read(),
    "truncation": lambda: os.truncate(witness, 0),
    **{f"truncation on open, mode {k}": lambda k=k: os.open(witness, k | os.O_TRUNC) for k in range(4)},
}
escaped = []
for name, attempt in attempts.items():
    try:
        attempt()
        escaped.append(name)
    except PermissionError:
        pass
escaped
"""

Ending = Literal["ok", "raised", "timeout", "disk", "output", "died"]
"""How a call ended; after the last four its process is gone, with everything that it knew."""


@dataclass(frozen=True)
class CodeResult:
    """What a piece of code did."""

    output: str
    """Stdout and stderr as they came, the traceback of an exception included; cut to `output_kb`."""
    ending: Ending
    detail: str = ""
    """Why the process is gone, where it is."""


@lru_cache(maxsize=1)
def _starter(pid: int) -> ThreadPoolExecutor:
    """A process dies with the thread that started it (PR_SET_PDEATHSIG), so one thread, which stays, starts them all.

    Runs in any thread and waits for nothing.

    A fork has no threads: it gets one of its own.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="sandbox")


class Sandbox:
    """Starts interpreters. One per tool.

    Args:
        limits: of each interpreter.
        python: the interpreter, whose installed packages the code may import; None = this process's own.
        readable: further absolute paths that the code may read.
        keeps_state: whether an interpreter serves several calls.

    Raises:
        PluginError: the isolation is not available on this machine; says what is missing.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        python: str | None = None,
        readable: tuple[str, ...] = (),
        keeps_state: bool = False,
    ):
        self.limits = limits or SandboxLimits()
        self.python = python or sys.executable
        if not sys.platform.startswith("linux"):
            raise PluginError(f"model-written code can be isolated on Linux only, and this is {sys.platform}")
        self._filter = build_filter().hex()
        self._readable = readable_paths(self.python, readable)
        self._keeps_state = keeps_state

    def open(self) -> Interpreter:
        """A new interpreter, ready for code. Blocks for some 50 ms.

        Runs in any thread. Waits for the thread `sandbox`, which starts the process, and for the process.

        Raises:
            PluginError: the isolation is not available; says what is missing.
        """
        folder = new_folder()
        try:
            interpreter = _starter(os.getpid()).submit(self._start, folder).result()
        except BaseException:
            remove_folder(folder)
            raise
        setup = {
            "parent": os.getpid(),
            "folder": folder,
            "rlimits": self.limits.rlimits(),
            "readable": self._readable,
            "filter": self._filter,
            "keeps_state": self._keeps_state,
        }
        said, output = interpreter.exchange(setup, _START_S)
        if not said.get("ready"):
            interpreter.close()
            reason = said.get("unavailable") or f"the interpreter {self.python} did not start: {output[-300:]}"
            raise PluginError(f"model-written code cannot be isolated on this machine: {reason}")
        return interpreter

    def verify(self) -> None:
        """Start one interpreter and let it try to get out.

        Raises:
            PluginError: the isolation is not available, or something got out.
        """
        interpreter = self.open()
        witness = Path(interpreter.folder + ".witness")
        try:
            witness.write_text("whole")
            result = interpreter.run(_ESCAPES)
            whole = witness.read_text() == "whole"
        finally:
            interpreter.close()
            witness.unlink(missing_ok=True)
        if result.ending != "ok" or result.output.strip() != "[]" or not whole:
            raise PluginError(
                "model-written code cannot be isolated on this machine: of a network, a process, a file outside and "
                f"the environment of this process, the code should reach nothing, but {result.ending} "
                f"{result.output.strip() or result.detail}"
            )

    def _start(self, folder: str) -> Interpreter:
        """Runs in the thread `sandbox`."""
        reply, control = os.pipe()
        try:
            process = subprocess.Popen(
                [self.python, "-s", "-B", _JAIL, str(control)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment(folder),
                pass_fds=(control,),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(reply)
            raise
        finally:
            os.close(control)
        return Interpreter(process, reply, folder, self.limits)


class Interpreter:
    """One locked-in process. Not for several threads at once, except `kill` and `close`."""

    def __init__(self, process: subprocess.Popen[bytes], reply: int, folder: str, limits: SandboxLimits):
        self.folder, self.limits = folder, limits
        self._process, self._reply, self._busy = process, reply, threading.Lock()
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._output = process.stdin.fileno(), process.stdout.fileno()
        for handle in (self._stdin, self._output, reply):
            os.set_blocking(handle, False)

    @property
    def alive(self) -> bool:
        """Whether it can take code."""
        return self._process.poll() is None

    def run(self, code: str) -> CodeResult:
        """Run a piece of code. Blocks for at most `limits.timeout_s` and a moment.

        Runs in the caller's thread. Waits for the process.

        Raises:
            RuntimeError: the interpreter is closed.
        """
        with self._busy:
            if self._reply < 0:
                raise RuntimeError("the interpreter is closed")
            self._process.send_signal(signal.SIGCONT)
            try:
                said, output = self.exchange(code, self.limits.timeout_s)
                ending, detail = said.get("ending"), said.get("detail", "")
                if ending is None:
                    ending, detail = self._after_answer()
            except BaseException:
                self.kill()  # it must not go on
                raise
            if ending is None:
                return CodeResult(output, "raised" if said.get("raised") else "ok")
            self.kill()
            return CodeResult(output, ending, detail)

    def kill(self) -> None:
        """End the process. Also while another thread is in `run`, which then returns."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and remove its folder. Runs in any thread. Waits for the process, and for `run` in another
        thread."""
        self.kill()
        with self._busy:  # a `run` in another thread sees the death and ends; then nobody uses the pipes
            if self._reply < 0:
                return
            os.close(self._reply)
            self._reply = -1
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                stream.close()
        remove_folder(self.folder)

    def exchange(self, message: object, timeout_s: float) -> tuple[dict, str]:
        """Send one message, wait for its answer, collect what was printed meanwhile.

        Runs in the caller's thread. Waits for the process, at most `timeout_s`.

        Returns:
            The answer, or {"ending": ..., "detail": ...} if there will be none; and the text.
        """
        outgoing = memoryview((json.dumps(message) + "\n").encode())
        output, answer = _Kept(self.limits.output_kb * 1024), b""
        begun = time.monotonic()
        ends, next_look = begun + timeout_s, begun + _LOOK_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._reply, selectors.EVENT_READ)
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while True:
                left_s = ends - time.monotonic()
                if left_s <= 0:
                    return {"ending": "timeout", "detail": f"it did not finish within {timeout_s:g} s"}, str(output)
                for key, _ in selector.select(min(left_s, _LOOK_S)):
                    if key.fd == self._stdin:
                        outgoing = outgoing[_write(self._stdin, outgoing) :]
                        if not outgoing:
                            selector.unregister(self._stdin)
                    elif key.fd == self._output:
                        if not output.add(_read(self._output)):
                            selector.unregister(self._output)
                    else:
                        answer += (said := _read(self._reply))
                        if not said or b"\n" in answer or len(answer) > _MAX_REPLY:
                            # Code that wrote the answer itself would go on, off the clock, and print for ever.
                            self._stop()
                            output.drain(self._output)
                            return self._understand(answer), str(output)
                if output.size > _FLOOD * self.limits.output_kb * 1024:
                    return {"ending": "output", "detail": f"it printed {output.size >> 10} KiB"}, str(output)
                if (begun := time.monotonic()) >= next_look:
                    if self._stop() and (full := too_full(self.folder, self._process.pid, self.limits.disk_mb)):
                        return {"ending": "disk", "detail": full}, str(output)
                    self._process.send_signal(signal.SIGCONT)
                    next_look = (now := time.monotonic()) + max(_LOOK_S, 2 * (now - begun))

    def _stop(self) -> bool:
        """Let the process stand still: a system call that it is in comes to its end. False if it has ended."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            seen = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return False
        return seen is not None and seen.si_code == os.CLD_STOPPED

    def _after_answer(self) -> tuple[Ending | None, str]:
        """What is wrong with a process that has answered, and what to say of it; (None, "") = nothing."""
        if not self._stop():
            return "died", "the interpreter ended while it answered"
        full = too_full(self.folder, self._process.pid, self.limits.disk_mb)
        return ("disk", full) if full else (None, "")

    def _understand(self, answer: bytes) -> dict:
        try:
            said = json.loads(answer)
            if isinstance(said, dict) and "ending" not in said:
                return said
        except (ValueError, RecursionError):
            pass  # nothing was said: it died; or the code wrote there itself
        self.kill()
        if answer:
            return {"ending": "died", "detail": "the interpreter's answer was not its own"}
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return {"ending": "died", "detail": f"the interpreter {how}"}


class _Kept:
    """The start and the end of a stream, in bounded memory."""

    def __init__(self, limit: int):
        self._half, self._limit = limit // 2, limit
        self._head, self._tail = bytearray(), bytearray()
        self.size = 0
        """Bytes of the stream so far."""

    def add(self, data: bytes) -> bool:
        """Take what came; False at the end of the stream."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[max(room, 0) :]
        self.size += len(data)
        if len(self._tail) > 8 * self._limit:
            del self._tail[: -self._limit]
        return bool(data)

    def drain(self, handle: int) -> None:
        """Take what is there already: all that was printed before the answer."""
        while self.add(_read(handle)):
            continue

    def __str__(self) -> str:
        tail = self._tail[max(0, len(self._tail) - (self._limit - self._half)) :]
        dropped = self.size - len(self._head) - len(tail)
        note = f"\n...({dropped} bytes left out)...\n" if dropped else ""
        return self._head.decode("utf-8", "replace") + note + tail.decode("utf-8", "replace")


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except BlockingIOError:
        return b""


def _write(handle: int, data: memoryview) -> int:
    """How many bytes went; all of them where nobody reads any more, as there will be no answer either."""
    try:
        return os.write(handle, data)
    except BrokenPipeError:
        return len(data)
