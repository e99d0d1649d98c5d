"""The processes that run SGLang: how they are started and ended, what is said to them, and what runs in them.

`python -m verl_mt.engines.sglang.processes FD engine` holds one engine. It has the process to itself, because
`Engine.shutdown()` kills every child of its caller. FD is one end of a socket pair. The first frame holds the engine's
arguments; the answer is `ready` or `failed`. After that each frame asks for one call, and calls run concurrently. When
the other end closes, the engine is shut down and the process ends.

`python -m verl_mt.engines.sglang.processes FD server ARGS` is an HTTP server. FD is the reading end of a pipe, which
holds the server's API key. When its writing end closes (the starter ended, however it ended), so does the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError, EngineError
from verl_mt.extensions.cluster.sglang import shared_memory

_ROOT = str(Path(__file__).resolve().parents[3])
"""Where `import verl_mt` finds the package, whatever directory the process starts in."""
_TAIL_LINES = 15
_DYING_S = 5.0
"""How long killed processes may take to disappear. Where nothing reaps orphans they never do."""
_LENGTH = struct.Struct(">Q")
"""Before each message: its length."""
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"(^|,)\s*expandable_segments\s*:\s*\w*\s*", re.IGNORECASE)
_INPUT_CLASSES = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "pause_generation": "PauseGenerationReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
}
"""Name of a call, as of the HTTP server's endpoint and of the tokenizer manager's method, and its argument's class."""


_PLAIN_CALLS = {"abort_request": "AbortReq", "flush_cache": "FlushCacheReqInput"}
"""Calls whose method takes plain arguments, and the classes that SGLang has for them."""


class ChildProcess:
    """`python -m module descriptor *words` in a process group of its own, its output in a file.

    A terminal's Ctrl-C does not reach it.

    Args:
        module: to run.
        descriptor: that the process inherits; its first argument.
        words: further arguments.
        environment: variables of the process, beside ours.
        memory_saver: the engine gives its memory back while training runs (SGLang's `enable_memory_saver`).
    """

    def __init__(
        self,
        module: str,
        descriptor: int,
        words: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        memory_saver: bool = False,
    ):
        self._ending = threading.Lock()
        self._is_over = False
        shared_memory.sweep()  # what killed runs left
        with tempfile.NamedTemporaryFile(prefix="verl_mt-sglang-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self._popen = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", module, str(descriptor), *words],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(memory_saver) | dict(environment or {}),
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
                # SGLang's own children outlive a process that crashed, and hold the GPU's memory. The group exists as
                # long as it has a member, so its id cannot have been given to anyone else.
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
            _wait_for_group(self.pid)
            shared_memory.sweep()
            if not keep_log:
                self.log.unlink(missing_ok=True)


def _wait_for_group(number: int) -> None:
    """Until what was killed is gone, and has given its memory back."""
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
    """Where process numbers mean the same: one boot of one kernel, and a container of its own."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, without torch's option `expandable_segments`: SGLang's memory saver refuses to start with it
    under its old name (PYTORCH_CUDA_ALLOC_CONF), and frees nothing with it under the new one (PYTORCH_ALLOC_CONF)."""
    others = {name: value for name, value in environment.items() if name not in _ALLOCATOR}
    kept = {name: _EXPANDABLE.sub("", environment[name]).strip(", ") for name in _ALLOCATOR if name in environment}
    return others | {name: value for name, value in kept.items() if value}


def _environment(memory_saver: bool = False) -> dict[str, str]:
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **(without_expandable_segments(os.environ) if memory_saver else os.environ),
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        # The few positions beyond the model's own are never computed: a turn ends at max_model_len.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Whatever the machine says on which it runs: log-probs are those behind the temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    }
    import torch  # not at the top: the child, which runs this file too, leaves it to SGLang

    if not torch.cuda.is_available():
        # A second thread per operator on a core that others use makes SGLang several times slower, not faster.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


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


def reserve_port() -> socket.socket:
    """Holds a port of 127.0.0.1 that nobody else gets while a server loads, which takes it last: the kernel hands out
    higher ones, and who looks for a free one finds it bound. The server can bind it too, as it reuses addresses."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, max(min(first_given, 22_000), 10_064)), 64):  # SGLang's own are above
        reserved = socket.socket()
        try:
            reserved.bind(("127.0.0.1", port))
        except OSError:
            reserved.close()
            continue
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return reserved
    raise EngineError("64 ports of this machine below 22000 were tried for an SGLang server, and all are taken")


def require_calls(version: str, io_struct: Any, manager: type) -> None:
    """Whether this SGLang has all calls that a run will need, asked before the engine is loaded.

    Args:
        version: of SGLang.
        io_struct: its module of requests.
        manager: its class of tokenizer managers.

    Raises:
        ConfigError: names what is missing.
    """
    calls = {**_INPUT_CLASSES, **_PLAIN_CALLS}
    missing = [name for name, kind in calls.items() if not (hasattr(io_struct, kind) and hasattr(manager, name))]
    if missing:
        raise ConfigError(
            f"SGLang {version}, which is installed here, lacks the calls {', '.join(missing)}; install 0.5.23 "
            "(docs/sglang.md)"
        )


class EngineHost:
    """Answers frames with the engine."""

    def __init__(self, engine: Any, connection: socket.socket):
        self._engine = engine
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until the other end closes. Runs on the loop of the engine's process."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        # Calls overlap: an abort must get through while the request that it ends is being answered.
        while (frame := await read_frame(reader)) is not None:
            task = asyncio.ensure_future(self._answer(*frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, name: str, body: dict[str, Any]) -> None:
        """Runs on the loop of the engine's process. Waits for SGLang."""
        answer: tuple[int, str, Any]
        try:
            answer = (number, "ok", await self._call(name, body))
        except Exception as error:
            answer = (number, "error", f"{type(error).__name__}: {error}")
        self._writer.write(encode(answer))

    async def _call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.managers import io_struct

        manager = self._engine.tokenizer_manager
        if name == "generate":
            return {"meta_info": (await self._engine.async_generate(**body))["meta_info"]}
        if name == "abort_request":
            manager.abort_request(**body)
            return {"success": True}
        if name == "flush_cache":
            return {"success": bool((await manager.flush_cache()).success), "message": "requests are running"}
        result = await getattr(manager, name)(getattr(io_struct, _INPUT_CLASSES[name])(**body))
        if isinstance(result, tuple):
            return {"success": bool(result[0]), "message": str(result[1])}
        return {"success": True}


def fork_children(descriptor: int) -> None:
    """SGLang's own processes begin as copies of this one, with all that it has imported; SGLang would have each of them
    import it all again. Not with a GPU, whose state no copy may use.

    Runs in the engine's process, before SGLang starts its own.

    Args:
        descriptor: closed in the copies. Its other end is to learn of this process's end, whatever they do.
    """
    import torch

    if torch.cuda.is_available():
        return
    multiprocessing.set_start_method("fork", force=True)
    # SGLang says "spawn" when it starts an engine.
    multiprocessing.set_start_method = lambda method, force=False: None
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))


def hold_engine(descriptor: int) -> None:
    """Start the engine that the first frame describes, and serve. Runs in the main thread of the engine's process,
    until the trainer closes the socket."""
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    arguments = read_blocking(connection)
    fork_children(descriptor)
    try:
        import sglang
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        require_calls(sglang.__version__, io_struct, TokenizerManager)
        engine = sglang.Engine(**arguments)
    except ConfigError as error:
        connection.sendall(encode((0, "failed", str(error))))
        sys.exit(2)
    except BaseException as error:
        connection.sendall(encode((0, "failed", "".join(traceback.format_exception_only(error)))))
        raise
    connection.sendall(encode((0, "ready", {"version": sglang.__version__})))
    try:
        engine.loop.run_until_complete(EngineHost(engine, connection).serve())
    finally:
        engine.shutdown()
        # What is left is this process alone, and taking its imports down takes seconds.
        os._exit(0)


def _end_with(descriptor: int) -> None:
    """Runs in a thread of the server's process. Waits for the end of the pipe, then kills the process group."""
    os.read(descriptor, 1)
    # The process was started as the leader of a group of its own: this ends SGLang's processes too.
    os.killpg(os.getpgid(0), signal.SIGKILL)


class Secret(str):
    """A text that SGLang does not show when it logs its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def serve_http(descriptor: int, words: list[str]) -> None:
    """Serve until killed. Runs in the main thread of the server's process."""
    os.set_inheritable(descriptor, False)
    key = Secret(os.read(descriptor, 4096).decode())  # written whole before this process began
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    fork_children(descriptor)

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    arguments = prepare_server_args(words)
    arguments.api_key = key
    run_server(arguments)


if __name__ == "__main__":
    # SGLang sends pickles over sockets in the folder for temporary files. Only this user may write to them.
    os.umask(os.umask(0o022) | 0o022)
    if sys.argv[2] == "engine":
        hold_engine(int(sys.argv[1]))
    else:
        serve_http(int(sys.argv[1]), sys.argv[3:])
