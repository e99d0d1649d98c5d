"""`SGLangEngine`: real SGLang behind the contract of `engines/base.py`."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.engines.base import (
    Capabilities,
    Disk,
    EngineSetup,
    InferenceEngine,
    PauseMode,
    TensorBuckets,
    WeightUpdate,
    check_request,
)
from verl_mt.engines.sglang.buckets import Bucket, SharedPass, verify
from verl_mt.engines.sglang.clients import Client, ColocatedClient, HttpClient, LaunchedServer
from verl_mt.engines.sglang.options import SGLangOptions, check_rollout, require_sglang
from verl_mt.engines.sglang.replica import Replica
from verl_mt.engines.sglang.turn import SGLangTurn
from verl_mt.engines.sglang.weight_sender import WeightSender
from verl_mt.errors import ConfigError, EngineError, EngineGoneError
from verl_mt.modeling.weights import ModelShape, model_shape

_ABORT_CALL_S = 60.0
_ABORT_AGAIN_S = 2.0
"""SGLang forgets an abort that comes before it has taken the request in, so it is repeated."""
_NUM_ABORTS = 30
"""An engine that does not end a request after being told so often is taken for dead."""


@dataclass(eq=False)
class _Live:
    """A request on its way."""

    turn: SGLangTurn
    deadline: float | None
    """On the event loop's clock."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody wants it to end, with what it has."""

    def left_s(self) -> float | None:
        """Seconds to its deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - asyncio.get_running_loop().time())


class SGLangEngine(InferenceEngine):
    """One colocated engine, or several HTTP servers with sticky routing by session.

    Weights of version 0 are those of the model's files. An engine that dies is started anew and gets the weights of
    the last `apply` before it serves again; what was being sampled raises `EngineGoneError`, so that the runner starts
    those trajectories again.

    Args:
        options: see `SGLangOptions`.

    Raises:
        ConfigError: SGLang is not installed where it is needed, or weights cannot get to where it runs.
    """

    @classmethod
    def check_config(cls, config: ActorRolloutRefConfig, trainer: TrainerConfig) -> None:
        if trainer.deterministic:
            raise ConfigError(
                "trainer.deterministic needs rollout.name=local or scripted; sglang gives other bits in other batches"
            )
        check_rollout(config.rollout)
        if not config.rollout.servers:
            require_sglang()

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> InferenceEngine:
        return cls(
            SGLangOptions.from_config(
                setup.config,
                end_token_ids=setup.end_token_ids,
                max_model_len=setup.max_model_len,
                seed=setup.seed,
            )
        )

    def __init__(self, options: SGLangOptions):
        if not options.servers:
            require_sglang()
        self._options = options
        self._shape: ModelShape | None = None
        transports = {"disk"} if options.transport == "disk" else {"tensor_buckets", "disk"}
        self.capabilities = Capabilities(
            transports=frozenset(transports),
            deterministic=False,
            frees_memory=options.on_gpu and options.free_cache and not options.servers and not options.num_launched,
        )
        self._version = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._paused_in_place = False
        self._replicas = [self._replica(make) for make in self._makers()]
        self._sessions: dict[str, Replica] = {}
        self._live: dict[str, _Live] = {}
        self._closed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None
        self._update_lock = asyncio.Lock()

    @property
    def version(self) -> int:
        return self._version

    @property
    def pids(self) -> list[int]:
        """Main processes of the engines that are ours; each leads a process group."""
        return [replica.pid for replica in self._replicas if replica.pid is not None]

    async def start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        await self.start()
        self._check_open()
        assert self._shape is not None
        check_request(
            request,
            "the SGLang engine",
            max_model_len=self._options.max_model_len,
            vocab_size=self._shape.vocab_size,
        )
        if request.request_id in self._live:
            raise EngineError(f"request {request.request_id!r} is already being sampled; ids must be unique")
        deadline = None if request.deadline_s is None else asyncio.get_running_loop().time() + request.deadline_s
        live = _Live(SGLangTurn(request, self._options.max_model_len, self._options.end_token_ids), deadline)
        self._live[request.request_id] = live
        try:
            return await self._generate(live)
        finally:
            del self._live[request.request_id]

    async def abort(self, request_id: str) -> None:
        """In a pause SGLang hands over what it has sampled by the 50 tokens; the rest is lost, and never recorded."""
        if request_id in self._live:
            self._live[request_id].stop.set()

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """`retract` drops the caches, `in_place` keeps them as long as the weights stay; `abort` ends all turns."""
        if mode not in ("abort", "in_place", "retract"):
            raise EngineError(f"pause: unknown mode {mode!r}; expected abort, in_place or retract")
        await self.start()
        self._check_open()
        self._resumed.clear()
        if mode == "abort":
            for live in self._live.values():
                live.stop.set()
        else:
            self._paused_in_place = mode == "in_place"
            await self._call_all("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.start()
        self._check_open()
        self._paused_in_place = False
        await self._call_all("continue_generation", {})
        self._resumed.set()

    async def apply(self, update: WeightUpdate) -> None:
        """Turns that are being sampled go on with the new weights, and recompute their caches with them."""
        if not isinstance(update, TensorBuckets | Disk):
            raise EngineError(
                f"the SGLang engine takes TensorBuckets and Disk updates, got {type(update).__name__}; an engine of "
                "another process does not share the actor's module"
            )
        await self.start()
        self._check_open()
        async with self._update_lock:
            assert self._shape is not None
            if isinstance(update, TensorBuckets):
                if isinstance(update.tensors, Iterator):
                    update = replace(update, tensors=list(update.tensors))
                if not update.streamed:
                    verify(update.tensors, self._shape.weights)
            # Somebody's server that is away is not waited for as long as there is another one.
            present = [replica for replica in self._replicas if replica.is_ready or replica.is_ours]
            members = self._one_pass(update, present)
            await asyncio.gather(
                *(self._bring_up_to_date(r, update, members.get(r)) for r in present or self._replicas)
            )
            # From here on new lives begin with this update. Who began one meanwhile has the last one: it gets this now.
            for replica in self._replicas:
                replica.sender.current = update
            late = [replica for replica in self._replicas if replica.is_ready and replica.holds is not update]
            await asyncio.gather(*(self._bring_up_to_date(replica, update) for replica in late))
            self._version = update.version

    async def release_memory(self) -> None:
        """Frees memory where `capabilities.frees_memory` says so (on a GPU, colocated); elsewhere it does nothing."""
        if self.capabilities.frees_memory:
            await self._call_all("release_memory_occupation", {})

    async def resume_memory(self) -> None:
        if self.capabilities.frees_memory:
            await self._call_all("resume_memory_occupation", {})

    def open_session(self, session_id: str, order: int) -> None:
        """All turns of a session go to one server, whose prefix cache holds its earlier turns."""
        ready = [replica for replica in self._replicas if replica.is_ready]
        self._move(session_id, min(ready or self._replicas, key=lambda replica: replica.num_sessions))

    def close_session(self, session_id: str) -> None:
        self._move(session_id, None)

    def metrics(self) -> dict[str, float]:
        """`engine/restarts`: engines that were lost and came back since the run began."""
        return {"engine/restarts": sum(replica.num_restarts for replica in self._replicas)}

    async def close(self) -> None:
        self._closed.set()
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        if self._options.servers and not self._resumed.is_set():
            # Somebody else's: not to be left in our pause.
            with contextlib.suppress(EngineError):
                await self._call_all("continue_generation", {})
        await asyncio.gather(*(replica.close() for replica in self._replicas))
        waiting = [*self._background, *([self._starting] if self._starting is not None else [])]
        await asyncio.gather(*waiting, return_exceptions=True)

    # Starting and weights

    async def _start(self) -> None:
        options = self._options
        self._shape = await asyncio.to_thread(
            model_shape, options.model_path, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
        for replica in self._replicas:
            replica.sender.shape = self._shape
        results = await asyncio.gather(*(replica.start() for replica in self._replicas), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await asyncio.gather(*(replica.close() for replica in self._replicas))
            raise errors[0]

    def _makers(self) -> Iterable[Callable[[], Client]]:
        options = self._options
        if options.servers:
            return [partial(HttpClient, url, options) for url in options.servers]
        if options.num_launched:
            return [partial(LaunchedServer, options, number) for number in range(options.num_launched)]
        return [partial(ColocatedClient, options.engine_arguments())]

    def _replica(self, make: Callable[[], Client]) -> Replica:
        sender = WeightSender(self._options, is_paused=lambda: not self._resumed.is_set())
        return Replica(make, sender, timeout_s=self._options.timeout_s, is_ours=not self._options.servers)

    def _one_pass(self, update: WeightUpdate, replicas: list[Replica]) -> dict[Replica, SharedPass]:
        """Gathering all weights is work for the whole group of workers: once for all engines that serve now."""
        if not isinstance(update, TensorBuckets):
            return {}
        kinds: dict[tuple[bool, bool], list[tuple[Replica, Client]]] = {}
        for replica in replicas:
            if (client := replica.serving) is not None:
                kinds.setdefault(replica.sender.kind(client), []).append((replica, client))
        passes: dict[Replica, SharedPass] = {}
        for alike in kinds.values():
            first, client = alike[0]
            if len(alike) > 1:
                one = SharedPass(first.sender.pack(client, update), len(alike))
                passes |= {replica: one for replica, _ in alike}
        return passes

    async def _bring_up_to_date(self, replica: Replica, update: WeightUpdate, shared: SharedPass | None = None) -> None:
        if shared is not None:
            with shared.member() as buckets:
                if (client := replica.serving) is not None and await self._send(replica, client, update, buckets):
                    return
        # Alone; an engine that goes away gets it again in its next life.
        while not await self._send(replica, await replica.ready(self._options.timeout_s), update):
            pass

    async def _send(
        self, replica: Replica, client: Client, update: WeightUpdate, buckets: AsyncIterator[Bucket] | None = None
    ) -> bool:
        """Whether it has the update now; False = it went away."""
        # A new life takes the same lock for its first weights: two senders in one engine would mix two versions.
        async with replica.lock:
            if replica.holds is not update:
                try:
                    await replica.sender.send(client, update, buckets)
                except EngineGoneError:
                    return False
                replica.sender.current = replica.holds = update
        return True

    # Requests

    async def _generate(self, live: _Live) -> GenerationOutput:
        while True:
            if not await self._may_go(live):
                return live.turn.output("abort")
            replica = await self._route(live)
            client = await replica.ready(live.left_s())
            reason = live.turn.add(await self._ask(live, client), self._version)
            replica.has_served = True
            if reason is not None:
                return live.turn.output(reason)

    async def _may_go(self, live: _Live) -> bool:
        """Wait out a pause. False = the request is to end instead."""
        if not self._resumed.is_set() and not live.stop.is_set():
            await _first(live.left_s(), self._resumed, live.stop, self._closed)
            self._check_open()
        return self._resumed.is_set() and not live.stop.is_set() and live.left_s() != 0.0

    async def _route(self, live: _Live) -> Replica:
        """The session's server; another one while that is away."""
        session = live.turn.request.session_id
        chosen = self._sessions.get(session)
        if chosen is None:
            chosen = self._replicas[zlib.crc32(session.encode()) % len(self._replicas)]
        if chosen.is_ready:
            return chosen
        waiting = [asyncio.ensure_future(replica.ready(live.left_s())) for replica in self._replicas]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        found = next((replica for replica in self._replicas if replica.is_ready), chosen)
        if session in self._sessions:
            self._move(session, found)
        return found

    def _move(self, session_id: str, to: Replica | None) -> None:
        old = self._sessions.pop(session_id, None)
        if old is not None:
            old.num_sessions -= 1
        if to is not None:
            to.num_sessions += 1
            self._sessions[session_id] = to

    async def _ask(self, live: _Live, client: Client) -> dict[str, Any]:
        """SGLang's answer; after an abort or a deadline the part that was sampled."""
        rid = uuid.uuid4().hex
        asked = asyncio.ensure_future(client.generate(live.turn.body(rid)))
        stopped = asyncio.ensure_future(live.stop.wait())
        try:
            await asyncio.wait({asked, stopped}, timeout=live.left_s(), return_when=asyncio.FIRST_COMPLETED)
            for _ in range(_NUM_ABORTS):
                if asked.done():
                    break
                await self._abort(client, rid)
                await asyncio.wait({asked}, timeout=_ABORT_AGAIN_S)
            else:
                client.give_up(f"a request did not end within {_NUM_ABORTS * _ABORT_AGAIN_S:.0f} s of its abort")
            return await asked
        finally:
            stopped.cancel()
            if not asked.done():
                asked.cancel()
                self._in_background(self._abort(client, rid))

    async def _abort(self, client: Client, rid: str) -> None:
        with contextlib.suppress(EngineError):
            if self._paused_in_place:
                # A request that is paused in place would end only when it goes on; one in the queue ends now.
                self._paused_in_place = False
                await client.call("pause_generation", {"mode": "retract"}, _ABORT_CALL_S)
            await client.call("abort_request", {"rid": rid}, _ABORT_CALL_S)

    async def _call_all(self, name: str, body: dict) -> None:
        """For engines that serve; one that is away has nothing to pause, and begins its next life with all it needs."""
        for replica in self._replicas:
            if replica.is_ready:
                client = await replica.ready(self._options.timeout_s)
                with contextlib.suppress(EngineGoneError):
                    await client.call(name, body, self._options.timeout_s)

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise EngineGoneError("the SGLang engine is closed")


async def _first(timeout_s: float | None, *events: asyncio.Event) -> None:
    """Wait until one of the events is set, or the time is over."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
