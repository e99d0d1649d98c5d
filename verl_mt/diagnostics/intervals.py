"""Sets of time intervals: lists of disjoint `(start, end)`, sorted."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


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
