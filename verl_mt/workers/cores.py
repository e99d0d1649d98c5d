"""How many threads a process takes where nobody says it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from verl_mt.workers.setup import Placement

_STAT = Path("/proc/stat")
_MOST = 4
_WATCHED_S = 0.25


def cores_per_worker(placement: Placement) -> int:
    """CPU threads of one Ray worker."""
    if placement.num_threads is not None:
        return placement.num_threads
    if placement.deterministic:
        return 1
    return max(1, len(_allowed()) // placement.n_workers_per_node)


def idle_cores() -> int:
    """Between 1 and 4 of those that this process may use: on busy cores a second thread makes everything slower.

    They are watched for a quarter of a second. The load average, which tells elsewhere (not on Linux), is of the last
    minute: it counts what has just ended, such as the command before this one.
    """
    allowed = _allowed()
    before = _spent(_STAT)
    if before:
        time.sleep(_WATCHED_S)
    after = _spent(_STAT)
    if not all(core in before and core in after and after[core][1] > before[core][1] for core in allowed):
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return max(1, min(_MOST, round(len(allowed) - busy)))
    idle = sum((after[core][0] - before[core][0]) / (after[core][1] - before[core][1]) for core in allowed)
    return max(1, min(_MOST, round(idle)))


def _allowed() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def _spent(stat: Path) -> dict[int, tuple[int, int]]:
    """Core -> (ticks without work, all ticks) since the machine began (`man proc_stat`); empty where nobody counts."""
    found = {}
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    for line in lines:
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu":
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice.
            ticks = [int(number) for number in numbers[:8]]
            found[int(name.removeprefix("cpu"))] = (sum(ticks[3:5]), sum(ticks))
    return found
