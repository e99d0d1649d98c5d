"""SGLang as seen from the rollout's event loop: in a separate process, on a running server, on a launched one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

import httpx

from verl_mt.errors import ConfigError, EngineError
from verl_mt.extensions.cluster.replicas.clients import CONNECT_S, EMPTY, ChildClient
from verl_mt.extensions.cluster.replicas.processes import ChildProcess
from verl_mt.extensions.cluster.replicas.servers import Post, ServerClient
from verl_mt.extensions.cluster.sglang.options import SGLangOptions
from verl_mt.extensions.cluster.sglang.processes import (
    CHECKSUMS,
    checksums_of,
    child,
    extras,
    reserve_port,
    still_random,
)
from verl_mt.extensions.cluster.sglang.server_check import check_server
from verl_mt.extensions.cluster.versions import SGLANG

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


class HttpClient(ServerClient):
    """One server of SGLang, from when it answers until it does not.

    Args:
        url: `http://host:port`.
        options: what the server must be; see `server_check`.
        headers: of each request; None = the key of SGLANG_API_KEY, if there is one.
    """

    kind = "SGLang"
    tested = f"SGLang {SGLANG.newest}"
    key_variable = "SGLANG_API_KEY"
    asks = "/model_info"

    def __init__(self, url: str, options: SGLangOptions, headers: dict[str, str] | None = None):
        super().__init__(url, headers)
        self._options = options

    @staticmethod
    def posts(name: str, body: dict[str, Any]) -> list[Post]:
        payloads = body.get("serialized_named_tensors")
        if payloads is not None:
            body = {**body, "serialized_named_tensors": [base64.b64encode(p).decode() for p in payloads]}
        return [Post(f"/{name}", body | extras(name))]

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._generated("/generate", body)

    async def progress(self) -> Any:
        try:
            response = await self._connections().calls.get(f"{self.url}/v1/loads", self._headers, CONNECT_S)
        except httpx.HTTPError:
            return None
        loads = response.json().get("loads", []) if response.status_code == 200 else []
        return [(load.get("num_running_reqs"), load.get("num_used_tokens")) for load in loads] or None

    async def _attach(self, http: httpx.AsyncClient) -> None:
        info = await check_server(http, type(self), self._options, empty=self.starts_empty)
        self.num_ranks = int(info.get("tp_size") or 1)
        self.takes = info.get("max_running_requests")
        self.on_gpu = str(info.get("device", "")).startswith("cuda")
        interrupted = (await http.post("/end_weight_update", json={})).status_code == 200
        if interrupted:
            # Somebody's update broke off in the middle: it would take no other one, and is paused.
            await http.post("/continue_generation", json={})
        self.pristine = info.get("weight_version") == "default" and not interrupted


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
        self._random: dict[str, str] = {}
        """Checksums of the weights of a server that has read no files, until its first update."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        """Runs on the client's loop. Waits for the server to load the model."""
        port = self.url.rpartition(":")[2]
        words = [*self._options.command_line(self._number), "--host", "127.0.0.1", "--port", port]
        words += ["--load-format", EMPTY["load_format"]] if self.starts_empty else []
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
        self._random = await self._checksums(timeout_s) if self.starts_empty else {}

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        """The first update has to replace all weights of a server that has read no files."""
        await super().call(name, body, timeout_s)
        if name == "end_weight_update" and (before := self._random):
            self._random = {}
            if wrong := still_random(before, await self._checksums(timeout_s)):
                raise EngineError(f"{self.name} refused {name}: {wrong}")

    async def _checksums(self, timeout_s: float) -> dict[str, str]:
        asked = self._post(Post("/weights_checker", CHECKSUMS), self._connections().calls)
        response = await self._in_time("weights_checker", asked, timeout_s)
        return checksums_of(response.json().get("ranks") if response.status_code == 200 else None)

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
