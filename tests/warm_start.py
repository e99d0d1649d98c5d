"""Start Python commands from a process that has torch, transformers and the trainer imported.

A real start of the trainer costs 5 CPU seconds, most of them imports and the interpreter's end. Here a server imports
once, and each command is a fork of it. `run` and `Popen` take subprocess's arguments:

    warm_start.run([sys.executable, "-m", "verl_mt.trainer", "trainer.total_training_steps=1"], capture_output=True)

The server computes nothing and starts no thread: an OpenMP pool that has worked deadlocks in a fork. What a fork cannot
repeat becomes a real start: an environment whose variables were read while the server imported, or a folder of
`sys.path` that holds another version of an imported module. `Popen.why_real` says why, and pytest's summary counts.

`warm_ray` and `warm_engines` do the same for Ray's workers and SGLang's engines (8 and 13 CPU seconds of imports each),
whichever process of the session starts them: the servers' addresses are in the environment.

Use subprocess for what is about the interpreter itself: which modules a command imports, its end in C code, its flags.
"""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import IO, Any, NoReturn

REPO = Path(__file__).resolve().parents[1]
_SIZE = struct.Struct("<I")
IMPORTED = (
    "verl_mt",  # first: it sets OMP_WAIT_POLICY, which is read when torch is loaded
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "verl_mt.trainer.build",
    "verl_mt.trainer.restarts",
    "verl_mt.engines.local",
    "verl_mt.engines.sglang.processes",
)
"""What every run of the tiny model imports. A module that a test starts with `-m` must not be among it."""
IMPORTED_BY_ENGINES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.models.registry",  # imports every model
)
_WITHOUT_A_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Of the server alone: pyarrow's allocator would start one."""
_PEER = struct.Struct("3i")
"""Process, user and group at the other end of a socket (unix(7), SO_PEERCRED)."""
_TOLD = struct.Struct("<4si")
"""`pid ` when a fork begins, `end ` with its wait status."""

# ---------------------------------------------------------------------------------------------------------------------
# In the process of the tests
# ---------------------------------------------------------------------------------------------------------------------

START_ENVIRONMENT = dict(os.environ)  # before any test changes it
ADDRESS, ENGINE_ADDRESS = "VERL_MT_TESTS_WARM_START", "VERL_MT_TESTS_WARM_ENGINE"
"""Environment variables that tell the servers to processes that tests have started, as to Ray's workers."""
_WARM_RAY = "VERL_MT_TESTS_WARM_RAY"
_ENGINE = "verl_mt.engines.sglang.processes"

_HARMLESS = {"COLUMNS", "LINES", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "PYTHONBREAKPOINT"}
"""The first two are read while accelerate is imported, for the menus of its questionnaire; the next two at the first
product of a process, which the server never computes, and the last by `breakpoint()`. Loading a model and connecting to
Ray set them, so most tests' commands have them."""
_READ_BY_LIBRARIES = (
    "ARROW_", "ATEN_", "DNNL_", "FSSPEC_", "GLIBC_", "GOMP_", "JE_ARROW_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_",
    "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "TQDM_", "TZ",
)  # fmt: skip
"""Read in C, or by a loop over all variables, when a library is loaded."""


class Server:
    """The process that has imported. It ends with the process that started it: its socket closes."""

    def __init__(
        self, imported: Sequence[str] = IMPORTED, address: str = ADDRESS, environment: Mapping[str, str] | None = None
    ) -> None:
        self._control, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (as long as this object)
        environment = START_ENVIRONMENT | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *imported],
                pass_fds=[theirs.fileno()], cwd=REPO,
                env=environment | _WITHOUT_A_THREAD,
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            )  # fmt: skip
        atexit.register(self.close)
        ready = _receive(self._control)
        if ready is None:
            raise RuntimeError(f"the server of warm starts could not import:\n{self.log()}")
        self.set_at_import: dict[str, str] = ready["set"]
        self.address: str = ready["address"]
        os.environ[address] = self.address  # for processes that are started from now on

    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def counts(self) -> dict[str, int]:
        """Forks until now by "", and real starts by their reasons."""
        return self.ask({"counts": True})["counts"]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("\0" + self.address)
            _send(connection, question)
            answer = _receive(connection)
        if answer is None:
            raise RuntimeError(f"the server of warm starts ended:\n{self.log()}")
        return answer

    def close(self) -> None:
        self._control.close()
        self.process.wait()


_servers: dict[tuple[int, str], Server] = {}
_starting = threading.Lock()


def server(address: str = ADDRESS) -> Server:
    """The server of this process."""
    with _starting:
        key = (os.getpid(), address)
        if key not in _servers:
            _servers[key] = Server() if address == ADDRESS else _engine_server()
        return _servers[key]


def _engine_server() -> Server:
    from verl_mt.extensions.cluster.sglang.processes import _environment

    return Server(IMPORTED_BY_ENGINES, ENGINE_ADDRESS, _environment())


def counts() -> Counter[str]:
    """Of this process and of the processes that it started: as `Server.counts`."""
    return sum((Counter(made.counts()) for made in _servers.values()), Counter())


def warm_engines() -> None:
    """SGLang's engines that processes of this session start from now on are forks, too."""
    server(ENGINE_ADDRESS)
    _replace_starts_of_engines()


def _replace_starts_of_engines() -> None:
    from verl_mt.extensions.cluster.replicas import processes

    def start(words: Sequence[str], **more: Any) -> subprocess.Popen:
        return (Popen if words[0] == sys.executable else subprocess.Popen)(words, **more)

    processes.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": start})


def warm_ray() -> None:
    """Workers of Ray clusters that processes of this session start from now on are forks, too."""
    from ray._private import ray_constants

    server()
    os.environ[_WARM_RAY] = "1"
    _replace_starts_of_ray(ray_constants)


def _replace_starts_of_ray(ray_constants: Any) -> None:
    ray_constants.SETUP_WORKER_FILENAME = str(REPO / "tests" / "warm_ray_worker.py")  # joined to a folder of Ray's


class Popen(subprocess.Popen):
    """`subprocess.Popen` of Python, which forks the server where it can.

    Raises:
        ValueError: `args` do not begin with `sys.executable` and `-m`, `-c` or a script (`-W what` may stand between),
            or an argument needs an exec.
    """

    why_real: str | None = None
    """Why this is a real start; None for a fork."""
    _status: socket.socket | None = None
    """Carries pid and wait status; None for a real start."""

    def __init__(self, args: Sequence[str | os.PathLike[str]], *more: Any, **kwargs: Any) -> None:
        words = [os.fspath(word) for word in args]
        rest = _split(words[1:])[1] if words[:1] == [sys.executable] else []
        if not rest or (rest[0][:1] == "-" and rest[0] not in ("-m", "-c")):
            raise ValueError(f"{words[:2]} is no plain start of Python: use subprocess for it")
        for name in ("preexec_fn", "shell", "executable", "user", "group", "extra_groups", "umask"):
            if kwargs.get(name):
                raise ValueError(f"a fork has no {name}: use subprocess for it")
        super().__init__(words, *more, **kwargs)

    def _execute_child(self, *arguments: Any) -> None:
        args, _, _, _, pass_fds, cwd, env = arguments[:7]
        stdin, stdin_ours, stdout_ours, stdout, stderr_ours, stderr = arguments[10:16]
        start_new_session, process_group = arguments[21:23]
        folder = os.path.abspath(cwd or ".")
        options, words = _split(args[1:])
        script = None if words[0] in ("-m", "-c") else os.path.realpath(os.path.join(folder, words[0]))
        address = ENGINE_ADDRESS if _ENGINE in words else ADDRESS
        if not os.path.isdir(folder) or (script and not os.path.isfile(script)):
            self.why_real = "a folder or a script that does not exist"
        elif address == ENGINE_ADDRESS and address not in os.environ:
            self.why_real = "no engine is to be warm here"
        else:
            given = [own if own != -1 else k for k, own in enumerate((stdin, stdout, stderr))]
            environment = dict(os.environ if env is None else env)
            if address == ADDRESS:  # for what it starts in turn
                environment.setdefault(ADDRESS, os.environ.get(ADDRESS) or server().address)
            request = {
                "words": [args[0], *words], "options": options, "cwd": folder, "environment": environment,
                "first_entry": os.path.dirname(script) if script else folder, "new_session": start_new_session,
                "process_group": process_group, "pass_fds": list(pass_fds),
            }  # fmt: skip
            answer = ask(address, request, [*given, *pass_fds])
            if isinstance(answer, str):
                self.why_real = answer
            else:
                self.pid, self._status = answer
        if self.why_real:
            super()._execute_child(*arguments)
            return
        self._child_created = True
        self._close_pipe_fds(stdin, stdin_ours, stdout_ours, stdout, stderr_ours, stderr)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As `os.waitpid(self.pid, wait_flags)`: until this returns the wait status, the process is a zombie."""
        if self._status is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = said(self._status, b"end ")
        self._status.sendall(b".")  # let it be reaped
        self._status.recv(1)  # it is
        self._status.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **kwargs: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(_deadstate=_deadstate, **kwargs)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What follows each `-W`, and the other words."""
    options, rest = [], list(words)
    while rest[:1] == ["-W"]:
        options, rest = [*options, rest[1]], rest[2:]
    return options, rest


def ask(address: str, request: dict[str, Any], descriptors: Sequence[int]) -> str | tuple[int, socket.socket]:
    """Ask the server for a fork.

    Returns:
        The fork's process id and what tells its end (`Popen._try_wait`); or why it has to be a real start.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + (os.environ.get(address) or server(address).address))
    _send(connection, request, descriptors)
    if refusal := (_receive(connection) or {}).get("why_real"):
        connection.close()
        return refusal
    return said(connection, b"pid "), connection


def parent_of(pid: int) -> int:
    """The process that started this one. A fork is a child of the server: its parent here is who asked for it.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for made in _servers.values():
        if parent == made.process.pid:
            return made.ask({"who_asked_for": pid})["pid"] or parent
    return parent


def said(connection: socket.socket, expected: bytes) -> int:
    said = connection.recv(_TOLD.size, socket.MSG_WAITALL)
    if said[:4] != expected:
        logs = "\n".join(made.log() for (pid, _), made in _servers.items() if pid == os.getpid())
        raise RuntimeError(f"the server of warm starts, or its fork, ended:\n{said!r}\n{logs}")
    return int(_TOLD.unpack(said)[1])


def run(
    args: Sequence[str | os.PathLike[str]],
    *,
    input: str | bytes | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **kwargs: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with `Popen` of this module."""
    if input is not None:
        kwargs["stdin"] = subprocess.PIPE
    if capture_output:
        kwargs |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **kwargs) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, output=out, stderr=err)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _entries(environment: Mapping[str, str], folder: str | os.PathLike[str] = REPO) -> list[str]:
    """What PYTHONPATH adds to `sys.path` in a process that starts in `folder`."""
    value = environment.get("PYTHONPATH")
    if not value:
        return []
    return list(dict.fromkeys(os.path.abspath(os.path.join(folder, entry)) for entry in value.split(os.pathsep)))


def _send(control: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    control.sendmsg([_SIZE.pack(len(data))], fds)
    control.sendall(data)


def _receive(control: socket.socket, descriptors: list[int] | None = None) -> dict[str, Any] | None:
    """None: the other end is closed."""
    head, fds, _, _ = socket.recv_fds(control, _SIZE.size, 64)
    if descriptors is not None:
        descriptors += fds
    if not head:
        return None
    return json.loads(control.recv(*_SIZE.unpack(head), socket.MSG_WAITALL))


# ---------------------------------------------------------------------------------------------------------------------
# In the server
# ---------------------------------------------------------------------------------------------------------------------


def serve(control: socket.socket, names: Sequence[str]) -> NoReturn:
    """Import, then fork for each request."""
    started_with, path = dict(os.environ), sys.path[1:]
    read = _import_all(names)
    for name in _WITHOUT_A_THREAD:
        del os.environ[name], started_with[name]
    set_at_import = {name: value for name, value in os.environ.items() if name not in started_with}
    imported = Imported(read, set_at_import, started_with | set_at_import, _top_level_modules())
    listening = socket.socket(socket.AF_UNIX)
    address = f"verl_mt-tests-{os.getpid()}-{secrets.token_hex(8)}"
    listening.bind("\0" + address)
    listening.listen(64)
    children = Children(control, listening, [e for e in path if e not in _entries(started_with)], imported)
    _send(control, {"set": set_at_import, "address": address})
    children.serve()


def _import_all(names: Sequence[str]) -> set[str]:
    """Returns the environment variables that were read by name."""
    read: set[str] = set()
    original = os._Environ.__getitem__

    def recorded(self: Any, name: str) -> str:
        if sys._getframe(1).f_code.co_name != "__iter__":  # of items(), which reads all of them
            read.add(name)
        return original(self, name)

    os._Environ.__getitem__ = recorded
    for name in names:
        importlib.import_module(name)
    os._Environ.__getitem__ = original
    gc.collect()
    gc.freeze()  # a garbage collection writes to every object, and a fork would copy them all
    return read


def _top_level_modules() -> dict[str, list[str]]:
    """Name -> the paths that an import of it may find."""
    found: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        if "." not in name:
            file = getattr(module, "__file__", None)
            paths = [file, os.path.dirname(file)] if file else list(getattr(module, "__path__", []))
            found[name] = [os.path.realpath(path) for path in paths]
    return found


@dataclass(frozen=True)
class Imported:
    """What the imports of the server depended on."""

    read: set[str]
    """Names of environment variables."""
    set_at_import: dict[str, str]
    environment: dict[str, str]
    modules: dict[str, list[str]]
    """As `_top_level_modules` gives them."""

    def why_not(self, environment: Mapping[str, str], first_entry: str) -> str | None:
        """Why a start in this environment is no fork of this server; None if it can be one."""
        wanted = self.set_at_import | dict(environment)
        for name in sorted(wanted.keys() | self.environment.keys()):
            differs = wanted.get(name) != self.environment.get(name)
            at_import = name in self.read or name.startswith(_READ_BY_LIBRARIES)
            if differs and at_import and name not in _HARMLESS and name != "PYTHONPATH":
                return f"{name} is read at import"
        ours, theirs = _entries(self.environment), _entries(environment)
        if [entry for entry in theirs if entry in ours] != ours:
            return "PYTHONPATH leaves out entries of the tests"
        # Where this process has imported Ray, it hands its copies of psutil and others on to the workers it starts.
        more = [entry for entry in theirs if entry not in ours and not entry.endswith("ray/thirdparty_files")]
        for folder in (first_entry, *more):
            if found := self._shadowed(folder):
                return found
        return None

    def _shadowed(self, folder: str) -> str | None:
        """What an import finds in `folder` before the version that the server imported."""
        try:
            files = list(os.scandir(folder or "."))
        except (FileNotFoundError, NotADirectoryError):
            return None
        for file in files:
            name, _, ending = file.name.partition(".")
            imports = ending == "py" or ending.endswith("so") or os.path.exists(f"{file.path}/__init__.py")
            if name in ("sitecustomize", "usercustomize") and imports:
                return f"{file.path} runs at the start of Python"
            if name in self.modules and imports and os.path.realpath(file.path) not in self.modules[name]:
                return f"{file.path} stands before the imported {name}"
        return None


class Children:
    """Forks, and what became of them."""

    def __init__(self, control: socket.socket, listening: socket.socket, path: list[str], imported: Imported) -> None:
        self._control, self._listening, self._path, self._imported = control, listening, path, imported
        self._counts: Counter[str] = Counter()
        self._asked: dict[int, int] = {}
        """Process id -> the process that asked for it."""
        self._fate_shared: set[int] = set()
        """Processes that are killed when nobody waits for them any more."""
        self._channels: dict[int, int | None] = {}
        """Process id -> descriptor of the test's channel; None when the test has closed it."""
        self._told: set[int] = set()
        self._wake, written = os.pipe()
        for end in (self._wake, written):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(written)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests

    def serve(self) -> NoReturn:
        while True:
            poll = select.poll()
            fixed = (self._control.fileno(), self._listening.fileno(), self._wake)
            for descriptor in (*fixed, *self._channels.values()):
                if descriptor is not None:
                    poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake in ready:
                os.read(self._wake, 1 << 16)
            for pid, channel in list(self._channels.items()):
                if channel in ready:
                    self._hear(pid, channel)
            for pid in [pid for pid in self._channels if pid not in self._told]:
                self._tell(pid)
            if self._control.fileno() in ready:
                os._exit(0)
            if self._listening.fileno() in ready:
                self._answer(self._listening.accept()[0])

    def _answer(self, connection: socket.socket) -> None:
        descriptors: list[int] = []
        with connection:
            request = _receive(connection, descriptors)
            if request is None:
                return
            if "who_asked_for" in request:
                _send(connection, {"pid": self._asked.get(request["who_asked_for"])})
                return
            if "counts" in request:
                _send(connection, {"counts": self._counts})
                return
            refusal = self._imported.why_not(request["environment"], request["first_entry"])
            self._counts[refusal or ""] += 1
            _send(connection, {"why_real": refusal})
            if refusal is None:
                pid = self._fork(request, [*descriptors, os.dup(connection.fileno())])
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                self._asked[pid] = _PEER.unpack(peer)[0]
                return
        for descriptor in descriptors:
            os.close(descriptor)

    def _hear(self, pid: int, channel: int) -> None:
        """The test has read the end of this process, or waits for it no more."""
        try:
            closed = not os.read(channel, 1)
        except ConnectionResetError:  # with the end unread
            closed = True
        self._channels[pid] = None
        if pid in self._told:
            self._reap(pid)
        elif closed and pid in self._fate_shared:
            os.kill(pid, signal.SIGKILL)
        os.close(channel)  # after it is reaped: the test waits for this

    def _tell(self, pid: int) -> None:
        """A process that has ended stays a zombie until the test knows: its id is not given to another."""
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        self._told.add(pid)
        channel = self._channels[pid]
        if channel is None:
            self._reap(pid)
            return
        core = 0x80 if ended.si_code == os.CLD_DUMPED else 0
        status = ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status | core
        with contextlib.suppress(BrokenPipeError):  # closed just now: `_hear` reaps it
            os.write(channel, _TOLD.pack(b"end ", status))

    def _reap(self, pid: int) -> None:
        os.waitpid(pid, 0)
        self._told.discard(pid)
        self._fate_shared.discard(pid)
        self._asked.pop(pid, None)
        del self._channels[pid]

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        threads = os.listdir("/proc/self/task")
        if len(threads) != 1 or threading.active_count() != 1:
            raise RuntimeError(
                f"{len(threads)} threads are running: a fork has one, and waits for ever for others' locks"
            )
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the fork has handlers of its own
        log = os.dup(2)
        pid = os.fork()
        if pid == 0:
            try:
                _begin(request, descriptors, self._path, self._imported.set_at_import)
                _finish(_run(request["words"]))
            except BaseException:
                for descriptor in (2, log):  # closed when the fork has begun
                    with contextlib.suppress(OSError):
                        os.write(descriptor, traceback.format_exc().encode())
            finally:  # no code of the server runs in a fork
                os._exit(70)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        self._channels[pid] = descriptors.pop()
        if request.get("fate_shared"):
            self._fate_shared.add(pid)
        for descriptor in (*descriptors, log):
            os.close(descriptor)
        return pid


# ---------------------------------------------------------------------------------------------------------------------
# In the fork
# ---------------------------------------------------------------------------------------------------------------------


def _begin(request: dict[str, Any], descriptors: list[int], path: list[str], set_at_import: dict[str, str]) -> None:
    """Become what a new interpreter is before it runs the first line."""
    if request["new_session"]:
        os.setsid()
    if request["process_group"] >= 0:
        os.setpgid(0, request["process_group"])
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update({**set_at_import, **request["environment"]})
    words, options = request["words"], request["options"]
    sys.orig_argv = [words[0], *(word for option in options for word in ("-W", option)), *words[1:]]
    sys.warnoptions.extend(options)
    warnings._processoptions(options)
    first = {"-m": request["cwd"], "-c": ""}.get(words[1], request["first_entry"])
    given = _entries(request["environment"], request["cwd"])
    sys.path[:] = [first, *given, *(entry for entry in path if entry not in given)]  # as site.py: nothing twice
    importlib.invalidate_caches()
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = request["cwd"]
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # else all forks draw the same
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if ENGINE_ADDRESS in os.environ and _ENGINE in sys.modules:
        _replace_starts_of_engines()
    if _WARM_RAY in os.environ:
        _when_imported("ray._private.ray_constants", _replace_starts_of_ray)
    _open_standard_streams()
    os.write(descriptors[-1], _TOLD.pack(b"pid ", os.getpid()))
    last = max(*map(int, os.listdir("/proc/self/fd")), *request["pass_fds"])
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, last + 1) for descriptor in descriptors[3:-1]]
    os.closerange(3, last + 1)
    for descriptor, number in zip(above, request["pass_fds"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def _when_imported(name: str, then: Callable[[Any], None]) -> None:
    """The server itself imports no Ray, which reads the variables of its workers when it is loaded."""

    class Finder:
        def find_spec(self, wanted: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if wanted != name:
                return None
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            spec = importlib.util.find_spec(wanted)
            assert spec is not None and spec.loader is not None
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


def _open_standard_streams() -> None:
    """As `create_stdio` in Python's pylifecycle.c. Handlers of loggers keep the old ones, on the same descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, mode = getattr(sys, name), "wb" if number else "rb"
        unbuffered = old.write_through  # PYTHONUNBUFFERED
        binary = open(number, mode, 0 if unbuffered and number else -1, closefd=False)  # noqa: SIM115
        getattr(binary, "raw", binary).name = f"<{name}>"
        stream = io.TextIOWrapper(
            binary, old.encoding, old.errors, "\n",
            line_buffering=not unbuffered and (number == 2 or binary.isatty()), write_through=unbuffered,
        )  # fmt: skip
        stream.mode = mode[0]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        _OLD_STREAMS.append(old)


_OLD_STREAMS: list[Any] = []


def _run(words: list[str]) -> int | None:
    """Run `-m module`, `-c code` or a script as `__main__`. Returns the exit status; None: killed by Ctrl-C."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=BuiltinImporter, __annotations__={})
    sys.modules["__main__"] = main
    try:
        if words[1] == "-m":
            sys.argv[:] = ["-m", *words[3:]]
            runpy._run_module_as_main(words[2])
        elif words[1] == "-c":
            sys.argv[:] = ["-c", *words[3:]]
            exec(compile(words[2], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            sys.argv[:] = words[1:]
            file = os.path.join(os.getcwd(), words[1])
            main.__dict__.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
            exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error.__traceback__ = _below_this_file(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return None if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _finish(status: int | None) -> NoReturn:
    """As `Py_FinalizeEx`, without the .7 CPU seconds in which it frees every module."""
    try:
        threading._shutdown()
    except BaseException as error:
        _ignored("Exception ignored in", threading, error)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = lambda found: _ignored(found.err_msg, found.object, found.exc_value)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, *_OLD_STREAMS[1:]):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception as error:
            if stream is sys.stdout:
                _ignored("Exception ignored in", stream, error)
            status = 120
    if status is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(130 if status is None else status)


def _ignored(what: str, where: object, error: BaseException) -> None:
    """As Python says it, without the frames of this file."""
    print(f"{what}: {where!r}", file=sys.stderr)
    traceback.print_exception(type(error), error, _below_this_file(error.__traceback__), chain=False)


def _below_this_file(frames: types.TracebackType | None) -> types.TracebackType | None:
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    except BaseException:
        traceback.print_exc()
    finally:  # without waiting for a thread that an import has started
        sys.stderr.flush()
        os._exit(1)
