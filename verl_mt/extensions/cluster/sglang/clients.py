"""One SGLang engine as seen from the rollout's event loop: colocated, on a running server, on one that is launched."""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import os
import secrets
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from verl_mt.engines.base import EngineHost, Receiver
from verl_mt.errors import ConfigError, EngineError, EngineGoneError, error_text
from verl_mt.extensions.cluster.sglang.options import SGLangOptions, is_local
from verl_mt.extensions.cluster.sglang.processes import ChildProcess, ProcessGroup, encode, read_frame, reserve_port
from verl_mt.extensions.cluster.sglang.server_check import check_server

T = TypeVar("T")
_MODULE = "verl_mt.engines.sglang.processes"
_COLOCATED = "verl_mt.engines.sglang.clients.ColocatedClient"
_KEY = "actor_rollout_ref.rollout.servers"
_GOODBYE_S = 10.0
_LAST_WORDS_S = 3.0
"""How long a process that could not start its engine gets to write why."""
_CONNECT_S = 10.0
_POLL_S = 0.25
_KEEP_ALIVE_S = 2.0
"""Below uvicorn's 5 s, so that a connection is never used in the moment in which the server closes it."""


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


class Client(abc.ABC):
    """Names of calls are those of SGLang's HTTP endpoints; bodies are theirs, too.

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
    pristine = True
    """Since it was started, nobody has changed the weights of the model's files."""

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
        """An engine that does not answer a call holds weights or caches that nobody knows: it is given up."""
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


class ColocatedClient(Client):
    """The engine beside the actor: its process at the other end of a socket pair.

    Args:
        arguments: of `sglang.Engine`.
        environment: variables of that process, beside ours.
    """

    name = "colocated SGLang engine"
    local = True

    def __init__(self, arguments: dict[str, Any], environment: Mapping[str, str] | None = None):
        super().__init__()
        self._arguments = arguments
        self._environment = environment
        self.num_ranks = int(arguments["tp_size"])
        self._process: ChildProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def launch(self, earlier: ProcessGroup | None = None) -> ProcessGroup:
        """Begin to start; returns whom to end if this process cannot any more.

        Runs on the client's loop. Waits for the end of `earlier`, in a thread.

        Args:
            earlier: of an engine that had the same devices. Who held it was killed and could not end it: it is ended
                before this one begins.
        """
        if earlier is not None:
            await asyncio.to_thread(earlier.end)
        ours, theirs = socket.socketpair()
        with theirs:
            saves = bool(self._arguments.get("enable_memory_saver"))
            number = theirs.fileno()
            self._process = ChildProcess(_MODULE, number, ["engine"], self._environment, memory_saver=saves)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode(self._arguments))
        return ProcessGroup.of(self._process)

    async def start(self, timeout_s: float) -> None:
        """Runs on the client's loop. Waits for the engine's process to load the model."""
        if self._process is None:
            await self.launch()
        assert self._process is not None and self._reader is not None
        try:
            first = await asyncio.wait_for(read_frame(self._reader), timeout_s)
        except TimeoutError:
            raise self._too_slow(timeout_s, self._process) from None
        if first is None or first[1] != "ready":
            await asyncio.to_thread(self._process.end, _LAST_WORDS_S, keep_log=True)
            cause = "" if first is None else f": {first[2].strip()}"
            raise ConfigError(f"the SGLang engine could not be started{cause}\n{self._process.describe()}")
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
            raise EngineError(f"SGLang refused {name}: {answer.get('message', 'no reason given')}")

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
                future.set_exception(EngineError(f"SGLang refused: {result}"))
        assert self._process is not None
        # First ended, then told: a new life that began before would find the GPU's memory and the ports still taken.
        await asyncio.to_thread(self._process.end, 0.0, keep_log=True)
        self.give_up(self._process.describe())


class HostedClient(Client):
    """An engine beside ranks of the worker group, or on devices of its own: a `ColocatedClient` in a process there.

    Args:
        host: where.
        options: of the engine.
        number: of the replica: equal ones with equal seeds would sample the same.
        last: the process group of this replica's last engine, kept here by each client for the next; empty at first.
    """

    local = False

    def __init__(self, host: EngineHost, options: SGLangOptions, number: int, last: list[ProcessGroup]):
        super().__init__()
        self.name = f"SGLang {host.name}" if host.rank is None else f"SGLang engine beside {host.name}"
        self.host = host
        self.num_ranks = host.num_ranks
        self.on_gpu = host.on_gpu
        self._arguments = options.engine_arguments()
        self._arguments["random_seed"] += number
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
            await asyncio.wait_for(self.host.make(_COLOCATED, self._arguments, environment), timeout_s)
            self._last[:] = [await self.host.call("launch", *self._last)]
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
        await self._in_time(name, self._ask("call", name, body, timeout_s), timeout_s + _CONNECT_S)

    async def stop(self) -> None:
        lost = self._reason
        self.give_up("it was closed")
        if self._watching is not None:
            self._watching.cancel()
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self.host.call("end", lost), _GOODBYE_S + _CONNECT_S)
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
        self.ask("call", name, body, timeout_s, timeout_s=timeout_s + _CONNECT_S)


class HttpClient(Client):
    """One server, from when it answers until it does not.

    Args:
        url: `http://host:port`.
        options: what the server must be; see `server_check`.
        headers: of each request; None = the key of SGLANG_API_KEY, if there is one.
    """

    def __init__(self, url: str, options: SGLangOptions, headers: dict[str, str] | None = None):
        super().__init__()
        self.name = f"SGLang server {url}"
        self.url = url
        self.local = is_local(url)
        self._options = options
        key = os.environ.get("SGLANG_API_KEY")
        self._headers = headers if headers is not None else {"Authorization": f"Bearer {key}"} if key else {}
        self._life = uuid.uuid4().hex
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            headers=self._headers,
            # A server in the cluster is reached directly, whatever proxy this machine has for the world outside.
            trust_env=False,
        )

    def receiver(self) -> Receiver:
        call = _AtServer(self.name, self.url, self._life, tuple(self._headers.items()))
        return Receiver(call, self.num_ranks, self.on_gpu)

    @property
    def endpoint(self) -> Endpoint | None:
        return Endpoint(self.name, self._life, self.url, tuple(self._headers.items()))

    async def start(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(min(timeout_s, 30.0)):
                info = await check_server(self._http, self.url, self._options)
                self.num_ranks = int(info.get("tp_size") or 1)
                self.on_gpu = str(info.get("device", "")).startswith("cuda")
                interrupted = (await self._http.post("/end_weight_update", json={})).status_code == 200
                if interrupted:
                    # Somebody's update broke off in the middle: it would take no other one, and is paused.
                    await self._http.post("/continue_generation", json={})
                self.pristine = info.get("weight_version") == "default" and not interrupted
        except (httpx.HTTPError, TimeoutError) as error:
            raise ConfigError(
                f"{_KEY}: {self.url} does not answer ({type(error).__name__}: {error}); is an SGLang server running "
                "there, and reachable from this machine? `curl URL/model_info` must answer"
            ) from error

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._post("/generate", body)
        if response.status_code != 200:
            raise EngineError(f"{self.name} refused the request: {_error_text(response)}")
        return response.json()

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        _require_done(self.name, name, await self._in_time(name, self._post(f"/{name}", _jsonable(body)), timeout_s))

    async def answers(self) -> bool:
        """Whether the server serves."""
        try:
            response = await self._http.get("/health", timeout=_CONNECT_S)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def stop(self) -> None:
        self.give_up("it was closed")
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if self._reason is not None:
            raise self._gone_error()
        try:
            return await self._unless_gone(self._http.post(path, json=body))
        except httpx.TransportError as error:
            self.give_up(f"{path} failed: {type(error).__name__}: {error}")
            raise self._gone_error() from error


@dataclass(frozen=True)
class _AtServer:
    """`HttpClient.call` for a thread, here or in a rank."""

    server: str
    url: str
    life: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)

    def __call__(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        with httpx.Client(timeout=timeout, headers=dict(self.headers), trust_env=False) as http:
            try:
                response = http.post(f"{self.url}/{name}", json=_jsonable(body))
            except httpx.HTTPError as error:
                reason = f"{name} failed: {error_text(error, named=True)}"
                raise EngineGoneError(f"the {self.server} is gone: {reason}") from error
        _require_done(self.server, name, response)


class LaunchedServer(HttpClient):
    """A server that is started here and ends with us. It answers only to a random key, which changes with each life.

    Args:
        options: of the engine.
        number: which of the launched ones; decides on its GPUs.
    """

    def __init__(self, options: SGLangOptions, number: int = 0):
        self._reserved, self._key = reserve_port(), secrets.token_urlsafe(32)
        headers = {"Authorization": f"Bearer {self._key}"}
        super().__init__(f"http://127.0.0.1:{self._reserved.getsockname()[1]}", options, headers)
        self._number = number
        self._process: ChildProcess | None = None
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        """Runs on the client's loop. Waits for the server to load the model."""
        port = self.url.rpartition(":")[2]
        words = [*self._options.command_line(self._number), "--host", "127.0.0.1", "--port", port]
        reading, self._lifeline = os.pipe()
        os.write(self._lifeline, self._key.encode())
        try:
            saves = "--enable-memory-saver" in words
            self._process = ChildProcess(_MODULE, reading, ["server", *words], memory_saver=saves)
        finally:
            os.close(reading)
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.answers():
                    if self._process.ended:
                        raise ConfigError(f"the {self.name} could not be started: {self._process.describe()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self._too_slow(timeout_s, self._process) from None
        finally:
            self._reserved.close()
        await asyncio.to_thread(self._process.mark_shared_memory)
        await super().start(timeout_s)
        self.pristine = True

    async def wait_gone(self) -> str:
        """Runs on the client's loop. Waits for the end of the process."""
        assert self._process is not None
        while not self._process.ended and self._reason is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), _POLL_S)
        await asyncio.to_thread(self._process.end, 0.0, keep_log=True)
        self.give_up(self._process.describe())
        return await super().wait_gone()

    async def stop(self) -> None:
        """Runs on the client's loop. Waits for the end of the process, in a thread."""
        expected = self._reason is None
        self._reserved.close()
        await super().stop()
        if self._process is not None:
            await asyncio.to_thread(self._process.end, 0.0, keep_log=not expected)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def _jsonable(body: dict[str, Any]) -> dict[str, Any]:
    payloads = body.get("serialized_named_tensors")
    if payloads is None:
        return body
    return {**body, "serialized_named_tensors": [base64.b64encode(p).decode() for p in payloads]}


def _require_done(server: str, name: str, response: httpx.Response) -> None:
    """Raises:
    EngineError: the server refused the call.
    """
    if response.status_code == 404:
        raise EngineError(f"{server} has no call {name}: it is too old; start SGLang 0.5.23 there")
    if response.status_code != 200:
        raise EngineError(f"{server} refused {name}: {_error_text(response)}")


def _error_text(response: httpx.Response) -> str:
    return f"status {response.status_code}: {response.text.strip()[:500]}"
