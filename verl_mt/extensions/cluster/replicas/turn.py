"""One request in the engine's terms, and its answer in ours."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_mt.data.requests import FinishReason, GenerationOutput, GenerationRequest, Timings, VersionSpan
from verl_mt.errors import EngineError

_OF_FILES = "default"
"""What SGLang and vLLM call the weights that they have loaded themselves, where nobody has named them."""


@dataclass
class Turn:
    """An assistant turn on its way; usually one answer of the engine, now and then several.

    SGLang ends a turn at every end-of-sequence id that the model's files name, and cannot be told otherwise. Where
    such an id is not among ours, the turn is continued: its ids become part of the next input, which the prefix cache
    makes cheap.
    """

    engine: ClassVar[str] = "SGLang"
    request: GenerationRequest
    max_model_len: int
    end_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int | None = None
    submitted: float = field(default_factory=time.monotonic)
    """Monotonic seconds; also below."""
    dispatched: float | None = None
    queue_s: float = 0.0
    """Seconds in the engine's queue. SGLang tells this and the next with `enable_metrics`; else all is decoding."""
    prefill_s: float = 0.0

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        request = self.request
        limit = min(request.sampling.max_new_tokens, self.max_model_len - len(request.input_ids))
        return limit - len(self.token_ids)

    def body(self, rid: str) -> dict[str, Any]:
        """What `/generate` gets. Penalties are named, because a model's generation_config may bring its own."""
        if self.dispatched is None:
            self.dispatched = time.monotonic()
        sampling = self.request.sampling
        return {
            "rid": rid,
            "input_ids": [*self.request.input_ids, *self.token_ids],
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": self.room,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "min_new_tokens": 0,
                "stop": list(sampling.stop),
                "stop_token_ids": sorted(self.end_token_ids | set(sampling.stop_token_ids)),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }

    def add(self, answer: dict[str, Any], fallback_version: int) -> FinishReason | None:
        """Take an answer.

        Args:
            answer: `meta_info` holds ids, log-probs, versions and the reason.
            fallback_version: for a server that does not say which weights a token came from.

        Returns:
            Why the turn is over; None = the engine ended it, but it goes on.

        Raises:
            EngineError: the answer does not fit together, or the engine refused the request.
        """
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and reason.get("status_code") not in (None, 200):
            raise EngineError(f"request {self.request.request_id!r}: {self.engine} refused it: {reason.get('message')}")
        sampled = meta.get("output_token_logprobs") or []
        ids = [int(entry[1]) for entry in sampled]
        self.token_ids += ids
        self.log_probs += [float(entry[0]) for entry in sampled]
        self._add_spans(meta, len(ids), fallback_version)
        self.queue_s += float(meta.get("queue_time") or 0.0)
        if meta.get("prefill_finished_time") and meta.get("forward_entry_time"):
            self.prefill_s += max(0.0, meta["prefill_finished_time"] - meta["forward_entry_time"])
        if self.cached_tokens is None:
            self.cached_tokens = min(int(meta.get("cached_tokens") or 0), len(self.request.input_ids))
        return self._reason(reason, bool(ids))

    def output(self, reason: FinishReason) -> GenerationOutput:
        """What the caller gets."""
        now = time.monotonic()
        dispatched = self.dispatched if self.dispatched is not None else now
        decode_s = max(0.0, now - dispatched - self.queue_s - self.prefill_s)
        return GenerationOutput(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=reason,
            version_spans=self.spans,
            cached_tokens=self.cached_tokens or 0,
            timings=Timings(dispatched - self.submitted + self.queue_s, self.prefill_s, decode_s),
        )

    def _reason(self, reason: dict[str, Any], progress: bool) -> FinishReason | None:
        if reason["type"] == "abort":
            return "abort"
        last = self.token_ids[-1] if self.token_ids else None
        ours = self.end_token_ids | set(self.request.sampling.stop_token_ids)
        if reason["type"] == "stop" and (isinstance(reason.get("matched"), str) or last in ours):
            return "stop"
        if self.room <= 0:
            return "length"
        if not progress:
            raise EngineError(
                f"request {self.request.request_id!r}: {self.engine} ended it ({reason}) without sampling any of the "
                f"{self.room} tokens that were asked for"
            )
        return None

    def _add_spans(self, meta: dict[str, Any], count: int, fallback: int) -> None:
        spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
        for number, span in enumerate(spans, start=1):
            end = count if number == len(spans) else min(int(span["end"]), count)
            size = end - int(span["start"])
            named = "0" if span["version"] == _OF_FILES else str(span["version"])
            version = int(named) if named.isdecimal() else fallback
            if size <= 0:
                continue
            if self.spans and self.spans[-1].version == version:
                size += self.spans.pop().num_tokens
            self.spans.append(VersionSpan(version, size))


@dataclass(eq=False)
class LiveTurn:
    """A request on its way."""

    turn: Turn
    deadline: float
    """On the event loop's clock; inf = none."""
    patience_s: float = math.inf
    """Seconds without a token of its engine."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody wants it to end, with what it has."""

    @classmethod
    def of(cls, turn: Turn) -> LiveTurn:
        """As its request says."""
        given, now = turn.request, asyncio.get_running_loop().time()
        deadline_s = math.inf if given.deadline_s is None else given.deadline_s
        return cls(turn, now + deadline_s) if given.limit_s is None else cls(turn, now + given.limit_s, deadline_s)

    def left_s(self, *, whole: bool = False) -> float | None:
        """Seconds to its deadline; for what is no sampling at most its patience, but with `whole`."""
        left = self.deadline - asyncio.get_running_loop().time()
        left = left if whole else min(left, self.patience_s)
        return None if left == math.inf else max(0.0, left)


async def first_of(timeout_s: float | None, *events: asyncio.Event) -> None:
    """Wait until one of the events is set, or the time is over."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
