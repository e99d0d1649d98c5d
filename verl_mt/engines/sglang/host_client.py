"""The colocated engine: its host process (`host.py`) at the other end of a socket pair."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from verl_mt.engines.sglang.client import Client
from verl_mt.engines.sglang.frames import encode, read_frame
from verl_mt.engines.sglang.process import OwnProcess
from verl_mt.errors import ConfigError, EngineError, EngineGoneError

_GOODBYE_S = 10.0
_LAST_WORDS_S = 3.0
"""How long a process that could not start its engine gets to write why."""


class HostClient(Client):
    """One life of one host process.

    Args:
        arguments: of `sglang.Engine`.
    """

    name = "colocated SGLang engine"
    local = True

    def __init__(self, arguments: dict[str, Any]):
        self._arguments = arguments
        self.num_ranks = int(arguments["tp_size"])
        self._process: OwnProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._reason: str | None = None
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = OwnProcess("verl_mt.engines.sglang.host", theirs.fileno(), [])
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode(self._arguments))
        try:
            first = await asyncio.wait_for(read_frame(reader), timeout_s)
        except TimeoutError:
            raise ConfigError(
                f"the SGLang engine did not start within {timeout_s:.0f} s ({self._process.describe()}); raise "
                "actor_rollout_ref.rollout.engine_timeout_s if the model is large or the machine busy"
            ) from None
        if first is None or first[1] != "ready":
            await asyncio.to_thread(self._process.end, _LAST_WORDS_S, keep_log=True)
            cause = "" if first is None else f": {first[2].strip()}"
            raise ConfigError(f"the SGLang engine could not be started{cause}\n{self._process.describe()}")
        self._reading = asyncio.ensure_future(self._read(reader))

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("generate", body)

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        try:
            answer = await asyncio.wait_for(self._ask(name, body), timeout_s)
        except TimeoutError:
            self.give_up(f"{name} was not answered within {timeout_s:.0f} s")
            raise self._gone_error() from None
        if not answer["success"]:
            raise EngineError(f"SGLang refused {name}: {answer.get('message', 'no reason given')}")

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
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._gone_error())

    async def stop(self) -> None:
        expected = self._reason is None
        self.give_up("it was closed")
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.end, _GOODBYE_S if expected else 0.0, keep_log=not expected)

    async def _ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
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
        await asyncio.to_thread(self._process.end, 0.0, keep_log=True)
        self.give_up(self._process.describe())

    def _gone_error(self) -> EngineGoneError:
        return EngineGoneError(f"the {self.name} is gone: {self._reason or 'it was never started'}")
