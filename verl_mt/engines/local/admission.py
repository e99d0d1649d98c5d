"""Who gets a row, and what of it is already there.

Three ways not to compute a token twice:

- a session's next turn continues in its own row, so only the new text is computed;
- a prefix that any row has computed (a system prompt, another sample of the same prompt) is copied;
- a prompt that is being computed right now is waited for: an identical one *follows* and takes keys, values and
  logits when it is done; one that only begins alike stays in the queue for a step and then copies the prefix.
"""

from __future__ import annotations

import numpy as np

from verl_mt.engines.local.sequence import Sequence, State
from verl_mt.engines.local.slots import Slots

WORTH_COPYING = 16
"""Tokens that must be saved before a row's prefix is copied."""
WORTH_WAITING = 32
"""Tokens that must be saved before a sequence waits for another one's prefill."""


class Admission:
    """One pass over the queue."""

    def __init__(self, slots: Slots, running: list[Sequence], room: int):
        """
        Args:
            slots: the rows.
            running: sequences that are being computed.
            room: how many more may be.
        """
        self._slots = slots
        self._room = room
        self._prefilling = [s for s in running if slots.computed[s.row] + 1 < slots.known[s.row]]
        self._seen: dict[bytes, Sequence | None] = {}

    def run(self, queue: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Give rows to as many as possible.

        Returns:
            (admitted, still queued); admitted ones are RUNNING or FOLLOWING and have a row.
        """
        admitted: list[Sequence] = []
        for index, sequence in enumerate(queue):
            if self._room == 0:
                return admitted, self._merge(queue, admitted, index)
            placed = self._place(sequence)
            if placed is None:
                return admitted, self._merge(queue, admitted, index)
            if placed:
                self._room -= 1
                admitted.append(sequence)
        return admitted, self._merge(queue, admitted, len(queue))

    @staticmethod
    def _merge(queue: list[Sequence], admitted: list[Sequence], index: int) -> list[Sequence]:
        inside = set(map(id, admitted))
        return [s for s in queue[:index] if id(s) not in inside] + queue[index:]

    def _place(self, sequence: Sequence) -> bool | None:
        """True: it has a row; False: it waits for a prefill; None: no row is left."""
        slots, key = self._slots, sequence.target.tobytes()
        if key in self._seen:
            leader = self._seen[key]
            return False if leader is None else self._follow(sequence, leader)
        common = slots.common_prefix(sequence.target)
        computed = np.minimum(common, slots.computed)
        source = int(computed.argmax()) if len(computed) else -1
        best = int(computed[source]) if source >= 0 else 0
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
