"""Who rolls out which group: dealt out by load, and dealt again when a worker is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from verl_mt.errors import WorkerError
from verl_mt.rollout.prompts import Prompt

MAX_LOST = 3
"""Workers that may end with the same group, or before they are ready, until the run is stopped."""
_NAMED = 5
"""Groups that a message names; the others are counted."""


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

    def leave(self, worker: int) -> list[Job]:
        """A worker is gone: what it had not finished, which is dealt again before anything else."""
        hand = self._hands.pop(worker, None)
        lost = [] if hand is None else sorted(hand.jobs.values(), key=lambda job: job.key)
        for job in lost:
            job.num_lost += 1
        self._waiting.extendleft(reversed(lost))
        return lost

    def add(self, jobs: Iterable[Job]) -> None:
        """Groups of a plan that begins."""
        self._waiting.extend(jobs)

    def deal(self) -> Iterator[tuple[int, Job]]:
        """(worker, group) for all that can begin now: each to the worker with the fewest live conversations, of equal
        ones to that with the fewest tokens."""
        while self._waiting and self._hands:
            worker = min(self._hands, key=lambda number: (*self._hands[number].load, number))
            job, hand = self._waiting[0], self._hands[worker]
            if self._capacity is not None and hand.num_conversations >= self._capacity + job.num_conversations:
                return
            hand.take(self._waiting.popleft())
            yield worker, job

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


def worn_out(lost: Sequence[Job]) -> WorkerError | None:
    """What to say of groups with which one worker after the other has ended; None where there are none."""
    worn = [job for job in lost if job.num_lost >= MAX_LOST]
    if not worn:
        return None
    names = ", ".join(job.where for job in worn[:_NAMED])
    more = f" and {len(worn) - _NAMED} more" if len(worn) > _NAMED else ""
    return WorkerError(
        f"{MAX_LOST} rollout workers ended while they had {names}{more}: does a tool or a reward end its own "
        "process, or is the memory too small? The same command goes on from the run's last checkpoint"
    )
