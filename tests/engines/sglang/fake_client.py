"""An SGLang engine that exists on paper: its answers are written by the test, its calls are recorded."""

from __future__ import annotations

import asyncio
from typing import Any

from verl_mt.errors import EngineGoneError
from verl_mt.extensions.cluster.replicas.clients import Client
from verl_mt.extensions.cluster.sglang.engine import SGLangEngine
from verl_mt.extensions.cluster.sglang.options import SGLangOptions


def answer(ids, reason="stop", *, versions=None, cached=0, **more) -> dict[str, Any]:
    """What `/generate` returns: `versions` = [(version, start, end), ...]."""
    meta = {
        "finish_reason": {"type": reason, **more},
        "output_token_logprobs": [(-0.25, token, None) for token in ids],
        "cached_tokens": cached,
        "weight_version": "0",
    }
    if versions is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in versions]
    return {"meta_info": meta}


class FakeClient(Client):
    """Answers a request with what `script` returns for its body; one that gets None waits until it is aborted."""

    name = "fake engine"
    local = True

    def __init__(self, script, log, *, pristine=True, start_error=None):
        self.script, self.calls, self.pristine, self.start_error = script, log, pristine, start_error
        self.aborts: dict[str, asyncio.Event] = {}
        self.gone = asyncio.Event()
        self.reason = ""
        self.refuse: dict[str, Exception] = {}

    async def start(self, timeout_s):
        self.calls.append(("start", {}))
        if self.start_error is not None:
            raise self.start_error

    async def generate(self, body):
        self.calls.append(("generate", body))
        event = self.aborts.setdefault(body["rid"], asyncio.Event())
        result = self.script(body)
        if result is not None:
            await asyncio.sleep(0)
            return result
        waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.gone.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if self.gone.is_set():
            raise EngineGoneError(self.reason)
        return answer([7, 8], "abort", message="Aborted")

    async def call(self, name, body, timeout_s):
        if self.gone.is_set():
            raise EngineGoneError(self.reason)
        self.calls.append((name, body))
        if name in self.refuse:
            raise self.refuse[name]
        if name == "abort_request" and body["rid"] in self.aborts:
            self.aborts[body["rid"]].set()

    @property
    def is_gone(self):
        return self.gone.is_set()

    async def wait_gone(self):
        await self.gone.wait()
        return self.reason

    def give_up(self, reason):
        self.reason = reason
        self.gone.set()

    async def stop(self):
        self.give_up(self.reason or "closed")


class FakeEngine(SGLangEngine):
    """The real engine over fake clients, one per life; `lives` holds them in order."""

    def __init__(self, script, *, num_replicas=1, options=None, make=FakeClient, ours=True):
        self.script, self.num_replicas, self.make_client, self.ours = script, num_replicas, make, ours
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.lives: list[Any] = []
        urls = () if ours else tuple(f"http://127.0.0.1:{i + 1}" for i in range(num_replicas))
        super().__init__(
            options or SGLangOptions("verl_mt://tiny", 100, end_token_ids=frozenset({3}), timeout_s=600.0, servers=urls)
        )

    def _makers(self):
        def make():
            self.lives.append(self.make_client(self.script, self.calls))
            return self.lives[-1]

        return [make] * self.num_replicas

    def names(self) -> list[str]:
        """Names of the calls so far."""
        return [name for name, _ in self.calls]


async def until(condition) -> None:
    """Let others run until something is so; a busy machine may take its time."""
    while not condition():
        await asyncio.sleep(0.002)
