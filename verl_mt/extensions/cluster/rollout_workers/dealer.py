"""Who rolls out which group: dealt out by load, and dealt again when a worker is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from verl_mt.rollout.prompts import Prompt

MAX_LOST = 3
"""Workers that may end with the same group until it counts as failed. As many workers that end before they are ready,
or failed groups in a row, end the run."""


@dataclass(eq=False)
class Job:
    """A group to be rolled out: a prompt of a plan."""

    plan: str
    position: int
    prompt: Prompt
    num_conversations: int
    num_lost: int = 0
    """Workers that ended while it was theirs."""

    @property
    def key(self) -> tuple[str, int]:
        return self.plan, self.position

    @property
    def num_tokens(self) -> int:
        """Of its prompts: all that is known of its size before it is rolled out."""
        return self.num_conversations * len(self.prompt.ids)

    @property
    def is_suspect(self) -> bool:
        """A worker ended while it had this group, perhaps because of it."""
        return self.num_lost > 0

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.plan}.{self.position:05d} ({self.prompt.row.place})"


@dataclass(eq=False)
class _Hand:
    """What one worker has."""

    jobs: dict[tuple[str, int], Job] = field(default_factory=dict)
    num_conversations: int = 0
    num_tokens: int = 0

    @property
    def load(self) -> tuple[int, int]:
        return self.num_conversations, self.num_tokens

    @property
    def has_suspect(self) -> bool:
        return any(job.is_suspect for job in self.jobs.values())

    def take(self, job: Job) -> None:
        self.jobs[job.key] = job
        self.num_conversations += job.num_conversations
        self.num_tokens += job.num_tokens

    def drop(self, key: tuple[str, int]) -> Job | None:
        job = self.jobs.pop(key, None)
        if job is not None:
            self.num_conversations -= job.num_conversations
            self.num_tokens -= job.num_tokens
        return job


class Dealer:
    """Keeps what is unfinished, and whose it is.

    A group that a worker ended with is a suspect. It is dealt alone, so that no other group is lost with it again and
    the third loss is its own.

    Args:
        capacity: conversations that live at once in a worker; None = as many as come. A worker with a limit gets one
            group more than it has room for, so that it never waits for the next.
    """

    def __init__(self, capacity: int | None = None):
        self._capacity = capacity
        self._hands: dict[int, _Hand] = {}
        self._waiting: deque[Job] = deque()

    def join(self, worker: int) -> None:
        """A worker is there, and has nothing."""
        self._hands[worker] = _Hand()

    def leave(self, worker: int) -> tuple[list[Job], list[Job]]:
        """A worker is gone: the groups that are dealt again before anything else, and those lost `MAX_LOST` times."""
        hand = self._hands.pop(worker, None)
        lost = [] if hand is None else sorted(hand.jobs.values(), key=lambda job: job.key)
        for job in lost:
            job.num_lost += 1
        again = [job for job in lost if job.num_lost < MAX_LOST]
        self._waiting.extendleft(reversed(again))
        return again, [job for job in lost if job.num_lost >= MAX_LOST]

    def add(self, jobs: Iterable[Job]) -> None:
        """Groups of a plan that begins."""
        self._waiting.extend(jobs)

    def deal(self) -> Iterator[tuple[int, Job]]:
        """(worker, group) for all that can begin now: each to the worker with the fewest live conversations, of equal
        ones to that with the fewest tokens. While suspects wait, one worker gets nothing else until it is free."""
        while (suspect := next((job for job in self._waiting if job.is_suspect), None)) is not None:
            free = [number for number, hand in self._hands.items() if not hand.jobs]
            if not free:
                break
            yield self._give(min(free), suspect)
        while True:
            open_to_all = [number for number, hand in self._hands.items() if not hand.has_suspect]
            open_to_all.sort(key=lambda number: (*self._hands[number].load, number))
            job = next((job for job in self._waiting if not job.is_suspect), None)
            if suspect is not None:
                open_to_all = open_to_all[1:]
            if job is None or not open_to_all:
                return
            hand = self._hands[open_to_all[0]]
            if self._capacity is not None and hand.num_conversations >= self._capacity + job.num_conversations:
                return
            yield self._give(open_to_all[0], job)

    def _give(self, worker: int, job: Job) -> tuple[int, Job]:
        self._waiting.remove(job)
        self._hands[worker].take(job)
        return worker, job

    def finish(self, worker: int, key: tuple[str, int]) -> Job | None:
        """A worker is done with a group; None = it was not, or no longer, its."""
        hand = self._hands.get(worker)
        return None if hand is None else hand.drop(key)

    def forget(self, plan: str) -> None:
        """A plan is over; what is left of it is nobody's."""
        self._waiting = deque(job for job in self._waiting if job.plan != plan)
        for hand in self._hands.values():
            for key in [key for key in hand.jobs if key[0] == plan]:
                hand.drop(key)


def cause_of(job: Job) -> str:
    """Why a group failed that was lost `MAX_LOST` times."""
    return (
        f"{MAX_LOST} rollout workers ended while they had {job.where}, the last ones with nothing else: does a tool or "
        "a reward end its own process, or is the memory too small?"
    )
