"""One engine as seen from the rollout's event loop: in a separate process here, or beside ranks elsewhere."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_mt.engines.base import EngineHost, Receiver
from verl_mt.errors import ConfigError, EngineError, EngineGoneError, error_text
from verl_mt.extensions.cluster.replicas.processes import ChildProcess, ProcessGroup, encode, read_frame

T = TypeVar("T")
_GOODBYE_S = 10.0
_LAST_WORDS_S = 3.0
"""How long a process that could not start its engine gets to write why."""
CONNECT_S = 10.0
EMPTY = {"load_format": "dummy"}
"""Of SGLang and vLLM: the argument of an engine that reads no files. Its weights are random until they are sent."""


@dataclass(frozen=True)
class Endpoint:
    """Where one life of an engine is asked from other processes. It is pickled, and equal where it is the same life."""

    name: str
    life: str
    url: str = ""
    """Of an HTTP server; otherwise `ask` says how."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    ask: Any = None
    """What `EngineHost.caller` gave."""

    async def generate(self, body: dict[str, Any]) -> Any:
        """As `Client.generate`, where there is no server."""
        return await self.ask.later("generate", body)

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        """As `Client.call`, where there is no server."""
        await self.ask.later("call", name, body, timeout_s)

    async def progress(self) -> Any:
        """As `Client.progress`, where there is no server."""
        return await self.ask.later("progress")


class Client(abc.ABC):
    """Names of calls are those of SGLang's HTTP endpoints; bodies and answers are theirs, too. Another engine's process
    translates them, with two differences: it takes what its turns say (`Turn.body`), and a bucket of weights as its
    publisher describes it.

    A client serves one life of an engine: after `wait_gone` has returned it is of no more use.
    """

    name: str
    """For messages."""
    local: bool
    """It runs on this machine and can open this machine's shared memory."""
    url: str = ""
    """Of an HTTP server."""
    num_ranks = 1
    """Over which the model is split (tensor parallelism)."""
    on_gpu = False
    """A server whose weights are on a GPU, as far as it says."""
    takes: int | None = None
    """Requests that it decodes at once, where it tells."""
    pristine = True
    """Since it was started, nobody has changed the weights of the model's files."""
    starts_empty = False
    """Set before the start of a launched engine: it reads no files, and has no weights until the first update."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the engine's main process; None where it is not ours."""
        return None

    @abc.abstractmethod
    async def start(self, timeout_s: float) -> None:
        """Connect, and wait until the engine serves.

        Raises:
            ConfigError: it cannot be started or reached, or is not the engine that is wanted.
        """

    @abc.abstractmethod
    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/generate` to a request with `input_ids`.

        Raises:
            EngineError: the engine refused the request.
            EngineGoneError: the engine went away.
        """

    @abc.abstractmethod
    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        """Anything else, by its endpoint's name.

        Raises:
            EngineError: the engine refused.
            EngineGoneError: the engine went away, or did not answer in time and was given up.
        """

    async def progress(self) -> Any:
        """Something that changes with each token that the engine samples, or soon after it; None = it does not tell.

        Raises:
            EngineError: it does not answer.
        """
        return None

    def receiver(self) -> Receiver:
        """The engine as its publisher sees it, from any thread."""
        return Receiver(_OnLoop(self, asyncio.get_running_loop()), self.num_ranks, self.on_gpu)

    @property
    def endpoint(self) -> Endpoint | None:
        """For rollout workers; None = only this process can ask it."""
        return None

    @property
    def is_gone(self) -> bool:
        """Whether `wait_gone` would return at once."""
        return self._reason is not None

    async def wait_gone(self) -> str:
        """Return, with the reason, when the engine has gone away. Runs on the client's loop."""
        await self._gone.wait()
        return self._reason or ""

    def give_up(self, reason: str) -> None:
        """Treat the engine as gone: what waits for it raises `EngineGoneError`, and `wait_gone` returns."""
        if self._reason is None:
            self._reason = reason
            self._gone.set()

    @abc.abstractmethod
    async def stop(self) -> None:
        """End the engine if it is ours, else leave it in peace. Idempotent; never raises."""

    async def _in_time(self, name: str, answer: Awaitable[T], timeout_s: float) -> T:
        """An engine that does not answer in time is stopped: the state of its weights and caches is unknown."""
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            self.give_up(f"{name} was not answered within {timeout_s:.0f} s")
            raise self._gone_error() from None

    async def _unless_gone(self, call: Coroutine[Any, Any, T]) -> T:
        """Its result; or the news that the engine is gone, if that comes first. Runs on the client's loop. Waits for
        the engine."""
        answer, gone = asyncio.ensure_future(call), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._gone_error()
            return answer.result()
        finally:
            answer.cancel()
            gone.cancel()

    def _gone_error(self) -> EngineGoneError:
        return EngineGoneError(f"the {self.name} is gone: {self._reason or 'it was never started'}")

    def _too_slow(self, timeout_s: float, process: ChildProcess) -> ConfigError:
        return ConfigError(
            f"the {self.name} did not start within {timeout_s:.0f} s ({process.describe()}); raise "
            "actor_rollout_ref.rollout.engine_timeout_s if the model is large or the machine busy"
        )


@dataclass(frozen=True)
class _OnLoop:
    """`Client.call` for a thread."""

    client: Client
    loop: asyncio.AbstractEventLoop

    def __call__(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        """Runs in a thread that publishes weights. Waits for the answer, on the client's loop."""
        asyncio.run_coroutine_threadsafe(self.client.call(name, body, timeout_s), self.loop).result()


class ChildClient(Client):
    """An engine's own process, at the other end of a socket pair.

    Args:
        arguments: of the engine.
        environment: variables of that process, beside ours.
    """

    kind = "engine"
    """What the engine is called in messages."""
    local = True

    def __init__(self, arguments: dict[str, Any], environment: Mapping[str, str] | None = None):
        super().__init__()
        self.name = f"colocated {self.kind} engine"
        self._arguments = arguments
        self._environment = environment
        self._process: ChildProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0

    @abc.abstractmethod
    def _spawn(self, descriptor: int) -> ChildProcess:
        """The process, which takes frames from this descriptor."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def launch(self, empty: bool = False, earlier: ProcessGroup | None = None) -> ProcessGroup:
        """Begin to start; returns whom to end if this process cannot any more.

        Runs on the client's loop. Waits for the end of `earlier`, in a thread.

        Args:
            empty: see `Client.starts_empty`.
            earlier: of an engine that had the same devices. Who held it was killed and could not end it: it is ended
                before this one begins.
        """
        if earlier is not None:
            await asyncio.to_thread(earlier.end)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawn(theirs.fileno())
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode(self._arguments | (EMPTY if empty else {})))
        return ProcessGroup.of(self._process)

    async def start(self, timeout_s: float) -> None:
        """Runs on the client's loop. Waits for the engine's process to load the model."""
        if self._process is None:
            await self.launch(self.starts_empty)
        assert self._process is not None and self._reader is not None
        try:
            first = await asyncio.wait_for(read_frame(self._reader), timeout_s)
        except TimeoutError:
            raise self._too_slow(timeout_s, self._process) from None
        if first is None or first[1] != "ready":
            await asyncio.to_thread(self._process.end, _LAST_WORDS_S, keep_log=True)
            cause = "" if first is None else f": {first[2].strip()}"
            raise ConfigError(f"the {self.kind} engine could not be started{cause}\n{self._process.describe()}")
        await asyncio.to_thread(self._process.mark_shared_memory)
        self._reading = asyncio.ensure_future(self._read(self._reader))

    async def end(self, lost: str | None) -> None:
        """`stop`, for who is in another process and gave it up, or not (None)."""
        if lost is not None:
            self.give_up(lost)
        await self.stop()

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("generate", body)

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        answer = await self._in_time(name, self._ask(name, body), timeout_s)
        if not answer["success"]:
            raise EngineError(f"{self.kind} refused {name}: {answer.get('message', 'no reason given')}")

    async def progress(self) -> Any:
        return (await self._ask("progress", {})).get("seen")

    def give_up(self, reason: str) -> None:
        super().give_up(reason)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._gone_error())

    async def stop(self) -> None:
        """Runs on the client's loop. Waits for the end of the process, in a thread."""
        expected = self._reason is None
        self.give_up("it was closed")
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.end, _GOODBYE_S if expected else 0.0, keep_log=not expected)

    async def _ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        # Without this check a question asked just after a death would wait for ever: nobody reads answers any more.
        """Runs on the client's loop. Waits for `_read` to get the answer."""
        if self._reason is not None or self._writer is None:
            raise self._gone_error()
        self._number += 1
        number = self._number
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._writer.write(encode((number, name, body)))
            return await future
        finally:
            del self._waiting[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Runs on the client's loop. Waits for frames of the engine's process, until it is gone."""
        while (frame := await read_frame(reader)) is not None:
            number, kind, result = frame
            future = self._waiting.get(number)
            if future is None or future.done():
                continue
            if kind == "ok":
                future.set_result(result)
            else:
                future.set_exception(EngineError(f"{self.kind} refused: {result}"))
        assert self._process is not None
        # First ended, then told: a new life that began before would find the GPU's memory and the ports still taken.
        await asyncio.to_thread(self._process.end, 0.0, keep_log=True)
        self.give_up(self._process.describe())


class HostedClient(Client):
    """An engine beside ranks of the worker group, or on separate devices: a `ChildClient` in a process there.

    Args:
        host: where.
        path: dotted path of the class of that client.
        arguments: of the engine.
        kind: of the engine, for messages.
        last: the process group of this replica's last engine, kept here by each client for the next; empty at first.
    """

    local = False

    def __init__(self, host: EngineHost, path: str, arguments: dict[str, Any], kind: str, last: list[ProcessGroup]):
        super().__init__()
        self.name = f"{kind} {host.name}" if host.rank is None else f"{kind} engine beside {host.name}"
        self.host = host
        self.num_ranks = host.num_ranks
        self.on_gpu = host.on_gpu
        self._path = path
        self._arguments = arguments
        self._last = last
        self._life = uuid.uuid4().hex
        self._pid: int | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._pid

    async def start(self, timeout_s: float) -> None:
        # Said where there are none, too: a machine may have GPUs that the ranks do not use.
        devices = self.host.devices
        environment = {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        try:
            await asyncio.wait_for(self.host.make(self._path, self._arguments, environment), timeout_s)
            self._last[:] = [await self.host.call("launch", self.starts_empty, *self._last)]
            self._pid = self._last[0].pid
            await self.host.call("start", timeout_s)
        except (EngineGoneError, TimeoutError) as error:
            reason = error_text(error) or f"no process for it within {timeout_s:.0f} s"
            raise ConfigError(f"the {self.name} could not be started: {reason}") from error
        self._watching = asyncio.ensure_future(self._watch())

    def receiver(self) -> Receiver:
        return Receiver(_Hosted(self.host.caller()), self.num_ranks, self.on_gpu, self.host.rank)

    @property
    def endpoint(self) -> Endpoint | None:
        return Endpoint(self.name, self._life, ask=self.host.caller())

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("generate", body)

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        # Its own deadline ends the engine there; this one is for a machine that does not answer any more.
        await self._in_time(name, self._ask("call", name, body, timeout_s), timeout_s + CONNECT_S)

    async def progress(self) -> Any:
        return await self._ask("progress")

    async def stop(self) -> None:
        lost = self._reason
        self.give_up("it was closed")
        if self._watching is not None:
            self._watching.cancel()
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self.host.call("end", lost), _GOODBYE_S + CONNECT_S)
        await self.host.end()

    async def _watch(self) -> None:
        try:
            self.give_up(await self.host.call("wait_gone"))
        except EngineError as error:
            self.give_up(str(error))

    async def _ask(self, method: str, *args: Any) -> Any:
        if self._reason is not None:
            raise self._gone_error()
        try:
            return await self._unless_gone(self.host.call(method, *args))
        except EngineGoneError as error:
            self.give_up(str(error))
            raise


@dataclass(frozen=True)
class _Hosted:
    """`HostedClient.call` for a rank."""

    ask: Callable[..., Any]

    def __call__(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        self.ask("call", name, body, timeout_s, timeout_s=timeout_s + CONNECT_S)
