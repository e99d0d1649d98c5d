"""What goes to an inference engine and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one assistant turn. The same meaning in every engine.

    Filters apply in this order: temperature, top-k, top-p, min-p. Log-probs that an engine returns are always
    `log_softmax(logits / T)` over the full vocabulary (T = 0 counts as 1), whatever filter was on.
    """

    max_new_tokens: int
    """At most this many tokens are sampled, the end-of-turn token included."""
    temperature: float = 1.0
    """0 = greedy (ties: the lowest id)."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 = off."""
    min_p: float = 0.0
    """Tokens with less than `min_p` times the largest probability are never sampled."""
    seed: int | None = None
    """None = the engine's own stream of random numbers. A number = the same tokens for the same request."""
    stop: tuple[str, ...] = ()
    """Generation ends when the decoded turn contains one of these. The tokens that complete it are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends when one of these is sampled. It is kept, as the turn's last token."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(
                f"temperature >= 0, 0 < top_p <= 1, 0 <= min_p < 1. Got {self.temperature}, {self.top_p}, {self.min_p}"
            )
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k must be -1 (off) or at least 1, got {self.top_k}")

    def greedy(self) -> SamplingParams:
        """The same turn without chance."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)


@dataclass(frozen=True)
class GenerationRequest:
    """One assistant turn to sample: exact ids in, exact ids out."""

    input_ids: list[int]
    """Everything the model has seen so far, generation prompt included."""
    sampling: SamplingParams
    request_id: str
    session_id: str
    """Same for all turns of one record: an engine may keep the KV cache of a session."""
    deadline_s: float | None = None
    """Seconds from now after which the engine aborts and returns what it has (finish_reason `abort`)."""
    limit_s: float | None = None
    """Set: an engine that sees its tokens come may count `deadline_s` from the last one, and time in its queue not at
    all. It aborts after `limit_s` seconds from now at the latest (inf = no limit)."""
    media: dict[str, Any] = field(default_factory=dict)
    """`inputs`: the `MediaInput`s of the record, whose placeholder tokens are in `input_ids`. Empty for text."""


@dataclass(frozen=True)
class VersionSpan:
    """`num_tokens` consecutive sampled tokens that came from one version of the weights."""

    version: int
    num_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds that one request spent in each phase, by a monotonic clock."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class GenerationOutput:
    """What the engine sampled.

    `len(token_ids) == len(log_probs) == sum(span.num_tokens)`. An engine that yields only text
    (`capabilities.returns_token_ids` false) sets `text` and leaves `token_ids` and `log_probs` None.
    """

    token_ids: list[int] | None
    log_probs: list[float] | None
    """log_softmax(logits / T) of each sampled id. None from a text-only engine."""
    finish_reason: FinishReason
    """stop: an end-of-turn token, stop id or stop string (all kept). length: the token limit. abort: cut off."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    """How many of `input_ids` needed no prefill."""
    timings: Timings = Timings()
    text: str | None = None
    replica: str | None = None
    """Which of the engine's replicas sampled it. None from an engine that is one."""
