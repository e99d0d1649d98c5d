"""What watches the steps of a run and may act on them: `StepHook`.

`build` makes the list of a run's hooks from the configuration. The trainer calls all of them, in the trainer's thread,
and carries out the strongest verdict; it knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDict

from verl_mt.config.schema import Config
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.trainer.checkpoint import CheckpointStore
from verl_mt.trainer.rollout_source import RolloutSource


@dataclass
class TrainStep:
    """A step that is being made."""

    number: int
    """Finished steps before it."""
    version: int
    """Of the weights that it trains."""
    groups: list[TrajectoryGroup]
    batch: TensorDict | None
    """None = no trajectory could be trained."""
    metrics: dict[str, float]
    """A hook may add to them."""
    timing: dict[str, float]
    """`time/..._s` of the step's parts so far, in order. A hook may add to them."""


@dataclass
class StepLine:
    """A finished step, before it is logged."""

    number: int
    """Of the step, from 1."""
    metrics: dict[str, float]
    """With those of a validation. A hook may add to them."""
    words: dict[str, str] = field(default_factory=dict)
    """Texts for `metrics.jsonl`. Trackers get none."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Continue:
    """Go on. A checkpoint is written where one is due."""

    rank: ClassVar[int] = 0
    before: Callable[[], object] = _nothing
    """Called first. The step's line and rollout rows are on the disk then."""
    after: Callable[[], object] = _nothing
    """Called last."""


@dataclass(frozen=True)
class Save(Continue):
    """Write a checkpoint of this step."""

    rank: ClassVar[int] = 1


@dataclass(frozen=True)
class RollBack(Save):
    """Take the policy of an older checkpoint, and write one of this step."""

    rank: ClassVar[int] = 2
    folder: Path = Path()


@dataclass(frozen=True)
class Stop(Save):
    """Write a checkpoint of this step and end the run. `after` makes the error that says why."""

    rank: ClassVar[int] = 3
    after: Callable[[], Exception] = RuntimeError


Verdict = Continue | Save | RollBack | Stop


@dataclass(frozen=True)
class HookParts:
    """What a hook is built from."""

    config: Config
    folder: Path
    """The run directory."""
    checkpoints: CheckpointStore
    source: RolloutSource
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text."""


class StepHook:
    """Watches the steps of one run. A subclass overrides what it needs."""

    name = ""
    """Under which its state stands in a checkpoint. empty = it has none."""

    @classmethod
    def of(cls, parts: HookParts) -> StepHook | None:
        """The hook of a run. None where the configuration does not ask for it."""
        return cls()

    def after_rollout(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """The groups of a step are there, after `step` finished ones. Nothing was checked or trained."""

    def after_validation(self, step: int, passes: Mapping[str, Sequence[TrajectoryGroup]]) -> None:
        """The weights after `step` steps were validated: pass (`val`, `val_greedy`) -> its groups."""

    def before_update(self, step: TrainStep) -> None:
        """The batch is built, and nothing is computed with it yet. Not called without a batch."""

    def after_update(self, step: TrainStep) -> None:
        """The weights are updated, and the engine has them. The step's row files are written."""

    def after_step(self, line: StepLine) -> Verdict:
        """The step is finished and validated where that was due. Its line comes next. A run that was interrupted in the
        validation calls it in the next process, without `after_update`."""
        return Continue()

    def summary(self) -> list[tuple[str, str]]:
        """Rows for the closing summary."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on. Empty for a checkpoint from before this hook."""


class StepHooks(tuple[StepHook, ...]):
    """The hooks of a run, called in their order."""

    def after_rollout(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        for hook in self:
            hook.after_rollout(step, groups)

    def after_validation(self, step: int, passes: Mapping[str, Sequence[TrajectoryGroup]]) -> None:
        for hook in self:
            hook.after_validation(step, passes)

    def before_update(self, step: TrainStep) -> None:
        for hook in self:
            hook.before_update(step)

    def after_update(self, step: TrainStep) -> None:
        for hook in self:
            hook.after_update(step)

    def after_step(self, line: StepLine) -> Verdict:
        """The strongest verdict. Of equal ones the first."""
        return max((hook.after_step(line) for hook in self), key=lambda verdict: verdict.rank, default=Continue())

    def summary(self) -> list[tuple[str, str]]:
        return [row for hook in self for row in hook.summary()]

    def state_dict(self) -> dict[str, Any]:
        """The state of each hook by its name."""
        return {hook.name: hook.state_dict() for hook in self if hook.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for hook in self:
            hook.load_state_dict(state.get(hook.name, {}))
