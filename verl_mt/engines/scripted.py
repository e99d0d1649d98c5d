"""Engines without a model.

`ScriptedEngine` replays fixed turns, for tests of everything that stands above an engine. `AbsentEngine` samples
nothing, where saved rollouts are trained on.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.data.requests import FinishReason, GenerationOutput, GenerationRequest, Timings, VersionSpan
from verl_mt.engines.base import Branch, Capabilities, InferenceEngine, PauseMode, WeightUpdate
from verl_mt.engines.stop_strings import Decode, StopStrings
from verl_mt.errors import ConfigError, EngineError, EngineGoneError, error_text

log = logging.getLogger(__name__)


class ScriptedTurn(NamedTuple):
    """What the engine "samples" for one request. A plain tuple of the first few fields works as well."""

    token_ids: Sequence[int] | None = None
    """None only where the engine yields text."""
    text: str | None = None
    finish_reason: FinishReason = "stop"
    log_probs: Sequence[float] | None = None
    """None = 0.0 for each token: a script is certain of what it says."""
    latency_s: float = 0.0
    """Seconds that sampling takes, beside the engine's own latency."""
    version_spans: Sequence[VersionSpan] | None = None
    """None = one span of the version at the start of the turn."""


Turn = ScriptedTurn | tuple[Any, ...]
Script = Sequence[Turn] | Mapping[Any, Sequence[Turn]] | Callable[[GenerationRequest], Turn]


class ScriptedEngine(InferenceEngine):
    """Replays turns, and records what it was asked.

    `requests` holds every request in order of arrival (with its `input_ids`), `updates` every weight update,
    `opened` and `closed` the ids of sessions.

    `max_new_tokens`, `stop_token_ids` and (given `decode`) stop strings cut a scripted turn as they would cut a
    sampled one. A request that is aborted or runs into its deadline keeps the share of its tokens that corresponds
    to the share of its latency that has passed.

    Args:
        turns: a list, replayed in order of arrival. A mapping from session id, or from the first request's
            `input_ids` as a tuple, to a list of turns, or a function of the request.
        returns_token_ids: False = text only: ids and log-probs are withheld.
        latency_s: seconds that every turn takes.
        fail_at: numbers of the requests (1 = the first) that raise `EngineGoneError`. They use up no turn.
        decode: ids -> text.
        version: of the weights, until `apply`.
    """

    overlaps_training = True

    @classmethod
    def check_config(cls, config: ActorRolloutRefConfig, trainer: TrainerConfig) -> None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=scripted replays turns from Python, and a configuration has none: pass "
            "engine=ScriptedEngine(turns) (verl_mt.engines.scripted) to build_trainer, or name another engine"
        )

    def __init__(
        self,
        turns: Script,
        *,
        returns_token_ids: bool = True,
        latency_s: float = 0.0,
        fail_at: Collection[int] = (),
        decode: Decode | None = None,
        version: int = 0,
    ):
        self.capabilities = Capabilities(
            transports=frozenset({"in_place", "tensor_buckets", "broadcast", "disk"}),
            deterministic=True,
            returns_token_ids=returns_token_ids,
            media=frozenset({"images", "videos"}),
            overlaps_training=True,
        )
        self.requests: list[GenerationRequest] = []
        self.updates: list[WeightUpdate] = []
        self.opened: list[str] = []
        self.closed: list[str] = []
        self._turns = turns
        self._latency_s = latency_s
        self._fail_at = frozenset(fail_at)
        self._decode = decode
        self._version = version
        self._num_used: dict[Any, int] = {}
        self._keys: dict[str, Any] = {}
        self._streams: dict[str, list[int]] = {}
        self._running: dict[str, asyncio.Event] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self._check_open()
        self.requests.append(request)
        number = len(self.requests)
        if number in self._fail_at:
            raise EngineGoneError(f"request {number} ({request.request_id!r}) was scripted to fail")
        turn = self._cut(self._next_turn(request), request)
        share = await self._wait(request, turn.latency_s + self._latency_s)
        return self._output(request, turn, share)

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].set()

    async def pause(self, mode: PauseMode = "in_place") -> None:
        self._resumed.clear()
        if mode == "abort":
            for event in self._running.values():
                event.set()

    async def resume(self) -> None:
        self._resumed.set()

    async def apply(self, update: WeightUpdate) -> None:
        self.updates.append(update)
        self._version = update.version

    def open_session(self, session_id: str, order: int) -> None:
        self.opened.append(session_id)

    def close_session(self, session_id: str) -> None:
        self.closed.append(session_id)
        self._streams.pop(session_id, None)

    def branch(self) -> Branch | None:
        """A script that is told by session, prompt or request is replayed where the conversation is. One that counts
        arrivals, or cannot be pickled, here."""
        if self._fail_at or isinstance(self._turns, Sequence):
            return None
        script = {
            "turns": self._turns,
            "returns_token_ids": self.capabilities.returns_token_ids,
            "latency_s": self._latency_s,
            "decode": self._decode,
        }
        try:
            pickle.dumps(script)
        except Exception as error:
            log.info("the script stays in this process: %s", error_text(error, named=True))
            return None
        return Branch(f"{__name__}:scripted_branch", (script,))

    def hear(self, news: Any) -> None:
        self._version = news

    async def close(self) -> None:
        self._is_closed = True
        self._resumed.set()
        for event in self._running.values():
            event.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineGoneError("the scripted engine is closed")

    def _next_turn(self, request: GenerationRequest) -> ScriptedTurn:
        turns = self._turns
        if not isinstance(turns, Mapping) and callable(turns):
            return _as_turn(turns(request), request)
        key: Any = None
        if isinstance(turns, Mapping):
            prompt = tuple(request.input_ids)
            session = request.session_id
            key = self._keys.setdefault(session, session if session in turns else prompt)
            if key not in turns:
                raise EngineError(
                    f"the script has no turns for session {request.session_id!r} nor for its prompt {prompt}. "
                    f"It has {', '.join(map(repr, turns))}"
                )
            turns = turns[key]
        used = self._num_used.get(key, 0)
        if used >= len(turns):
            where = "" if key is None else f" for {key!r}"
            raise EngineError(
                f"the script{where} ran out: it has {len(turns)} turn(s), and request {len(self.requests)} "
                f"({request.request_id!r}, session {request.session_id!r}) asks for one more"
            )
        self._num_used[key] = used + 1
        return _as_turn(turns[used], request)

    def _cut(self, turn: ScriptedTurn, request: GenerationRequest) -> ScriptedTurn:
        """Apply the request's limits to the turn."""
        ids, sampling = turn.token_ids, request.sampling
        if ids is None:
            if self.capabilities.returns_token_ids:
                raise EngineError(
                    f"the turn for {request.request_id!r} has no token_ids, or set returns_token_ids=False"
                )
            return turn
        if sampling.stop and self._decode is None:
            raise EngineError(f"{request.request_id!r}: stop strings {sampling.stop} need ScriptedEngine(decode=...)")
        watch = StopStrings(self._decode, sampling.stop) if sampling.stop and self._decode else None
        for count, token in enumerate(ids, start=1):
            stopped = token in sampling.stop_token_ids or (watch is not None and watch.push(token))
            if stopped:
                return self._shortened(turn, count, "stop")
            if count == sampling.max_new_tokens and count < len(ids):
                return self._shortened(turn, count, "length")
        return turn

    def _shortened(self, turn: ScriptedTurn, count: int, reason: FinishReason) -> ScriptedTurn:
        ids = list(turn.token_ids or [])[:count]
        same = turn.token_ids is not None and count == len(turn.token_ids)
        return turn._replace(
            token_ids=ids,
            text=turn.text if same or self._decode is None else self._decode(ids),
            log_probs=None if turn.log_probs is None else turn.log_probs[:count],
            finish_reason=reason,
            version_spans=None if same is False else turn.version_spans,
        )

    async def _wait(self, request: GenerationRequest, latency_s: float) -> float:
        """Let the turn take its time; the share of it that had passed when it was ended from outside, else 1."""
        loop = asyncio.get_running_loop()
        start, ended = loop.time(), asyncio.Event()
        self._running[request.request_id] = ended
        try:
            while not ended.is_set():
                left = start + latency_s - loop.time()
                deadline = float("inf") if request.deadline_s is None else start + request.deadline_s - loop.time()
                if left <= 0 and self._resumed.is_set():
                    break
                if deadline <= 0:
                    ended.set()
                    break
                await self._sleep(ended, left, deadline)
        finally:
            del self._running[request.request_id]
        self._check_open()
        passed = loop.time() - start
        return 1.0 if not ended.is_set() else min(1.0, passed / latency_s if latency_s else 0.0)

    async def _sleep(self, ended: asyncio.Event, left: float, deadline: float) -> None:
        """Until the latency is over, the engine resumes after it, the request is ended, or its deadline comes."""
        waiters = [asyncio.ensure_future(ended.wait())]
        if left <= 0:
            waiters.append(asyncio.ensure_future(self._resumed.wait()))
        timeout = min(left if left > 0 else float("inf"), deadline)
        try:
            await asyncio.wait(
                waiters, timeout=None if timeout == float("inf") else timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for waiter in waiters:
                waiter.cancel()

    def _output(self, request: GenerationRequest, turn: ScriptedTurn, share: float) -> GenerationOutput:
        ids = list(turn.token_ids or [])
        if share < 1.0:
            turn = self._shortened(turn, int(len(ids) * share), "abort")
            ids = list(turn.token_ids or [])
        timings = Timings(decode_s=turn.latency_s + self._latency_s)
        if not self.capabilities.returns_token_ids:
            if turn.text is None:
                raise EngineError(f"the turn for {request.request_id!r} has no text, and the engine yields text only")
            text = turn.text if share >= 1.0 else turn.text[: int(len(turn.text) * share)]
            return GenerationOutput(None, None, turn.finish_reason, timings=timings, text=text)
        old = self._streams.get(request.session_id, [])
        cached = None
        if request.input_ids[: len(old)] != old:
            cached = next((i for i, (a, b) in enumerate(zip(old, request.input_ids)) if a != b), None)
        self._streams[request.session_id] = [*request.input_ids, *ids]
        return GenerationOutput(
            token_ids=ids,
            log_probs=list(turn.log_probs) if turn.log_probs is not None else [0.0] * len(ids),
            finish_reason=turn.finish_reason,
            version_spans=list(turn.version_spans or ([VersionSpan(self._version, len(ids))] if ids else [])),
            cached_tokens=min(len(old), len(request.input_ids)) if cached is None else cached,
            timings=timings,
            text=turn.text,
        )


def scripted_branch(script: dict[str, Any], worker: int) -> ScriptedEngine:
    """In a rollout worker."""
    return ScriptedEngine(script.pop("turns"), **script)


def _as_turn(turn: Turn, request: GenerationRequest) -> ScriptedTurn:
    result = turn if isinstance(turn, ScriptedTurn) else ScriptedTurn(*turn)
    ids, log_probs = result.token_ids, result.log_probs
    if ids is not None and log_probs is not None and len(ids) != len(log_probs):
        raise EngineError(
            f"the turn for {request.request_id!r} has {len(ids)} token_ids and {len(log_probs)} log_probs"
        )
    return result


class AbsentEngine(ScriptedEngine):
    """Takes weights and samples nothing."""

    def __init__(self) -> None:
        super().__init__([])

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        raise EngineError(
            f"{request.request_id}: there is no engine, trainer.debug_mode=train_only trains on saved rollouts"
        )
