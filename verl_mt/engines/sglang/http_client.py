"""An SGLang HTTP server: one that is running somewhere, or one that is launched here."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from typing import Any

import httpx

from verl_mt.engines.sglang.client import Client
from verl_mt.engines.sglang.options import SGLangOptions, is_local
from verl_mt.engines.sglang.process import OwnProcess
from verl_mt.engines.sglang.server_check import check_server
from verl_mt.errors import ConfigError, EngineError, EngineGoneError

_KEY = "actor_rollout_ref.rollout.servers"
_CONNECT_S = 10.0
_POLL_S = 0.25
_KEEP_ALIVE_S = 2.0
"""Below uvicorn's 5 s, so that a connection is never used in the moment in which the server closes it."""


class HttpClient(Client):
    """One server, from when it answers until it does not.

    Args:
        url: `http://host:port`.
        options: what the server must be; see `server_check`.
    """

    def __init__(self, url: str, options: SGLangOptions):
        self.name = f"SGLang server {url}"
        self.url = url
        self.local = is_local(url)
        self._options = options
        key = os.environ.get("SGLANG_API_KEY")
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # A server in the cluster is reached directly, whatever proxy this machine has for the world outside.
            trust_env=False,
        )
        self._reason: str | None = None
        self._gone = asyncio.Event()

    async def start(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(min(timeout_s, 30.0)):
                info = await check_server(self._http, self.url, self._options)
                self.num_ranks = int(info.get("tp_size") or 1)
                self.on_gpu = str(info.get("device", "")).startswith("cuda")
                self.pristine = info.get("weight_version") == "default"
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
        try:
            response = await asyncio.wait_for(self._post(f"/{name}", _jsonable(body)), timeout_s)
        except TimeoutError:
            self.give_up(f"{name} was not answered within {timeout_s:.0f} s")
            raise self._gone_error() from None
        if response.status_code == 404:
            raise EngineError(f"{self.name} has no call {name}: it is too old; start SGLang 0.5.23 there")
        if response.status_code != 200:
            raise EngineError(f"{self.name} refused {name}: {_error_text(response)}")

    async def answers(self) -> bool:
        """Whether the server serves."""
        try:
            response = await self._http.get("/health", timeout=_CONNECT_S)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    @property
    def is_gone(self) -> bool:
        return self._reason is not None

    async def wait_gone(self) -> str:
        await self._gone.wait()
        return self._reason or ""

    def give_up(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            self._gone.set()

    async def stop(self) -> None:
        self.give_up("it was closed")
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer; or the news that the server is gone, if that comes first."""
        if self._reason is not None:
            raise self._gone_error()
        answer = asyncio.ensure_future(self._http.post(path, json=body))
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._gone_error()
            return answer.result()
        except httpx.TransportError as error:
            self.give_up(f"{path} failed: {type(error).__name__}: {error}")
            raise self._gone_error() from error
        finally:
            answer.cancel()
            gone.cancel()

    def _gone_error(self) -> EngineGoneError:
        return EngineGoneError(f"the {self.name} is gone: {self._reason}")


class LaunchedServer(HttpClient):
    """A server that is started here and ends with us.

    Args:
        number: which of the launched ones; decides on its GPUs.
    """

    def __init__(self, options: SGLangOptions, number: int = 0):
        super().__init__(f"http://127.0.0.1:{_free_port()}", options)
        self._number = number
        self._process: OwnProcess | None = None
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        port = self.url.rpartition(":")[2]
        words = [*self._options.command_line(self._number), "--host", "127.0.0.1", "--port", port]
        reading, self._lifeline = os.pipe()
        try:
            self._process = OwnProcess("verl_mt.engines.sglang.launched_server", reading, words)
        finally:
            os.close(reading)
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.answers():
                    if self._process.ended:
                        raise ConfigError(f"the {self.name} could not be started: {self._process.describe()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ConfigError(
                f"the {self.name} did not start within {timeout_s:.0f} s ({self._process.describe()}); raise "
                "actor_rollout_ref.rollout.engine_timeout_s if the model is large or the machine busy"
            ) from None
        await super().start(timeout_s)
        self.pristine = True

    async def wait_gone(self) -> str:
        assert self._process is not None
        while not self._process.ended and self._reason is None:
            await asyncio.wait({asyncio.ensure_future(self._gone.wait())}, timeout=_POLL_S)
        await asyncio.to_thread(self._process.end, 0.0, keep_log=True)
        self.give_up(self._process.describe())
        return await super().wait_gone()

    async def stop(self) -> None:
        expected = self._reason is None
        await super().stop()
        if self._process is not None:
            await asyncio.to_thread(self._process.end, 0.0, keep_log=not expected)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _jsonable(body: dict[str, Any]) -> dict[str, Any]:
    payloads = body.get("serialized_named_tensors")
    if payloads is None:
        return body
    return {**body, "serialized_named_tensors": [base64.b64encode(p).decode() for p in payloads]}


def _error_text(response: httpx.Response) -> str:
    return f"status {response.status_code}: {response.text.strip()[:500]}"
