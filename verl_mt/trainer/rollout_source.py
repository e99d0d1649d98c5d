"""Where the groups of a step come from. `RolloutSource` draws prompts, starts their rollouts, collects the groups and
accounts for every prompt.

This one is synchronous: a step's rollout begins with the step, by the newest weights, and nothing else runs. Subclasses
keep finished groups (`spool`), train asynchronously (`in_flight`) or read saved rollouts (`debug_data`). `build`
chooses one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from verl_mt.config.schema import Config
from verl_mt.data.drawn_prompts import OpenPrompt, PromptLog
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.errors import VerlMTError
from verl_mt.rewards.contract import RunState
from verl_mt.rollout.prompts import Prompt, PromptDraws
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.trainer.dynamic_sampling import trained_ids

log = logging.getLogger(__name__)

TRAINING = "s"
"""How the names of plans begin whose groups are trained."""


def plan_name(step: int) -> str:
    """Of the rollout that begins after `step` finished steps: `s000007` after 6. Further rollouts of that step have a
    number behind it: what replaces groups without signal, from `.002`."""
    return f"{TRAINING}{step + 1:06d}"


def step_of(name: str) -> int:
    """Finished steps before the one that the name of a plan or a prompt has: 6 for `s000007.001.00012`."""
    return int(name.partition(".")[0].removeprefix(TRAINING)) - 1


@dataclass(frozen=True)
class BatchPlan:
    """How large a step is, and how validation samples."""

    num_prompts: int
    n: int
    sampling: SamplingParams
    val_n: int
    val_sampling: SamplingParams
    val_greedy_too: bool
    val_batch_size: int | None
    total_steps: int
    greedy_too: bool = False
    """Each training prompt has a greedy answer too, which the others are compared with (ReMax)."""
    run: RunState = RunState()
    """What rewards are told of the run as a whole."""

    def rollout(self, prompts: list[Prompt], name: str, step: int) -> RolloutPlan:
        """A training rollout after `step` finished steps."""
        run = replace(self.run, step=step)
        return RolloutPlan(prompts, self.n, name, self.sampling, greedy_too=self.greedy_too, run=run)


@dataclass(frozen=True)
class SourceParts:
    """What a source is built from."""

    config: Config
    plan: BatchPlan
    draws: PromptDraws
    stream: RolloutStream
    log: PromptLog
    folder: Path
    """The run directory."""
    state: Mapping[str, Any] | None
    """The checkpoint that the run goes on from."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text."""


@dataclass
class RolloutSource:
    """The rollout of a step begins with the step.

    A step calls `begin`, `collect`, perhaps `more`, `mark_trained` and `ended`. `step` is the number of finished steps.
    `ended` alone takes the step's own number, from 1. All methods run in the trainer's thread. `collect` and `more`
    wait for conversations, which run in the stream's thread.
    """

    plan: BatchPlan
    draws: PromptDraws
    stream: RolloutStream
    log: PromptLog
    while_waiting: Callable[[], None] = lambda: None
    """See `RolloutStream.collect`."""
    on_bad_row: Callable[[], None] = lambda: None
    """Called before what a draw has raised ends the run."""
    _counts: dict[int, dict[str, int]] = field(default_factory=dict)
    """Step -> `data/...` of what was drawn for it."""

    def __post_init__(self) -> None:
        self.stream.arrived = self.log.finished

    @classmethod
    def of(cls, parts: SourceParts) -> RolloutSource:
        """The source of a run."""
        return cls(parts.plan, parts.draws, parts.stream, parts.log)

    @property
    def admission(self) -> dict[str, float]:
        """When prompts are started, and in which steps they may be trained. Saved: open prompts of another admission
        cannot be trained."""
        return {"prompts": self.plan.num_prompts, "over_sample": 1.0, "max_staleness": 0}

    def begin(self, step: int) -> None:
        """Start the rollout of a step."""
        self.reopen(step)
        if not self.stream.started(plan_name(step)):
            self._draw(plan_name(step), self.plan.num_prompts, step)

    def begin_ahead(self, step: int) -> None:
        """`step` steps are finished, and validation or a checkpoint may come before the next. A synchronous source
        starts nothing meanwhile."""

    def collect(self, step: int) -> list[TrajectoryGroup]:
        """The groups of a step that has begun, once they are all finished. Raises what their rollout raised."""
        return self.stream.collect(plan_name(step), self.while_waiting)

    def more(self, step: int, num_prompts: int, number: int) -> list[TrajectoryGroup]:
        """Rollout `number` of that step, from 2: the groups of the prompts that come next."""
        name = f"{plan_name(step)}.{number:03d}"
        self._draw(name, num_prompts, step)
        return self.stream.collect(name, self.while_waiting)

    def mark_trained(self, trajectories: Sequence[Trajectory], batch: TensorDict, version: int) -> None:
        """Note in each trajectory which version of the weights it has updated. None where none of its tokens did."""
        ids = trained_ids(batch)
        for trajectory in trajectories:
            trajectory.trained_version = version if trajectory.trajectory_id in ids else None

    def ended(self, step: int, left_out: Mapping[str, str | None]) -> None:
        """The step with this number (from 1) is over: prompt id -> why it was not trained, None where it was."""
        self.log.ended(step, left_out)

    def give_up(self, but: Set[str] = frozenset()) -> None:
        """End whatever runs: no step may train on the weights that sampled it any more. It begins again with the next
        `begin`.

        Args:
            but: ids of prompts that are trained next.
        """
        # To its end: Ctrl-C in the middle would leave a rollback half done, and groups of weights that are gone.
        self.stream.stop()

    def reopen(self, step: int) -> None:
        """Open prompts that do not run begin again, under the names that they had: after a kill, and after
        `give_up`."""
        plans: dict[str, list[OpenPrompt]] = defaultdict(list)
        for known in self.log.open:
            if not self.stream.started(known.plan):
                plans[known.plan].append(known)
        for name, opened in plans.items():
            built = self.draws.again([known.row for known in opened])
            gone = {known.prompt_id: "no prompt any more" for known, prompt in zip(opened, built) if prompt is None}
            self.log.ended(step, gone)
            there = [(known.position, prompt) for known, prompt in zip(opened, built) if prompt is not None]
            plan = self.plan.rollout([prompt for _, prompt in there], name, step_of(name))
            self._start(replace(plan, positions=[position for position, _ in there]))

    def end(self, error: Exception | None = None) -> None:
        """The run is over, or this error ended it."""

    def notes(self) -> list[str]:
        """What a person should know before the first step, as Rich markup."""
        return []

    def plans(self, step: int) -> str:
        """How the names of the plans begin that a step's groups are of."""
        return plan_name(step)

    def metrics(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """What this source has to say of a step with these groups."""
        return {}

    def counts(self, step: int) -> dict[str, int]:
        """`data/...` of what was drawn after `step` finished steps. They are forgotten."""
        return self._counts.pop(step, {})

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the position in the rows, and the prompts that are open."""
        return {
            "sampler": self.draws.sampler.state_dict(),
            "prompts": self.log.state_dict(),
            "drawn": dict(self._counts),
            "admission": self.admission,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_rows: bool) -> None:
        """Go on. The prompt log has begun from `state["prompts"]` already.

        Args:
            state: of a checkpoint, whatever source it is of.
            other_rows: the checkpoint's position counts in rows that are gone.
        """
        if other_rows:
            self.draws.sampler.go_on_in_other_rows(state["sampler"])
        else:
            self.draws.sampler.load_state_dict(state["sampler"])
            self._counts = dict(state.get("drawn", {}))
        changed = other_rows or state.get("admission") != self.admission
        trainable = 0 if changed else max(0, self.plan.total_steps - state["step"]) * self.plan.num_prompts
        if left := self.log.open[trainable:]:
            log.warning(
                "%d prompts that were in flight are left out: the checkpoint is of a run with other rows or further "
                "steps, or with another data.train_batch_size, data.over_sample or trainer.max_staleness", len(left),
            )  # fmt: skip
            self.log.ended(state["step"], {known.prompt_id: "in flight, other steps" for known in left})

    def _draw(self, name: str, num_prompts: int, step: int) -> None:
        """Draw prompts and begin to roll them out, after `step` finished steps."""
        try:
            prompts, left_out, counts = self.draws.draw(num_prompts)
        except VerlMTError:
            self.on_bad_row()
            raise
        before = self._counts.get(step, {})
        self._counts[step] = {kind: before.get(kind, 0) + count for kind, count in counts.items()}
        self.log.drawn(name, [prompt.row for prompt in prompts], left_out)
        self._start(self.plan.rollout(prompts, name, step))

    def _start(self, plan: RolloutPlan) -> None:
        self.stream.start(plan)
        self.log.started(plan.name)
