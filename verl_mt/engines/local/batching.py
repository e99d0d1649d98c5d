"""Continuous batching: who gets a row, what the next step computes, and how a turn ends.

Runs in the engine's thread only; knows nothing of event loops.

Three ways not to compute a token twice:

- a session's next turn continues in its own row, so only the new text is computed;
- a prefix that any row has computed (a system prompt, another sample of the same prompt) is copied;
- a prompt that is being computed right now is waited for: an identical one *follows* and takes keys, values and
  logits when it is done; one that only begins alike stays in the queue for a step and then copies the prefix.

And on a CPU one way not to read twice what was computed: `shared_prefix.py`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from verl_mt.data.requests import FinishReason, GenerationOutput
from verl_mt.engines.local.model_runner import KVCache, PackedForward, StepTokens
from verl_mt.engines.local.sampling import stream_key
from verl_mt.engines.local.slots import CachedSession, Sequence, Slots, State
from verl_mt.errors import DeadlineError, EngineError

WORTH_COPYING = 16
"""Tokens that must be saved before a row's prefix is copied."""
WORTH_WAITING = 32
"""Tokens that must be saved before a sequence waits for another one's prefill."""


@dataclass(frozen=True)
class LocalOptions:
    """How the local engine runs."""

    max_num_seqs: int = 256
    """Sequences that are computed at once."""
    max_slots: int | None = None
    """Rows of the cache, waiting sessions included; None = `max_num_seqs`."""
    max_prefill_tokens: int = 2048
    """Prompt tokens of one forward pass; longer prompts take several."""
    deterministic: bool = False
    """A step starts only when every open session waits in the engine; sessions are served by their `order`."""
    seed: int = 0
    """Of requests that bring none."""
    forward: Callable[[torch.nn.Module, int], PackedForward] = PackedForward
    """(module, max_model_len) -> what computes the steps."""


class Batcher:
    """Sequences, their rows, and the steps that advance them."""

    def __init__(
        self, forward: PackedForward, end_token_ids: tuple[int, ...], max_model_len: int, options: LocalOptions
    ):
        self.forward = forward
        self.options = options
        self.version = 0
        self.paused = False
        self.finished: list[tuple[Sequence, GenerationOutput | BaseException]] = []
        """Results for the callers; whoever calls `step` empties it."""
        self.sessions: dict[str, CachedSession] = {}
        self.slots = Slots(KVCache(options.max_slots or options.max_num_seqs, max_model_len))
        self._ends = np.zeros(forward.vocab_size, dtype=np.bool_)
        self._ends[list(end_token_ids)] = True
        self._live: dict[str, Sequence] = {}
        self._queue: list[Sequence] = []
        self._running: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_tickets = self._num_steps = self._num_admitted = 0

    # Requests and sessions

    def open(self, session_id: str, order: int) -> None:
        """A session begins."""
        self.sessions[session_id] = CachedSession(session_id, order)

    def close(self, session_id: str) -> None:
        """A session ends; its row is free, at once or when its last request is done. Unknown ones are ignored."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.is_open = False
            if session.row >= 0:
                self.slots.release(session.row)
        self._forget_if_idle()

    def submit(self, sequence: Sequence) -> None:
        """A request arrives."""
        request = sequence.request
        if request.request_id in self._live:
            self._hand_over(sequence, EngineError(f"request_id {request.request_id!r} is already being sampled"))
            return
        session = self.sessions.get(request.session_id)
        if session is None:
            if self.options.deterministic:
                text = f"session {request.session_id!r} is not open: with deterministic=True call open_session first"
                self._hand_over(sequence, EngineError(text))
                return
            session = self.sessions[request.session_id] = CachedSession(request.session_id, self._num_tickets)
        sequence.session, sequence.ticket = session, self._num_tickets
        sequence.key = self._stream(sequence)
        self._num_tickets += 1
        session.live += 1
        session.turns += 1
        self._live[request.request_id] = sequence
        self._queue.append(sequence)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (sequence.submitted + request.deadline_s, sequence.ticket, sequence))

    def abort(self, request_id: str) -> None:
        """End a request with what it has. Unknown ones are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, "abort")

    def abort_all(self) -> None:
        """End all requests with what they have."""
        for sequence in list(self._live.values()):
            self._end(sequence, "abort")

    def fail_all(self, make_error: Callable[[], BaseException]) -> None:
        """The engine is gone: every request raises a separate error."""
        for sequence in self._live.values():
            self._hand_over(sequence, make_error())
        self._live.clear()
        self._queue, self._running, self._deadlines = [], [], []

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].state is State.DONE):
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.state is State.DONE:
                continue
            if self.options.deterministic:
                request = sequence.request
                text = f"request {request.request_id!r} did not finish within deadline_s={request.deadline_s}"
                reason = "; with deterministic=True that is an error, since the result would depend on timing"
                self._end(sequence, DeadlineError(text + reason))
            else:
                self._end(sequence, "abort")

    @property
    def next_deadline(self) -> float | None:
        """Monotonic time of the next deadline."""
        return self._deadlines[0][0] if self._deadlines else None

    # Weights and memory

    def drop_cache(self, *, release: bool = False) -> None:
        """Forget all keys and values; sequences that run go back to the queue with what they sampled.

        Their next step computes prompt and turn anew, with the weights of then, as if both had been given.
        """
        for sequence in [s for s in self._live.values() if s.row >= 0]:
            self._keep_turn(sequence)
            sequence.followers.clear()
            sequence.state = State.QUEUED
            self._queue.append(sequence)
        self._running = []
        if release:
            self.slots.cache.release()
        self.slots.clear()

    def set_version(self, version: int) -> None:
        """The weights have changed."""
        self.drop_cache()
        self.version = version

    def _forget_if_idle(self) -> None:
        """Between two batches of work nothing is remembered, so that a resumed run computes the same bits."""
        # What lies in which row decides the order of rows in a step, and what is copied instead of computed.
        if self.options.deterministic and not self.sessions and not self._live:
            self.slots.clear()
            self._num_steps = self._num_admitted = self._num_tickets = 0

    # Steps

    def runnable(self) -> bool:
        """Whether `step` has something to do now."""
        if self.paused or not self._live:
            return False
        # A matrix product's last bits depend on the number of its rows, so the same batches must meet in every run. Who
        # arrives when is up to the moment; that everybody who could ask has asked is not.
        return not self.options.deterministic or all(s.live for s in self.sessions.values())

    def step(self) -> None:
        """Admit what fits, compute one packed forward pass, sample one token for every row that is ready."""
        self._num_steps += 1
        self._admit()
        work = self._select()
        if work is None:
            return
        logits = self.forward.compute(work, self.slots.cache, self.slots.ids)
        last = np.flatnonzero(np.diff(work.rows, append=-1))
        self.slots.computed[work.rows[last]] = work.positions[last] + 1
        rows, logits = self._feed_followers(work.rows[work.wanted], logits)
        if len(rows):
            self._append(rows, *self.forward.sample(logits, self.slots.sampling_rows(rows)))

    def _admit(self) -> None:
        if not self._queue:
            return
        if self.options.deterministic:
            self._queue.sort(key=lambda s: (s.session.order, s.ticket))
        else:
            # Conversations that have begun come first: behind all that have not, each would wait so long in every turn
            # that its deadline ends it, and its keys and values would be gone by then.
            self._queue.sort(key=lambda s: (s.session.turns == 1 and not s.admitted, s.ticket))
        num_following = sum(len(s.followers) for s in self._running)
        free = self.options.max_num_seqs - len(self._running) - num_following
        held = sum(s.row >= 0 and not s.live for s in self.sessions.values())  # one with a request is in the queue
        longest = max(len(s.target) for s in self._queue) + 1
        cache = self.slots.cache
        wanted = len(self._running) + num_following + held + len(self._queue)
        self.slots.reserve(max(cache.num_rows, min(cache.max_rows, wanted)), longest)
        admitted, self._queue = Admission(self.slots, self._running, free).run(self._queue)
        now = time.monotonic()
        for sequence in admitted:
            self.slots.admission[sequence.row] = self._num_admitted
            self._num_admitted += 1
            sequence.admitted = sequence.admitted or now
            if sequence.state is State.RUNNING:
                self._running.append(sequence)

    def _select(self) -> StepTokens | None:
        """Choose the tokens of this step: prompts first while there are many, then everything together."""
        slots = self.slots
        rows = np.sort(np.fromiter((s.row for s in self._running), dtype=np.int64, count=len(self._running)))
        if not len(rows):
            return None
        slots.reserve(len(slots.owner), int(slots.known[rows].max()) + 1)
        left = slots.known[rows] - slots.computed[rows]
        single, long = rows[left == 1], rows[left > 1]
        long = long[np.argsort(slots.admission[long], kind="stable")]
        counts = slots.known[long] - slots.computed[long]
        budget = self.options.max_prefill_tokens
        if counts.sum() > budget:
            # A pass that decodes a few rows costs nearly as much as one that decodes many: while prompts fill whole
            # passes, decoding waits until they are in.
            single = single[:0]
            counts = np.clip(budget - (np.cumsum(counts) - counts), 0, counts)
            long, counts = long[counts > 0], counts[counts > 0]
        ends = np.cumsum(counts)
        piece_rows = np.repeat(long, counts)
        offsets = np.arange(len(piece_rows)) - np.repeat(ends - counts, counts)
        positions = np.concatenate([slots.computed[single], slots.computed[piece_rows] + offsets])
        all_rows = np.concatenate([single, piece_rows])
        complete = slots.computed[long] + counts == slots.known[long]
        return StepTokens(
            tokens=slots.ids[all_rows, positions],
            rows=all_rows,
            positions=positions,
            num_single=len(single),
            wanted=np.concatenate([np.arange(len(single)), len(single) + ends[complete] - 1]),
        )

    def _feed_followers(self, rows: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """Identical prompts take keys, values and logits of the one that was computed."""
        slots, index = self.slots, list(range(len(rows)))
        extra: list[int] = []
        for place, row in enumerate(rows.tolist()):
            leader = slots.owner[row]
            assert isinstance(leader, Sequence)
            if not leader.followers:
                continue
            targets = [follower.row for follower in leader.followers]
            slots.cache.copy_prefix(row, targets, int(slots.computed[row]))
            slots.computed[targets] = slots.computed[row]
            for follower in leader.followers:
                follower.state = State.RUNNING
                self._running.append(follower)
            leader.followers = []
            extra += targets
            index += [place] * len(targets)
        if not extra:
            return rows, logits
        return np.concatenate([rows, extra]), logits[torch.tensor(index, device=logits.device)]

    def _append(self, rows: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Record one sampled token per row, and end the turns that are over."""
        slots, at = self.slots, self.slots.known[rows]
        for row in rows[at == slots.start[rows]].tolist():
            self._owner(row).first_token = time.monotonic()
        slots.ids[rows, at] = ids
        slots.log_probs[rows, at] = log_probs
        slots.known[rows] = at + 1
        slots.last_used[rows] = self._num_steps
        stopped = self._ends[ids]
        for place in np.flatnonzero(slots.watched[rows]).tolist():
            stopped[place] |= self._stops(self._owner(int(rows[place])), int(ids[place]))
        over = stopped | (at + 1 >= slots.limit[rows])
        broken = ~np.isfinite(log_probs)
        ending = [(self._owner(int(rows[p])), bool(stopped[p]), bool(broken[p])) for p in np.flatnonzero(over | broken)]
        for sequence, stop, nan in ending:
            if nan:
                text = f"request {sequence.request.request_id!r}: the model's logits are not finite (diverged weights?)"
                self._end(sequence, EngineError(text))
            else:
                self._end(sequence, "stop" if stop else "length")
        if broken.any():
            # The cache may hold NaN, and rows that are handed on are not cleared: a masked NaN is still NaN.
            self.drop_cache(release=True)

    def _stops(self, sequence: Sequence, token_id: int) -> bool:
        if token_id in sequence.request.sampling.stop_token_ids:
            return True
        return sequence.stop_strings is not None and sequence.stop_strings.push(token_id)

    def _owner(self, row: int) -> Sequence:
        holder = self.slots.owner[row]
        assert isinstance(holder, Sequence)
        return holder

    # Endings

    def _end(self, sequence: Sequence, how: FinishReason | EngineError) -> None:
        """A request is over; its row stays with its session."""
        session = sequence.session
        for follower in sequence.followers:
            self.slots.release(follower.row)
            follower.state = State.QUEUED
            self._queue.append(follower)
        if sequence.state is State.QUEUED:
            self._queue.remove(sequence)
        elif sequence.state is State.FOLLOWING:
            next(s for s in self._running if sequence in s.followers).followers.remove(sequence)
        else:
            self._running.remove(sequence)
        if sequence.row >= 0:
            row = sequence.row
            self._keep_turn(sequence)
            self.slots.release(row)
            if session.is_open and session.row < 0:
                self.slots.give(row, session)
        session.live -= 1
        del self._live[sequence.request.request_id]
        self._hand_over(sequence, sequence.output(how, time.monotonic()) if isinstance(how, str) else how)
        self._forget_if_idle()

    def _keep_turn(self, sequence: Sequence) -> None:
        """Copy what was sampled out of the row."""
        slots, row = self.slots, sequence.row
        known = int(slots.known[row])
        sequence.target = slots.ids[row, :known].copy()
        sequence.log_probs = slots.log_probs[row, sequence.num_prompt : known].copy()
        sequence.count_version(self.version, known - sequence.num_prompt)

    def _hand_over(self, sequence: Sequence, result: GenerationOutput | BaseException) -> None:
        sequence.state = State.DONE
        self.finished.append((sequence, result))

    def _stream(self, sequence: Sequence) -> int:
        seed = sequence.request.sampling.seed
        if seed is not None:
            return seed
        # A ticket is the order of arrival, which depends on timing; a session's order and its turn do not.
        if self.options.deterministic:
            return stream_key(self.options.seed, self.version, sequence.session.order, sequence.session.turns)
        return stream_key(self.options.seed, sequence.ticket)


class Admission:
    """One pass over the queue."""

    def __init__(self, slots: Slots, running: list[Sequence], free: int):
        """
        Args:
            slots: the rows.
            running: sequences that are being computed.
            free: how many more may run.
        """
        self._slots = slots
        self._free = free
        self._prefilling = [s for s in running if slots.computed[s.row] + 1 < slots.known[s.row]]
        self._seen: dict[bytes, Sequence | None] = {}

    def run(self, queue: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Give rows to as many as possible.

        Returns:
            (admitted, still queued); admitted ones are RUNNING or FOLLOWING and have a row.
        """
        admitted: list[Sequence] = []
        waiting: list[Sequence] = []
        for index, sequence in enumerate(queue):
            placed = self._place(sequence) if self._free else None
            if placed is None:
                # Without a row nobody is overtaken: who comes later would otherwise starve who waits for one.
                return admitted, waiting + queue[index:]
            if placed:
                self._free -= 1
                admitted.append(sequence)
            else:
                waiting.append(sequence)
        return admitted, waiting

    def _place(self, sequence: Sequence) -> bool | None:
        """True: it has a row; False: it waits for a prefill; None: no row is left."""
        slots, key = self._slots, sequence.target.tobytes()
        # A group's samples arrive together: the rows are searched once for all of them, not once for each.
        if key in self._seen:
            leader = self._seen[key]
            return False if leader is None else self._follow(sequence, leader)
        common = slots.common_prefix(sequence.target)
        computed = np.minimum(common, slots.computed)
        source = int(computed.argmax()) if len(computed) else -1
        best = int(computed[source]) if source >= 0 else 0
        # A row that is being prefilled will have more of this prompt than any row has now. Waiting a step for it is
        # cheaper than computing the difference, unless that is short.
        ahead = max(self._prefilling, key=lambda s: int(common[s.row]), default=None)
        if ahead is not None and int(common[ahead.row]) - best >= WORTH_WAITING:
            if len(ahead.target) == len(sequence.target) == int(common[ahead.row]):
                self._seen[key] = ahead
                return self._follow(sequence, ahead)
            self._seen[key] = None
            return False
        placed = self._start(sequence, computed, source)
        if placed:
            self._seen[key] = sequence
            self._prefilling.append(sequence)
        return placed

    def _start(self, sequence: Sequence, computed: np.ndarray, source: int) -> bool | None:
        """Begin computing in the session's own row, in the best free row, or in a new one."""
        slots, own = self._slots, sequence.session.row
        mine = int(computed[own]) if own >= 0 else 0
        best = int(computed[source]) if source >= 0 else 0
        copies = best - mine >= WORTH_COPYING
        if own >= 0:
            row = own
        elif copies and slots.owner[source] is None:
            row, mine, copies = source, best, False
        else:
            row = slots.take()
            if row < 0:
                return None
            if row == source:
                mine, copies = best, False
        # One token at least is computed: its logits pick the next one.
        cached = min(best if copies else mine, len(sequence.target) - 1)
        slots.give(row, sequence)
        slots.load(row, sequence, cached)
        if copies:
            slots.cache.copy_prefix(source, [row], cached)
        sequence.state = State.RUNNING
        if sequence.cached is None:
            sequence.cached = cached
        return True

    def _follow(self, sequence: Sequence, leader: Sequence) -> bool | None:
        own = sequence.session.row
        row = own if own >= 0 else self._slots.take()
        if row < 0:
            return None
        self._slots.give(row, sequence)
        self._slots.load(row, sequence, 0)
        sequence.state = State.FOLLOWING
        if sequence.cached is None:
            sequence.cached = len(sequence.target)
        leader.followers.append(sequence)
        return True
