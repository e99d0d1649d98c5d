"""SGLang as seen from the rollout's event loop: in a separate process, on a running server, on a launched one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from verl_mt.engines.base import Receiver
from verl_mt.errors import ConfigError, EngineError, EngineGoneError, error_text
from verl_mt.extensions.cluster.replicas import open_files
from verl_mt.extensions.cluster.replicas.clients import CONNECT_S, ChildClient, Client, Endpoint
from verl_mt.extensions.cluster.replicas.processes import ChildProcess
from verl_mt.extensions.cluster.sglang.options import SGLangOptions, is_local
from verl_mt.extensions.cluster.sglang.processes import child, reserve_port
from verl_mt.extensions.cluster.sglang.server_check import check_server

_KEY = "actor_rollout_ref.rollout.servers"
_POLL_S = 0.25


class ColocatedClient(ChildClient):
    """The engine beside the actor.

    Args:
        arguments: of `sglang.Engine`.
        environment: variables of that process, beside ours.
    """

    kind = "SGLang"

    def __init__(self, arguments: dict[str, Any], environment: Mapping[str, str] | None = None):
        super().__init__(arguments, environment)
        self.num_ranks = int(arguments["tp_size"])

    def _spawn(self, descriptor: int) -> ChildProcess:
        saves = bool(self._arguments.get("enable_memory_saver"))
        return child(descriptor, ["engine"], self._environment, memory_saver=saves)


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

    def receiver(self) -> Receiver:
        call = _AtServer(self.name, self.url, self._life, tuple(self._headers.items()))
        return Receiver(call, self.num_ranks, self.on_gpu)

    @property
    def endpoint(self) -> Endpoint | None:
        return Endpoint(self.name, self._life, self.url, tuple(self._headers.items()))

    async def start(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(min(timeout_s, 30.0)), self._alone() as http:
                info = await check_server(http, self.url, self._options)
                self.num_ranks = int(info.get("tp_size") or 1)
                self.takes = info.get("max_running_requests")
                self.on_gpu = str(info.get("device", "")).startswith("cuda")
                interrupted = (await http.post("/end_weight_update", json={})).status_code == 200
                if interrupted:
                    # Somebody's update broke off in the middle: it would take no other one, and is paused.
                    await http.post("/continue_generation", json={})
                self.pristine = info.get("weight_version") == "default" and not interrupted
        except (httpx.HTTPError, TimeoutError) as error:
            raise ConfigError(
                f"{_KEY}: {self.url} does not answer ({type(error).__name__}: {error}); is an SGLang server running "
                "there, and reachable from this machine? `curl URL/model_info` must answer"
            ) from error

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._post("/generate", body, open_files.shared(self).requests)
        if response.status_code != 200:
            raise EngineError(f"{self.name} refused the request: {_error_text(response)}")
        return response.json()

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        asked = self._post(f"/{name}", _jsonable(body), open_files.shared(self).calls)
        _require_done(self.name, name, await self._in_time(name, asked, timeout_s))

    async def progress(self) -> Any:
        try:
            response = await open_files.shared(self).calls.get(f"{self.url}/v1/loads", self._headers, CONNECT_S)
        except httpx.HTTPError:
            return None
        loads = response.json().get("loads", []) if response.status_code == 200 else []
        return [(load.get("num_running_reqs"), load.get("num_used_tokens")) for load in loads] or None

    async def answers(self) -> bool:
        """Whether the server serves."""
        try:
            response = await open_files.shared(self).calls.get(f"{self.url}/health", self._headers, CONNECT_S)
        except (httpx.HTTPError, EngineError):
            return False
        return response.status_code == 200

    async def stop(self) -> None:
        self.give_up("it was closed")
        await open_files.leave(self)

    def _alone(self) -> httpx.AsyncClient:
        """A connection for the start."""
        return httpx.AsyncClient(base_url=self.url, headers=self._headers, timeout=CONNECT_S, trust_env=False)

    async def _post(self, path: str, body: dict[str, Any], by: open_files.Connections) -> httpx.Response:
        if self._reason is not None:
            raise self._gone_error()
        for left in (1, 0):
            try:
                return await self._unless_gone(by.post(self.url + path, body, self._headers))
            except httpx.TransportError as error:
                # A server closes a connection that nobody used for seconds, perhaps just when this process does. So a
                # connection that was lost is no death, as long as the server answers.
                lost = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
                if not (left and lost and not isinstance(error, httpx.ConnectError) and await self.answers()):
                    self.give_up(f"{path} failed: {type(error).__name__}: {error}")
                    raise self._gone_error() from error
        raise AssertionError("the second try returns or raises")


@dataclass(frozen=True)
class _AtServer:
    """`HttpClient.call` for a thread, here or in a rank."""

    server: str
    url: str
    life: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)

    def __call__(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
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
            self._process = child(reading, ["server", *words], memory_saver=saves)
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
