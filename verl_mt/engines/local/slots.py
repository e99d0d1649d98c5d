"""Requests and sessions in the local engine, and the rows (slots) of the key-value cache that they hold.

`Slots` is the table beside the cache: which row holds which tokens of which request, and how far it got. Its columns
are arrays over the rows, so that a step costs no Python work per row. `S` rows, `M` positions.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

import numpy as np

from verl_mt.data.requests import FinishReason, GenerationOutput, GenerationRequest, Timings, VersionSpan
from verl_mt.engines.local.model_runner import KVCache
from verl_mt.engines.local.sampling import BLOCK, SamplingRows, uniforms
from verl_mt.engines.stop_strings import StopStrings

_COLUMNS = {
    "known": np.int64,
    "computed": np.int64,
    "start": np.int64,
    "limit": np.int64,
    "admission": np.int64,
    "last_used": np.int64,
    "temperature": np.float64,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float64,
    "watched": np.bool_,
}
_TABLES = ("ids", "log_probs", "uniform")


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
class CachedSession:
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
    future: asyncio.Future[GenerationOutput] | None = None
    """Who waits for it."""
    session: CachedSession = field(init=False)
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


class Slots:
    """Rows of the cache and what is in them."""

    known: np.ndarray
    """[S] ids that are known; equals `computed` in a row that no request is using."""
    computed: np.ndarray
    """[S] leading ids whose keys and values are in the cache."""
    start: np.ndarray
    """[S] where the turn that is being sampled begins."""
    limit: np.ndarray
    """[S] length at which it ends."""
    admission: np.ndarray
    """[S] rank of admission: who is prefilled first."""
    last_used: np.ndarray
    """[S] step at which the row was last computed."""
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    watched: np.ndarray
    """[S] the request sets stop ids or stop strings."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.owner: list[Sequence | CachedSession | None] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything; the cache keeps its memory."""
        size, length = self.cache.num_rows, self.cache.length
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(size, dtype=dtype))
        self.ids = np.zeros((size, length), dtype=np.int64)
        self.log_probs = np.zeros((size, length), dtype=np.float32)
        self.uniform = np.zeros((size, BLOCK))
        for holder in self.owner:
            if holder is not None:
                holder.row = -1
        self.owner = [None] * size

    def reserve(self, num_rows: int, length: int) -> None:
        """Grow cache and table."""
        if not self.cache.reserve(num_rows, length):
            return
        size = self.cache.num_rows
        for name in (*_COLUMNS, *_TABLES):
            old = getattr(self, name)
            shape = (size,) if old.ndim == 1 else (size, self.cache.length if name != "uniform" else BLOCK)
            new = np.zeros(shape, dtype=old.dtype)
            new[tuple(slice(n) for n in old.shape)] = old
            setattr(self, name, new)
        self.owner += [None] * (size - len(self.owner))

    def take(self) -> int:
        """A row for a new sequence: a free one, a new one, or the least recently used of a waiting session.

        Returns:
            The row, or -1 when every row is being computed.
        """
        for row, holder in enumerate(self.owner):
            if holder is None:
                return row
        size = len(self.owner)
        if size < self.cache.max_rows:
            self.reserve(size + 1, self.cache.length)
            return size
        # Whose next turn is already in the queue loses its row last.
        waiting = [
            (holder.live > 0, int(self.last_used[row]), row)
            for row, holder in enumerate(self.owner)
            if isinstance(holder, CachedSession)
        ]
        if not waiting:
            return -1
        row = min(waiting)[2]
        self.release(row)
        return row

    def release(self, row: int) -> None:
        """Nobody needs the row any more. What it holds may still be shared until it is overwritten."""
        holder = self.owner[row]
        if holder is not None:
            holder.row = -1
        self.owner[row] = None
        self.known[row] = self.computed[row]

    def give(self, row: int, holder: Sequence | CachedSession) -> None:
        """Hand a row over."""
        old = self.owner[row]
        if old is not None:
            old.row = -1
        self.owner[row] = holder
        holder.row = row

    def common_prefix(self, target: np.ndarray) -> np.ndarray:
        """[S] how many leading ids each row has in common with `target`, computed or not."""
        width = min(len(target), int(self.known.max(initial=0)))
        if width == 0:
            return np.zeros(len(self.owner), dtype=np.int64)
        same = self.ids[:, :width] == target[:width]
        # The first False of each row; argmin gives 0 for a row without any, which agrees everywhere.
        first_difference = same.argmin(axis=1)
        first_difference[same[np.arange(len(same)), first_difference]] = width
        return np.minimum(first_difference, self.known)

    def load(self, row: int, sequence: Sequence, computed: int) -> None:
        """Write a sequence's ids and options into its row, of which the first `computed` are already cached."""
        sampling = sequence.request.sampling
        size, start = len(sequence.target), sequence.num_prompt
        self.reserve(len(self.owner), size + 1)  # one more: the token that is sampled next
        self.ids[row, :size] = sequence.target
        self.log_probs[row, start:size] = sequence.log_probs
        self.known[row], self.computed[row] = size, computed
        self.start[row], self.limit[row] = start, sequence.limit
        self.temperature[row], self.top_k[row] = sampling.temperature, sampling.top_k
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.watched[row] = bool(sampling.stop or sampling.stop_token_ids)
        self.uniform[row] = uniforms(sequence.key, (size - start) // BLOCK)

    def sampling_rows(self, rows: np.ndarray) -> SamplingRows:
        """Sampling parameters of some rows, with the next number of each one's stream."""
        sampled = self.known[rows] - self.start[rows]
        for row in rows[(sampled % BLOCK == 0) & (sampled > 0)].tolist():
            holder = self.owner[row]
            assert isinstance(holder, Sequence)
            self.uniform[row] = uniforms(holder.key, int(self.known[row] - self.start[row]) // BLOCK)
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniform=self.uniform[rows, sampled % BLOCK],
        )
