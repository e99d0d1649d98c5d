"""A step's rollout as groups of episodes, and when it would have ended without some of its spans."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from verl_mt.data.trajectory import TimeSpan

PHASES = ("queue", "prefill", "decode", "tool", "interaction", "reward", "other")
OUTSIDE = ("tool", "interaction")
"""Phases in which a conversation does not wait for the engine."""


@dataclass(frozen=True)
class StepSpan:
    episode_id: str
    prompt_id: str
    trajectory_id: str
    span: TimeSpan

    @property
    def interval(self) -> tuple[float, float]:
        return self.span.start_s, self.span.end_s

    @property
    def is_wait(self) -> bool:
        """For a place among `rollout.max_concurrent`."""
        return self.span.phase == "queue" and self.span.turn == 0

    @property
    def cause(self) -> tuple[str, str, str]:
        return self.prompt_id, self.span.phase, self.span.name


Chosen = Callable[[StepSpan], bool]


@dataclass
class Episode:
    """The spans of one episode, its reward aside."""

    spans: list[StepSpan]
    wait: StepSpan | None

    @cached_property
    def start(self) -> float:
        return self.wait.span.end_s if self.wait is not None else min(s.span.start_s for s in self.spans)

    @cached_property
    def end(self) -> float:
        return max((s.span.end_s for s in self.spans), default=self.start)

    def saved(self, chosen: Chosen) -> float:
        """How much shorter it is without the chosen spans; where another span covers the same time, nothing is won."""
        gone = [s for s in self.spans if chosen(s)]
        if not gone:
            return 0.0
        left = union(s.interval for s in self.spans if s not in gone)
        return measure(minus(union(s.interval for s in gone), left))


@dataclass
class Group:
    episodes: list[Episode]
    reward: StepSpan | None

    @cached_property
    def finish(self) -> float:
        return max((e.end for e in self.episodes), default=self.reward.span.start_s if self.reward is not None else 0.0)

    @cached_property
    def end(self) -> float:
        return self.finish if self.reward is None else self.reward.span.end_s

    def new_end(self, finish: float, chosen: Chosen) -> float:
        """The end of the reward where the last episode ends at `finish`."""
        if self.reward is None:
            return finish
        start, end = self.reward.interval
        return finish + (start - self.finish) + (0.0 if chosen(self.reward) else end - start)


class StepReplay:
    """The step as groups of episodes, and what it would have been."""

    def __init__(self, spans: Sequence[StepSpan], lock_step: bool):
        self.spans = spans
        self.groups = _groups(spans)
        self.episodes = sorted((e for g in self.groups for e in g.episodes), key=lambda e: e.start)
        self.lock_step = lock_step
        self.gated = any(e.wait is not None for e in self.episodes)
        self.start = min(s.span.start_s for s in spans)
        self.end = max(g.end for g in self.groups)

    def saving(self, chosen: Chosen) -> float:
        """By how much the step would end earlier without the chosen spans."""
        # Replayed against replayed, not against what was measured: what a replay gets wrong (a place that stood free
        # for a moment) is in both, and falls out.
        return max(0.0, self._end_as_it_was - self._simulated_end(chosen))

    @cached_property
    def _end_as_it_was(self) -> float:
        return self._simulated_end(lambda span: False)

    def held(self, chosen: Chosen, phase: str) -> Intervals:
        """In a lock step: when the chosen spans, all of one phase, and nothing else kept everybody waiting."""
        stops = OUTSIDE if phase in OUTSIDE else PHASES
        gone = union(s.interval for s in self.spans if chosen(s))
        others = (
            s.interval for s in self.spans if s.span.phase in stops and s.span.phase != "reward" and not chosen(s)
        )
        return minus(gone, union(others))

    def _simulated_end(self, chosen: Chosen) -> float:
        ends = self._lock_step_ends(chosen) if self.lock_step else self._free_ends(chosen)
        finishes = (max((ends[id(e)] for e in g.episodes), default=g.finish) for g in self.groups)
        return max(g.new_end(finish, chosen) for g, finish in zip(self.groups, finishes))

    def _free_ends(self, chosen: Chosen) -> dict[int, float]:
        """Episodes begin when they did, or, where there are places, as soon as one is free."""
        if not self.gated:
            return {id(e): e.end - e.saved(chosen) for e in self.episodes}
        first = min(e.start for e in self.episodes)
        places = [first] * max(1, _num_places(self.episodes))
        ends: dict[int, float] = {}
        for episode in self.episodes:
            begun = heapq.heappop(places)
            ends[id(episode)] = begun + (episode.end - episode.start) - episode.saved(chosen)
            heapq.heappush(places, ends[id(episode)])
        return ends

    def _lock_step_ends(self, chosen: Chosen) -> dict[int, float]:
        found = next((s for s in self.spans if chosen(s)), None)
        gone = [] if found is None or found.span.phase == "reward" else self.held(chosen, found.span.phase)
        return {id(e): e.end - measure(gone, e.end) for e in self.episodes}


def _groups(spans: Sequence[StepSpan]) -> list[Group]:
    """By prompt, then by episode; a reward is a group's."""
    by_prompt: dict[str, dict[str, list[StepSpan]]] = defaultdict(lambda: defaultdict(list))
    rewards: dict[str, StepSpan] = {}
    for span in spans:
        if span.span.phase == "reward":
            last = rewards.get(span.prompt_id)
            if last is None or span.span.end_s > last.span.end_s:
                rewards[span.prompt_id] = span
            by_prompt[span.prompt_id]
        else:
            by_prompt[span.prompt_id][span.episode_id].append(span)
    groups = []
    for prompt_id, episodes in by_prompt.items():
        made = [
            Episode([s for s in members if not s.is_wait], next((s for s in members if s.is_wait), None))
            for members in episodes.values()
        ]
        groups.append(Group(made, rewards.get(prompt_id)))
    return groups


def _num_places(episodes: Sequence[Episode]) -> int:
    """How many episodes had begun when the first of them ended: until then no place can have been taken twice."""
    first = min(e.end for e in episodes)
    return sum(e.start < first for e in episodes)


Intervals = list[tuple[float, float]]
"""Disjoint `(start, end)`, sorted."""


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Everything that at least one of them covers."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def minus(first: Intervals, second: Intervals) -> Intervals:
    """What `first` covers and `second` does not; both disjoint and sorted."""
    left: Intervals = []
    place = 0
    for start, end in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        edge = start
        for begin, until in second[place:]:
            if begin >= end:
                break
            if begin > edge:
                left.append((edge, begin))
            edge = max(edge, until)
        if edge < end:
            left.append((edge, end))
    return left


def measure(intervals: Intervals, before: float = float("inf")) -> float:
    """Seconds that they cover up to the time `before`."""
    return sum(max(0.0, min(end, before) - start) for start, end in intervals)
