"""Says that a run has been dead from its first rollout on.

The collapse guard compares a run with its own past, so what never worked cannot trigger it. Three things leave nothing
to learn from where they hold in *every* rollout of the validation before training and of the first steps: nothing was
rewarded, each tool call failed, a limit cut each conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_mt.data.trajectory import Status, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import tool_calls_and_failures

FIRST_STEPS = 3
_VALIDATION = 0
_MAX_ERROR_CHARACTERS = 160
_NUM_ERRORS = 20
"""Different texts that are remembered of one pass."""


@dataclass
class _Tally:
    """Counts of one pass over prompts."""

    rollouts: int = 0
    values: list[float] = field(default_factory=list)
    """The different scores, at most two of them."""
    calls: float = 0
    failed_calls: float = 0
    cut: int = 0
    call_errors: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)

    @property
    def unrewarded(self) -> bool:
        """Nothing was worth anything, and nothing was worth more than anything else."""
        return self.rollouts > 0 and len(self.values) < 2 and max(self.values, default=0.0) <= 0

    @property
    def calls_fail(self) -> bool:
        return 0 < self.calls <= self.failed_calls

    @property
    def all_cut(self) -> bool:
        return 0 < self.rollouts <= self.cut

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup]) -> _Tally:
        trajectories = [t for g in groups for t in g.trajectories]
        calls, failed = tool_calls_and_failures(trajectories)
        errors = Counter(error for t in trajectories for error in _call_errors(t))
        return cls(
            rollouts=len(trajectories),
            values=sorted({_value(t) for t in trajectories if t.reward is not None})[-2:],
            calls=calls,
            failed_calls=failed,
            cut=sum(t.status is Status.TRUNCATED for t in trajectories),
            call_errors=dict(errors.most_common(_NUM_ERRORS)),
            ends=dict(Counter(str(t.stop_reason) for t in trajectories)),
        )


class DeadStart:
    """Watches the validation before training and the first steps of a run; `words` speaks once, after the last."""

    def __init__(self) -> None:
        self._passes: dict[int, _Tally] = {}

    def observe(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Take in the rollouts of a step, 0 for the validation before training; the same step again replaces it."""
        if step <= FIRST_STEPS:
            self._passes[step] = _Tally.of(groups)

    def words(self, step: int) -> str:
        """One sentence after the last of the first steps, if the run is dead; else an empty text."""
        steps = range(1, FIRST_STEPS + 1)
        if step != FIRST_STEPS or not all(k in self._passes for k in steps):
            return ""
        passes = list(self._passes.values())
        found = [*_unrewarded(passes), *_failing_calls(passes), *_cut(passes)]
        if not found:
            return ""
        since = "the validation before training and " if _VALIDATION in self._passes else ""
        return (
            f"dead from the start: in {since}the first {FIRST_STEPS} steps {'; '.join(found)}: there is nothing to "
            f"learn from. Read rollouts/step_{step:06d}.*, and docs/cold_start.md"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge as if nothing had happened."""
        return {"passes": {step: asdict(tally) for step, tally in self._passes.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._passes = {int(step): _Tally(**tally) for step, tally in state.get("passes", {}).items()}


def _unrewarded(passes: Sequence[_Tally]) -> list[str]:
    if not all(p.unrewarded for p in passes):
        return []
    ends = sum((Counter(p.ends) for p in passes), Counter[str]())
    end, count = ends.most_common(1)[0]
    total = ends.total()
    return [f"nothing was rewarded (0 of {total} rollouts; {count} of them ended with {end})"]


def _failing_calls(passes: Sequence[_Tally]) -> list[str]:
    if not all(p.calls_fail for p in passes):
        return []
    total = sum(p.calls for p in passes)
    errors = sum((Counter(p.call_errors) for p in passes), Counter[str]())
    said = ""
    if errors:
        error, count = errors.most_common(1)[0]
        said = f"; the commonest error, {count} times: {error}"
    return [f"each tool call failed ({total:.0f} of {total:.0f}{said})"]


def _cut(passes: Sequence[_Tally]) -> list[str]:
    if not all(p.all_cut for p in passes):
        return []
    total = sum(p.rollouts for p in passes)
    ends = sum((Counter(p.ends) for p in passes), Counter[str]())
    return [f"a limit cut each conversation ({total} of {total}, most of them {ends.most_common(1)[0][0]})"]


def _value(trajectory: Trajectory) -> float:
    """What the reward function said, before costs are taken off."""
    parts = trajectory.reward_parts
    return parts.get("first_answer", parts.get("score", trajectory.reward or 0.0))


def _call_errors(trajectory: Trajectory) -> list[str]:
    """What the model was told about each call that failed."""
    answers = {m.get("tool_call_id"): m.get("content") for m in trajectory.messages if m.get("role") == "tool"}
    errors = []
    for row in trajectory.tool_calls:
        if row.get("failure") is not None:
            answer = answers.get(row.get("call_id"))
            text = " ".join(str("(no answer was recorded)" if answer is None else answer).split())
            short = text if len(text) <= _MAX_ERROR_CHARACTERS else text[: _MAX_ERROR_CHARACTERS - 3] + "..."
            errors.append(f"{row.get('name')}: {short}")
    return errors
