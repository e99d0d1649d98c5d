"""`ReplicatedEngine`: engines in separate processes behind the contract of `engines/base.py`."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.engines.base import (
    Capabilities,
    Disk,
    FromRanks,
    InferenceEngine,
    PauseMode,
    Receiver,
    TensorBuckets,
    WeightUpdate,
    check_request,
)
from verl_mt.errors import EngineError, EngineGoneError, VerlMTError
from verl_mt.extensions.cluster.replicas import shared_memory
from verl_mt.extensions.cluster.replicas.adapters import AdapterPublisher
from verl_mt.extensions.cluster.replicas.broadcaster import WeightBroadcaster
from verl_mt.extensions.cluster.replicas.buckets import verify
from verl_mt.extensions.cluster.replicas.clients import Client, Endpoint
from verl_mt.extensions.cluster.replicas.model_shape import ModelShape, model_shape
from verl_mt.extensions.cluster.replicas.open_files import raise_limit
from verl_mt.extensions.cluster.replicas.options import ReplicaOptions
from verl_mt.extensions.cluster.replicas.replica import Replica
from verl_mt.extensions.cluster.replicas.routing import Router
from verl_mt.extensions.cluster.replicas.turn import LiveTurn, Turn, first_of
from verl_mt.extensions.cluster.replicas.weight_sender import Choice, PublishesHere, WeightSender, send_to_all
from verl_mt.extensions.cluster.start_log import start_all, start_log

_log = logging.getLogger(__name__)
_ABORT_CALL_S = 60.0
_DRAIN_POLL_S = 0.1
_ABORT_AGAIN_S = 2.0
"""SGLang forgets an abort that comes before it has taken the request in, so it is repeated."""
_NUM_LIVES = 5
"""In which an engine may fail to take the same weights."""
_NUM_ABORTS = 30
"""An engine that does not end a request after being told so often is taken for dead."""


class ReplicatedEngine(InferenceEngine):
    """Replicas of one engine, with sticky routing by session.

    Weights of version 0 are those of the model's files. An engine that dies is started anew and gets the weights of
    the last `apply` before it serves again; what was being sampled raises `EngineGoneError`, so that the runner starts
    those trajectories again.

    Args:
        options: see `ReplicaOptions`.
    """

    kind: ClassVar[str]
    """The engine's name in messages."""
    turn: ClassVar[type[Turn]] = Turn
    broadcaster: ClassVar[type[WeightBroadcaster]] = WeightBroadcaster
    overlaps_training = True

    @abc.abstractmethod
    def _makers(self) -> Iterable[Callable[[], Client]]:
        """For each replica, what makes the client of its next life."""

    @abc.abstractmethod
    def _memory_publisher(self) -> Choice:
        """What publishes weights through the memory of one machine."""

    def _publisher_for(self, client: Client, receiver: Receiver, here: bool) -> Choice:
        """See `WeightSender.publisher_for`."""
        if self._options.adapters is not None:
            return AdapterPublisher, (self._options.adapters.config,)
        transport, beside = self._options.transport, receiver.rank is not None
        near = transport in ("tensors", "copy") or (client.local if here else beside)
        return self._memory_publisher() if near and transport != "broadcast" else (self.broadcaster, ())

    def __init__(self, options: ReplicaOptions):
        self._options = options
        self._shape: ModelShape | None = None
        # Ranks elsewhere reach hosts and servers; an engine beside this process is reached from here.
        raise_limit()
        by_memory = {"tensor_buckets"} | ({"from_ranks"} if options.hosts or options.servers else set())
        transports = {"disk"} if options.transport == "disk" else {"disk", *by_memory}
        self.capabilities = Capabilities(
            transports=frozenset(transports),
            deterministic=False,
            frees_memory=(frees := options.on_gpu and options.free_cache and options.takes_turns),
            overlaps_training=not frees,
            takes_adapters=options.adapters is not None,
        )
        self._version = 0
        self._weights_follow = self._is_empty = False
        """`start_without_weights` was called; and engines read no files when they start (see `Client.starts_empty`)."""
        self._waits_for_weights = False
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._paused_in_place = False
        self._may_start = asyncio.Event()
        self._may_start.set()
        """The device's memory is the engines', not training's."""
        self._settled = asyncio.Event()
        self._settled.set()
        """Set while the weights of the last update are unchanged (`hold_updates`)."""
        self._publishing = PublishesHere()
        self._replicas = [self._replica(number, make) for number, make in enumerate(self._makers())]
        self._router = Router(self._replicas)
        self._live: dict[str, LiveTurn] = {}
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

    async def start_without_weights(self) -> bool:
        """Launched engines read no files if an update sends the whole checkpoint, and not as files."""
        self._weights_follow |= self._starting is None
        await self.start()
        return self._waits_for_weights

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        await self.start()
        self._check_open()
        if self._waits_for_weights:
            raise EngineError(f"the {self.kind} engine has no weights yet: call apply() before generate()")
        assert self._shape is not None
        check_request(
            request,
            f"the {self.kind} engine",
            max_model_len=self._options.max_model_len,
            vocab_size=self._shape.vocab_size,
        )
        if request.request_id in self._live:
            raise EngineError(f"request {request.request_id!r} is already being sampled. Ids must be unique")
        live = LiveTurn.of(self.turn(request, self._options.max_model_len, self._options.end_token_ids))
        self._live[request.request_id] = live
        try:
            return await self._generate(live)
        finally:
            del self._live[request.request_id]

    async def abort(self, request_id: str) -> None:
        """In a pause SGLang returns sampled tokens in blocks of 50. The rest is lost, and never recorded."""
        if request_id in self._live:
            self._live[request_id].stop.set()

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """`retract` drops the caches, `in_place` keeps them as long as the weights stay; `abort` ends all turns."""
        if mode not in ("abort", "in_place", "retract"):
            raise EngineError(f"pause: unknown mode {mode!r}. Expected abort, in_place or retract")
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
        """Turns that are being sampled go on with the new weights, and recompute their caches with them. Runs on the
        rollout's loop. Waits for all engines that serve."""
        if not isinstance(update, TensorBuckets | Disk | FromRanks):
            raise EngineError(
                f"the {self.kind} engine takes FromRanks, TensorBuckets and Disk updates, got {type(update).__name__}. "
                "An engine of another process does not share the actor's module"
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
            await self.expect(update)
            # Somebody's server that is away is not waited for as long as there is another one. Nor is, at the start, an
            # engine of ours that failed: it takes this update when it comes.
            waits = not self._waits_for_weights
            present = [replica for replica in self._replicas if replica.is_ready or (replica.is_ours and waits)]
            await self._send_to_serving(update)
            await asyncio.gather(*(self._bring_up_to_date(replica, update) for replica in present or self._replicas))
            # From here on new lives begin with this update. Who began one meanwhile has the last one: it gets this now.
            for replica in self._replicas:
                replica.sender.current = update
            late = [replica for replica in self._replicas if replica.is_ready and replica.holds is not update]
            await asyncio.gather(*(self._bring_up_to_date(replica, update) for replica in late))
            await asyncio.gather(*(self._take_back(replica, "kv_cache") for replica in self._replicas))
            if self._waits_for_weights:
                number = sum(replica.is_ready for replica in self._replicas)
                start_log.info("%s: weights sent to %d engine%s", self.kind, number, "s" if number > 1 else "")
            self._version, self._waits_for_weights = update.version, False
            self._router.forget_prompts()

    async def hold_updates(self) -> None:
        """An engine that is lost from now on loads its model, and waits for the next update before it serves."""
        self._settled.clear()
        for replica in self._replicas:
            async with replica.reading:  # one that was lost before may be taking the last update right now
                pass

    async def expect(self, update: WeightUpdate) -> None:
        """The tensors of the last update are gone: engines that restart from now on get this one."""
        if not self._settled.is_set():
            for replica in self._replicas:
                replica.sender.current = update
            self._settled.set()

    async def release_memory(self) -> None:
        """Frees memory where `capabilities.frees_memory` says so (on a GPU, colocated); elsewhere it does nothing.
        An engine that is lost from now on restarts when the memory is free again."""
        if self.capabilities.frees_memory:
            self._may_start.clear()
            await asyncio.gather(*(self._release(replica) for replica in self._replicas))

    async def resume_memory(self) -> None:
        """Take memory for the weights. The cache gets its memory after they have arrived."""
        self._may_start.set()
        await asyncio.gather(*(self._take_back(replica, "weights") for replica in self._replicas))

    async def _release(self, replica: Replica) -> None:
        """SGLang ends itself when it is told to while it has requests: such as those that nobody waits for any more."""
        async with replica.lock:
            client, wanted = replica.serving, {"weights", "kv_cache"} - replica.released
            if client is None or not wanted:
                return
            with contextlib.suppress(EngineGoneError):
                await self._drain(client)
                await client.call("release_memory_occupation", {"tags": sorted(wanted)}, self._options.timeout_s)
                replica.released |= wanted

    async def _drain(self, client: Client) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)
        deadline = asyncio.get_running_loop().time() + _NUM_ABORTS * _ABORT_AGAIN_S
        while True:
            try:
                return await client.call("flush_cache", {}, self._options.timeout_s)
            except EngineGoneError:
                raise
            except EngineError:
                if asyncio.get_running_loop().time() > deadline:
                    client.give_up(f"requests were running {_NUM_ABORTS * _ABORT_AGAIN_S:.0f} s after the rollout")
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _take_back(self, replica: Replica, kind: str) -> None:
        client = replica.serving
        if client is not None and kind in replica.released:
            with contextlib.suppress(EngineGoneError):
                await client.call("resume_memory_occupation", {"tags": [kind]}, self._options.timeout_s)
                replica.released.discard(kind)

    def open_session(self, session_id: str, order: int) -> None:
        """All turns of a session go to one replica, whose prefix cache holds its earlier turns."""
        self._router.open(session_id)

    def close_session(self, session_id: str) -> None:
        self._router.close(session_id)

    def metrics(self) -> dict[str, float]:
        """`engine/restarts`: engines lost and come back since the run began; `rollout/replicas`: those that serve."""
        return {
            "engine/restarts": sum(replica.num_restarts for replica in self._replicas),
            "rollout/replicas": sum(replica.is_ready for replica in self._replicas),
        }

    def news(self) -> Any:
        """The version, and where each replica's present life is asked."""
        return self._version, tuple(_endpoint(replica.serving) for replica in self._replicas)

    def hear(self, news: Any) -> None:
        """A branch found a replica gone: (its number, the life, why)."""
        number, life, reason = news
        client = self._replicas[number].serving
        endpoint = _endpoint(client)
        if client is not None and endpoint is not None and endpoint.life == life:
            client.give_up(reason)

    async def close(self) -> None:
        """Runs on the rollout's loop. Waits for all engines, and for a thread that frees shared memory."""
        self._closed.set()
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        if self._options.servers and not self._resumed.is_set():
            # Somebody else's: not to be left in our pause.
            with contextlib.suppress(EngineError):
                await self._call_all("continue_generation", {})
        await self._publishing.close()
        await asyncio.gather(*(replica.close() for replica in self._replicas))
        waiting = [*self._background, *([self._starting] if self._starting is not None else [])]
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.to_thread(shared_memory.sweep, os.getpid())  # buffers that the engines had mapped till their end

    # Starting and weights

    async def _start(self) -> None:
        """Runs on the rollout's loop. Waits for a thread that reads the model's shape, then for the engines."""
        options = self._options
        self._shape = await asyncio.to_thread(
            model_shape, options.model_path, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
        if options.adapters is not None:
            self._shape = replace(self._shape, weights=options.adapters.weights)
        for replica in self._replicas:
            replica.sender.shape = self._shape
        self._is_empty = self._weights_follow and self._needs_no_files(self._shape)
        # A request that began without an adapter would go on without one behind an update.
        self._waits_for_weights = self._is_empty or (self._weights_follow and options.adapters is not None)
        await self._start_replicas()

    def _needs_no_files(self, shape: ModelShape) -> bool:
        options = self._options
        if options.servers or options.transport == "disk" or "load_format" in options.engine_kwargs:
            return False
        if options.adapters is not None:  # the base weights are those of the files
            return False
        if shape.unsent:
            some = min(shape.unsent)
            start_log.info(
                "each engine reads the model's files: %d weights, such as %s, are not trained", len(shape.unsent), some
            )
        return shape.unsent == frozenset()

    async def _start_replicas(self) -> None:
        """All at once. One that fails is started again while the others sample; a server of the user's that fails, or
        all of them, is an error."""
        if self._shape is not None and self._shape.has_experts:
            _log.warning(
                "actor_rollout_ref.model.path=%s is a mixture of experts: the trainer chooses experts again, and for "
                "some tokens others than the engine did (rollout/logprob_diff_max shows it). Set "
                "algorithm.rollout_correction.rollout_is=token",
                self._options.model_path,
            )
        results = await start_all(self._replicas, self.kind)
        failed = {r: error for r, error in zip(self._replicas, results) if isinstance(error, BaseException)}
        known = all(replica.is_ours and isinstance(error, VerlMTError) for replica, error in failed.items())
        if not known or len(failed) == len(results):
            await asyncio.gather(*(replica.close() for replica in self._replicas))
            raise next(iter(failed.values()))
        for replica, error in failed.items():
            serve, name = f"{len(results) - len(failed)} of {len(results)} engines sample without it", replica.name
            _log.warning("%s did not start, and %s; it is started again: %s", name, serve, error)
            replica.start_later(str(error))

    def _replica(self, number: int, make: Callable[[], Client]) -> Replica:
        options = self._options
        paused = lambda: not self._resumed.is_set()  # noqa: E731
        sender = WeightSender(options, paused, self._publishing, self._publisher_for)
        name = options.hosts[number].name if options.hosts else options.servers[number] if options.servers else ""

        def next_life() -> Client:
            client = make()
            client.starts_empty = self._is_empty
            return client

        return Replica(
            next_life,
            sender,
            timeout_s=options.timeout_s,
            is_ours=not options.servers,
            name=name or f"engine {number}",
            kind=self.kind,
            may_start=self._may_start,
            settled=self._settled,
            takes=options.max_num_seqs,
        )

    async def _send_to_serving(self, update: WeightUpdate) -> None:
        """To all that serve now, in one pass over the weights. Who cannot take them gets them in its next life."""
        async with contextlib.AsyncExitStack() as locks:
            serving: list[tuple[Replica, Client]] = []
            for replica in self._replicas:
                if replica.is_ready:
                    # A new life takes the same lock for its first weights: two senders would mix two versions.
                    await locks.enter_async_context(replica.lock)
                    if (client := replica.serving) is not None:
                        serving.append((replica, client))
            problems = await send_to_all([(replica.sender, client) for replica, client in serving], update)
            for (replica, _), problem in zip(serving, problems):
                if problem is None:
                    replica.sender.current = replica.holds = update
        refused = [problem for problem in problems if problem is not None and not isinstance(problem, EngineGoneError)]
        if refused:
            raise refused[0]

    async def _bring_up_to_date(self, replica: Replica, update: WeightUpdate) -> None:
        """Update one engine alone. A lost engine gets the update again after its restart, `_NUM_LIVES` times in all."""
        for tried in range(1, _NUM_LIVES + 1):
            if replica.holds is update:
                return
            try:
                client = await replica.ready(self._options.timeout_s)
            except EngineGoneError:
                if replica.is_given_up and any(other.is_ready for other in self._replicas):
                    return
                raise
            async with replica.lock:
                if replica.holds is update:
                    return
                try:
                    await replica.sender.send(client, update)
                except EngineGoneError as error:
                    if tried == _NUM_LIVES:
                        raise EngineGoneError(f"{client.name} took no weights in {tried} lives: {error}") from error
                    continue
                replica.sender.current = replica.holds = update
                return

    # Requests

    async def _generate(self, live: LiveTurn) -> GenerationOutput:
        while True:
            if not await self._may_go(live):
                return live.turn.output("abort")
            begins = self._router.begins(live.turn.request.session_id)
            replica = await self._route(live)
            # Counted before anything is awaited: the next conversation is placed by it.
            with _counted(replica, live.turn), replica.seats.one(begins=begins) as seat:
                if not await self._seated(live, seat):
                    return live.turn.output("abort")
                others = any(other.is_ready for other in self._replicas)
                if not self._resumed.is_set() or (others and not replica.is_ready):
                    continue
                client = await replica.ready(live.left_s())
                if begins and live.turn.cached_tokens is None:
                    live.turn.cached_tokens = await self._prefilled(live, client)
                    if not await self._may_go(live):
                        return live.turn.output("abort")
                answer, is_wanted = await self._ask(live, replica, client)
                reason = live.turn.add(answer, self._version)
                if reason == "abort" and not is_wanted:
                    # Ends or restarts. After a long turn the session would take it for the deadline.
                    raise EngineGoneError(f"the {client.name} aborted request {live.turn.request.request_id!r}")
            replica.has_served = True
            replica.progress.made()
            if reason is not None:
                name = replica.name if len(self._replicas) > 1 else None
                return replace(live.turn.output(reason), replica=name)

    async def _seated(self, live: LiveTurn, seat: asyncio.Future[None]) -> bool:
        """Wait for the seat. Returns False if the request must end instead."""
        if not seat.done():
            stopped: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(event.wait()) for event in (live.stop, self._closed)
            ]
            left_s = live.left_s(whole=True)
            try:
                await asyncio.wait([seat, *stopped], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in stopped:
                    task.cancel()
            self._check_open()
        return seat.done() and not live.stop.is_set()

    async def _may_go(self, live: LiveTurn) -> bool:
        """Wait out a pause. Returns False if the request must end instead."""
        if not self._resumed.is_set() and not live.stop.is_set():
            await first_of(live.left_s(whole=True), self._resumed, live.stop, self._closed)
            self._check_open()
        return self._resumed.is_set() and not live.stop.is_set() and live.left_s() != 0.0

    async def _route(self, live: LiveTurn) -> Replica:
        """The session's replica; another one while that is away."""
        request = live.turn.request
        chosen = self._router.choose(request.session_id, request.input_ids, len(request.input_ids) + live.turn.room)
        if chosen.is_ready:
            return chosen
        left = [replica for replica in self._replicas if not replica.is_given_up] or [chosen]
        waiting = [asyncio.ensure_future(replica.ready(live.left_s())) for replica in left]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not any(replica.is_ready for replica in self._replicas):
            return chosen if chosen in left else left[0]
        found = self._router.least_busy()
        self._router.move(request.session_id, found)
        return found

    async def _prefilled(self, live: LiveTurn, client: Client) -> int | None:
        """See `Router.prefilled`; who is to end does not wait."""
        prompt = asyncio.ensure_future(self._router.prefilled(client, live.turn.request.input_ids))
        stopped = asyncio.ensure_future(live.stop.wait())
        try:
            await asyncio.wait({prompt, stopped}, timeout=live.left_s(), return_when=asyncio.FIRST_COMPLETED)
            return prompt.result() if prompt.done() else None
        finally:
            stopped.cancel()
            prompt.cancel()

    async def _ask(self, live: LiveTurn, replica: Replica, client: Client) -> tuple[dict[str, Any], bool]:
        """The engine's answer; after an abort or a deadline, which the second tells, the part that was sampled."""
        rid = uuid.uuid4().hex
        asked = asyncio.ensure_future(client.generate(live.turn.body(rid)))
        stopped = asyncio.ensure_future(live.stop.wait())
        try:
            await replica.progress.wait(asked, stopped, client, live.deadline, live.patience_s)
            is_wanted = not asked.done() or live.stop.is_set()
            for _ in range(_NUM_ABORTS):
                if asked.done():
                    break
                await self._abort(client, rid)
                await asyncio.wait({asked}, timeout=_ABORT_AGAIN_S)
            else:
                client.give_up(f"a request did not end within {_NUM_ABORTS * _ABORT_AGAIN_S:.0f} s of its abort")
            return await asked, is_wanted
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
            raise EngineGoneError(f"the {self.kind} engine is closed")


def _endpoint(client: Client | None) -> Endpoint | None:
    """None = it is away, or goes away right now."""
    try:
        return None if client is None else client.endpoint
    except EngineGoneError:
        return None


@contextlib.contextmanager
def _counted(replica: Replica, turn: Turn) -> Iterator[None]:
    """What a request may take counts as outstanding, and what it sampled as sampled."""
    tokens, before = len(turn.request.input_ids) + turn.room, len(turn.token_ids)
    replica.outstanding += tokens
    try:
        yield
    finally:
        replica.outstanding -= tokens
        replica.num_sampled += len(turn.token_ids) - before
