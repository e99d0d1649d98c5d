"""How much of each turn's prompt the engine had computed before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from verl_mt.data.trajectory import Trajectory

_MAX_TURNS = 8


def prefix_cache_by_turn(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """`rollout/prefix_cache_hit_rate_turn_<k>`: cached tokens over input tokens of the k-th assistant turn.

    Turns beyond the eighth are one number, `..._turn_9_on`: a rate that falls from one turn to the next says that the
    engine evicts conversations while their tools work.
    """
    cached: dict[int, float] = defaultdict(float)
    asked: dict[int, float] = defaultdict(float)
    for trajectory in trajectories:
        for name, amount in trajectory.counters.items():
            kind, _, turn = name.partition("/")
            if kind in ("cached_tokens", "input_tokens") and turn:
                (cached if kind == "cached_tokens" else asked)[min(int(turn), _MAX_TURNS + 1)] += amount
    return {
        f"rollout/prefix_cache_hit_rate_turn_{turn if turn <= _MAX_TURNS else f'{turn}_on'}": cached[turn] / asked[turn]
        for turn in sorted(asked)
        if asked[turn]
    }
