"""Who held each step, for the step's metrics and the closing summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.diagnostics.critical_path import critical_path
from verl_mt.diagnostics.prefix_cache import prefix_cache_by_turn
from verl_mt.diagnostics.step_replay import PHASES

_HOLDER, _TRAJECTORY = "critical_path/holder", "critical_path/trajectory"
_WORTH_NAMING = 0.05
"""Share of the run's time that somebody must have held to be called its holder."""


class Straggler:
    """Looks at the spans of each step."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def observe(
        self, groups: Sequence[TrajectoryGroup], timing: Mapping[str, float], *, lock_step: bool
    ) -> dict[str, float]:
        """`critical_path/...` and the prefix cache's hit rate of each turn.

        Args:
            groups: what the step rolled out.
            timing: `time/..._s` of the step, of its rollout, and of what followed it, in order.
            lock_step: see the engine's capability of that name.
        """
        after = {
            name.removeprefix("time/").removesuffix("_s"): seconds
            for name, seconds in timing.items()
            if name not in ("time/step_s", "time/rollout_s")
        }
        trajectories = [t for g in groups for t in g.trajectories]
        found = critical_path(trajectories, lock_step=lock_step, step_s=timing["time/step_s"], trainer_phases=after)
        if found.holder is not None:
            self._words = {_HOLDER: found.holder.what, _TRAJECTORY: found.holder.trajectory_id}
        return found.metrics() | prefix_cache_by_turn(trajectories)

    def take_words(self) -> dict[str, str]:
        """The names of the last step's holder, once."""
        words, self._words = self._words, {}
        return words


def closing_words(folder: Path) -> list[tuple[str, str]]:
    """Rows for the closing summary: what its time went into, what held it, and in which step most."""
    lines: dict[int, dict[str, Any]] = defaultdict(dict)
    for name in ("metrics.jsonl", "timings.jsonl"):
        if (folder / name).exists():
            for line in read_jsonl_tolerant(folder / name):
                lines[line["step"]] |= line
    held = [line for line in lines.values() if _HOLDER in line]
    if not held:
        return []
    saved: dict[str, list[float]] = defaultdict(list)
    for line in held:
        saved[line[_HOLDER]].append(line["critical_path/saving_s"])
    most = max(saved, key=lambda what: sum(saved[what]))
    total = sum(line["time/step_s"] for line in held)
    worst = max(held, key=lambda line: line["critical_path/saving_s"])
    nobody = "" if sum(saved[most]) >= _WORTH_NAMING * total else "nobody for long; most by "
    return [
        ("rollouts spent", _shares(held)),
        (
            "held by",
            f"{nobody}[bold]{most}[/], in {len(saved[most])} of {len(held)} steps: without the prompt that waited for "
            f"it, {sum(saved[most]):.1f} s less than {total:.1f} s",
        ),
        (
            "most in one step",
            f"step {worst['step']}: {worst[_HOLDER]} of {worst[_TRAJECTORY]}, turn {worst['critical_path/turn']:.0f}, "
            f"{worst['critical_path/span_s']:.2f} s; without it {worst['critical_path/without_s']:.2f} s instead of "
            f"{worst['time/step_s']:.2f} s",
        ),
    ]


def _shares(lines: Sequence[Mapping[str, Any]]) -> str:
    """What the trajectories' time went into, largest first; less than half a percent is left out."""
    means = {phase: fmean(line.get(f"critical_path/share_{phase}", 0.0) for line in lines) for phase in PHASES}
    ranked = sorted(means.items(), key=lambda item: item[1], reverse=True)
    return ", ".join(f"{share:.0%} {phase}" for phase, share in ranked if share >= 0.005)
