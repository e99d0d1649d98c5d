"""What the local engine knows about one request and one conversation."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from verl_mt.data.requests import FinishReason, GenerationOutput, GenerationRequest, Timings, VersionSpan
from verl_mt.engines.local.delivery import Delivery
from verl_mt.engines.stop_strings import StopStrings


class State(enum.Enum):
    """Where a sequence stands."""

    QUEUED = enum.auto()
    """It has no row: new, or its cache was dropped."""
    FOLLOWING = enum.auto()
    """It has a row and waits for an identical prompt that is being prefilled."""
    RUNNING = enum.auto()
    """Its tokens are computed at every step."""
    DONE = enum.auto()


@dataclass(eq=False)
class Conversation:
    """A session: a row of the cache that waits for the next turn."""

    session_id: str
    order: int
    row: int = -1
    """Row that holds the finished turns; -1 = none (not sampled yet, in use by a sequence, or dropped)."""
    live: int = 0
    """Requests of this session that are in the engine."""
    turns: int = 0
    """Requests it ever made."""
    is_open: bool = True


@dataclass(eq=False)
class Sequence:
    """One request on its way through the engine."""

    request: GenerationRequest
    limit: int
    """Length of prompt and turn at which the turn ends."""
    submitted: float
    """Monotonic seconds; also below."""
    delivery: Delivery | None = None
    """Who waits for it."""
    session: Conversation = field(init=False)
    key: int = 0
    """Of its stream of uniform numbers."""
    ticket: int = 0
    """Order of arrival."""
    stop_strings: StopStrings | None = None
    state: State = State.QUEUED
    row: int = -1
    cached: int | None = None
    admitted: float | None = None
    first_token: float | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    followers: list[Sequence] = field(default_factory=list)
    target: np.ndarray = field(init=False)
    """Ids to compute before the next one is sampled: the prompt, and what was sampled before a cache was dropped."""
    log_probs: np.ndarray = field(init=False)
    """Of what was sampled before the cache was dropped."""

    def __post_init__(self) -> None:
        self.target = np.asarray(self.request.input_ids, dtype=np.int64)
        self.log_probs = np.zeros(0, dtype=np.float32)

    @property
    def num_prompt(self) -> int:
        """Tokens of the request."""
        return len(self.request.input_ids)

    def output(self, reason: FinishReason, now: float) -> GenerationOutput:
        """What the caller gets; `target` and `log_probs` must hold the whole turn."""
        admitted = self.admitted if self.admitted is not None else now
        first = self.first_token if self.first_token is not None else now
        return GenerationOutput(
            token_ids=self.target[self.num_prompt :].tolist(),
            log_probs=self.log_probs.tolist(),
            finish_reason=reason,
            version_spans=self.spans,
            cached_tokens=self.cached or 0,
            timings=Timings(queue_s=admitted - self.submitted, prefill_s=first - admitted, decode_s=now - first),
        )

    def count_version(self, version: int, num_total: int) -> None:
        """The turn now holds `num_total` tokens; those not yet in a span came from `version`."""
        fresh = num_total - sum(span.num_tokens for span in self.spans)
        if fresh <= 0:
            return
        if self.spans and self.spans[-1].version == version:
            fresh += self.spans.pop().num_tokens
        self.spans.append(VersionSpan(version, fresh))
