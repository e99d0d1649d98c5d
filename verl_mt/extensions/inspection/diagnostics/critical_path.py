"""Which trajectory, turn and phase held a step, and what the step would have taken without it.

A step's rollout ends with the reward of its last group, and a group waits for its last episode. The *critical path*
is that chain, walked backwards: the reward, the episode's spans (turn by turn), and, where `rollout.max_concurrent`
made it wait for a place, the episode that freed the place. What no span covers is `other`.

Predictions replay the step with some spans gone. Without a lock step a span that goes moves only what follows it in
its own episode (and who waited for its place); the step's new end is the latest of all groups. In a lock step
(deterministic runs, `rollout.mode=sync`) nobody's next token is sampled while one conversation waits for its tool:
such a span holds everybody, except where another conversation's tool runs at the same time.

What is reported as the holder is a phase (of one tool, where it is a tool) in the trajectories of one prompt, whose
samples tend to ask the same tool the same thing at the same time: alone, none of them would save anything.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.data.trajectory import TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import prefix_cache_by_turn
from verl_mt.extensions.inspection.diagnostics.step_replay import (
    OUTSIDE,
    PHASES,
    Episode,
    StepReplay,
    StepSpan,
    measure,
    union,
)

_MAX_CANDIDATES = 12
_HOLDER, _TRAJECTORY = "critical_path/holder", "critical_path/trajectory"
_WORTH_NAMING = 0.05
"""Share of the run's time that somebody must have held to be called its holder."""


@dataclass(frozen=True)
class Segment:
    """A piece of the critical path, in seconds since the first span of the step."""

    trajectory_id: str
    """Empty for the trainer's own phases."""
    turn: int
    phase: str
    """One of `PHASES`, or the name of a phase of the trainer."""
    name: str
    """The tool or the interaction."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Holder:
    """What held the step."""

    trajectory_id: str
    prompt_id: str
    turn: int
    phase: str
    name: str
    """The tool or the interaction."""
    span_s: float
    """What this phase took in this turn."""
    saving_s: float
    """By how much the step would be shorter had this phase (of this tool) taken no time for this prompt."""
    saving_alone_s: float
    """The same, had only this one span taken no time."""
    saving_everywhere_s: float
    """The same, had this phase (of this tool) taken no time for any prompt."""

    @property
    def what(self) -> str:
        return f"{self.phase} {self.name}".rstrip()


@dataclass(frozen=True)
class CriticalPath:
    """The answer for one step. `to_dict()` is plain JSON data."""

    segments: tuple[Segment, ...]
    """In order of time, without holes."""
    holder: Holder | None
    """None where no trajectory has a span."""
    rollout_s: float
    """From the first span to the last."""
    step_s: float
    """The whole step; that of the rollout where it is not known."""
    phase_share: dict[str, float]
    """The share of each phase in the time of all trajectories; sums to 1."""

    @property
    def without_s(self) -> float:
        """Seconds that the step would have taken without its holder."""
        return self.step_s - (self.holder.saving_s if self.holder is not None else 0.0)

    @property
    def words(self) -> str:
        """One sentence, e.g. for a log."""
        held = self.holder
        if held is None:
            return "nothing was rolled out"
        return (
            f"{held.what} of {held.trajectory_id}, turn {held.turn}: {held.span_s:.2f} s; without it the step would "
            f"have taken {self.without_s:.2f} s instead of {self.step_s:.2f} s"
        )

    def metrics(self) -> dict[str, float]:
        """`critical_path/...`: the holder's numbers, seconds of the path and share of all time for each phase."""
        found = {f"critical_path/share_{phase}": share for phase, share in self.phase_share.items()}
        on_path: dict[str, float] = defaultdict(float)
        for segment in self.segments:
            on_path[segment.phase] += segment.end_s - segment.start_s
        found |= {f"critical_path/path_{phase}_s": seconds for phase, seconds in on_path.items()}
        if self.holder is not None:
            found |= {
                "critical_path/turn": self.holder.turn,
                "critical_path/span_s": self.holder.span_s,
                "critical_path/saving_s": self.holder.saving_s,
                "critical_path/saving_alone_s": self.holder.saving_alone_s,
                "critical_path/saving_everywhere_s": self.holder.saving_everywhere_s,
                "critical_path/without_s": self.without_s,
            }
        return found

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"without_s": self.without_s, "words": self.words}


def critical_path(
    trajectories: Iterable[Trajectory],
    *,
    lock_step: bool = False,
    step_s: float | None = None,
    trainer_phases: Mapping[str, float] | None = None,
) -> CriticalPath:
    """The critical path of one step.

    Args:
        trajectories: all of the step, with their `time_spans` on one clock.
        lock_step: nobody's next token was sampled while one conversation was outside the engine.
        step_s: seconds of the whole step; None = of the rollout.
        trainer_phases: seconds of what the trainer did after the rollout, in order; they end the path.
    """
    spans = [
        StepSpan(t.episode_id or t.trajectory_id, t.prompt_id, t.trajectory_id, span)
        for t in trajectories
        for span in t.time_spans
    ]
    return _path(spans, lock_step, step_s, trainer_phases or {})


def critical_path_of_rows(rows: Iterable[Mapping[str, Any]], *, lock_step: bool = False) -> CriticalPath:
    """The same from rollout rows (`data.run_files`) of one step, without what the trainer did afterwards."""
    spans = [
        StepSpan(row["episode_id"], row["prompt_id"], row["trajectory_id"], TimeSpan(**span))
        for row in rows
        for span in row["time_spans"]
    ]
    return _path(spans, lock_step, None, {})


def _path(
    spans: Sequence[StepSpan], lock_step: bool, step_s: float | None, trainer_phases: Mapping[str, float]
) -> CriticalPath:
    if not spans:
        return CriticalPath((), None, 0.0, step_s or 0.0, {})
    step = StepReplay(spans, lock_step)
    pieces = _walk(step)
    if lock_step:
        pieces = _who_held(step, pieces)
    segments = [
        Segment(
            span.trajectory_id,
            span.span.turn,
            phase,
            "" if phase == "other" else span.span.name,
            start - step.start,
            end - step.start,
        )
        for span, phase, start, end in pieces
    ]
    rollout_s = step.end - step.start
    edge = rollout_s
    for name, seconds in trainer_phases.items():
        segments.append(Segment("", 0, name, "", edge, edge + seconds))
        edge += seconds
    total = rollout_s if step_s is None else step_s
    return CriticalPath(tuple(segments), _holder(step, pieces), rollout_s, total, _shares(step))


_Piece = tuple[StepSpan, str, float, float]
"""A span, its phase or `other` for the hole after it, and the part of it that is on the path."""


def _walk(step: StepReplay) -> list[_Piece]:
    """From the end of the last group back to the first span."""
    group = max(step.groups, key=lambda g: g.end)
    pieces: list[_Piece] = []
    edge = group.end
    if group.reward is not None:
        edge = group.reward.span.start_s
        pieces.append((group.reward, "reward", edge, group.end))
    episode: Episode | None = max(group.episodes, key=lambda e: e.end, default=None)
    while episode is not None:
        # From the latest end backwards. Of spans that overlap (tool calls side by side) the one that ended last is what
        # was waited for; the others have their time on the path only where they began before it.
        for span in sorted(episode.spans, key=lambda s: s.interval[::-1], reverse=True):
            start, end = span.interval
            if start >= edge:
                continue
            if end < edge:
                pieces.append((span, "other", end, edge))
            pieces.append((span, span.span.phase, start, min(end, edge)))
            edge = start
        # It began when somebody else's place came free: the path goes on in the episode that ended last before that.
        before = [e for e in step.episodes if e.end <= episode.start and e is not episode]
        if episode.wait is None or not before or episode.start <= step.start:
            if episode.wait is not None and episode.wait.span.start_s < edge:
                pieces.append((episode.wait, "queue", episode.wait.span.start_s, edge))
            break
        episode = max(before, key=lambda e: e.end)
    return pieces[::-1]


def _who_held(step: StepReplay, pieces: list[_Piece]) -> list[_Piece]:
    """In a lock step, a wait in the engine waits for spans of others. Replaces such time by these spans."""
    outside = sorted((s for s in step.spans if s.span.phase in OUTSIDE), key=lambda s: s.interval)
    found: list[_Piece] = []
    for span, phase, start, end in pieces:
        if phase in (*OUTSIDE, "reward"):
            found.append((span, phase, start, end))
            continue
        edge = start
        for other in outside:
            begin, until = max(other.span.start_s, edge), min(other.span.end_s, end)
            if until <= begin:
                continue
            if begin > edge:
                found.append((span, phase, edge, begin))
            found.append((other, other.span.phase, begin, until))
            edge = until
        if edge < end:
            found.append((span, phase, edge, end))
    return found


def _holder(step: StepReplay, pieces: list[_Piece]) -> Holder | None:
    on_path: dict[tuple[str, str, str], float] = defaultdict(float)
    for span, phase, start, end in pieces:
        if phase != "other" and not span.is_wait:
            on_path[span.cause] += end - start
    if not on_path:
        return None
    likely = sorted(on_path, key=lambda cause: on_path[cause], reverse=True)[:_MAX_CANDIDATES]
    savings = {cause: step.saving(lambda s, c=cause: s.cause == c) for cause in likely}  # type: ignore[misc]
    cause = max(likely, key=lambda c: (savings[c], on_path[c]))
    longest = max((p for p in pieces if p[0].cause == cause and p[1] != "other"), key=lambda p: p[3] - p[2])[0]
    return Holder(
        trajectory_id=longest.trajectory_id,
        prompt_id=longest.prompt_id,
        turn=longest.span.turn,
        phase=longest.span.phase,
        name=longest.span.name,
        span_s=longest.span.end_s - longest.span.start_s,
        saving_s=savings[cause],
        saving_alone_s=step.saving(lambda s: s is longest),
        saving_everywhere_s=step.saving(lambda s: s.cause[1:] == cause[1:] and not s.is_wait),
    )


def _shares(step: StepReplay) -> dict[str, float]:
    seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for episode in step.episodes:
        waiting = [episode.wait] if episode.wait is not None else []
        for phase in PHASES[:-2]:
            seconds[phase] += measure(union(s.interval for s in (*waiting, *episode.spans) if s.span.phase == phase))
        begun = waiting[0].span.start_s if waiting else episode.start
        covered = measure(union(s.interval for s in (*waiting, *episode.spans)))
        seconds["other"] += episode.end - begun - covered
    for group in step.groups:
        if group.reward is not None:
            seconds["reward"] += (group.reward.span.end_s - group.reward.span.start_s) * max(1, len(group.episodes))
    total = sum(seconds.values())
    return {phase: amount / total if total else 0.0 for phase, amount in seconds.items()}


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
    nobody = "" if sum(saved[most]) >= _WORTH_NAMING * total else "nobody for 5% of the time; most by "
    return [
        ("rollouts spent", _mean_shares(held)),
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


def _mean_shares(lines: Sequence[Mapping[str, Any]]) -> str:
    """What the trajectories' time went into, largest first; less than half a percent is left out."""
    means = {phase: fmean(line.get(f"critical_path/share_{phase}", 0.0) for line in lines) for phase in PHASES}
    ranked = sorted(means.items(), key=lambda item: item[1], reverse=True)
    return ", ".join(f"{share:.0%} {phase}" for phase, share in ranked if share >= 0.005)
