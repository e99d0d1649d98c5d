"""Prompts in flight: which may be started, which of those that are finished make a batch, and how old their tokens are.

The bound `trainer.max_staleness` is kept by admission: what may be started now is trained within so many updates,
however long it takes, so that nothing has to be thrown away. Steps ahead are whole steps, which are trained in the
order in which their prompts were drawn: a long conversation is in its batch as surely as a short one.

With `data.over_sample` more prompts are in flight than a step trains, and a batch is what has finished first. Without a
bound long conversations would be left to later steps again and again; here each prompt has a last step (`max_staleness`
updates after it was started, or the next one where nothing may be stale), which waits for it, and no more are started
than can be trained by then. (APRIL, Zhou et al. 2025, arXiv:2509.18521, and slime's partial rollout have the idea
without the bound.)
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.data import batch as columns
from verl_mt.data.drawn_prompts import OpenPrompt, PromptLog
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.errors import EngineError, VerlMTError
from verl_mt.rewards.contract import RunState
from verl_mt.rollout.prompts import Prompt, PromptDraws
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.trainer.spool import GroupSpool

log = logging.getLogger(__name__)

TRAINING = "s"
"""How the names of plans begin whose groups are trained."""
UNCERTAIN = 0.9
"""Tokens that were sampled with at least this probability say nothing about how far the policy has moved."""


def plan_name(step: int) -> str:
    """Of the rollout that is trained after `step` finished steps, or with `data.over_sample` begun then: `s000007`
    after 6. Further rollouts of that step have a number behind it: what replaces groups without signal, from `.002`,
    and what is begun before its update, `.001`."""
    return f"{TRAINING}{step + 1:06d}"


def step_of(name: str) -> int:
    """Finished steps before the one that the name of a plan or a prompt has: 6 for `s000007.001.00012`."""
    return int(name.partition(".")[0].removeprefix(TRAINING)) - 1


def over_sampling(num_prompts: int, factor: float, max_staleness: int) -> OverSampling | None:
    """What `data.over_sample` asks for; None where a step starts what it trains."""
    return OverSampling(num_prompts, factor, max_staleness) if factor > 1 else None


@dataclass(frozen=True)
class OverSampling:
    """Which prompts may be in flight, and which of those that are finished make a batch."""

    num_prompts: int
    """Of a batch."""
    factor: float
    """How many may be in flight, in batches."""
    max_staleness: int

    @property
    def patience(self) -> int:
        """Steps after the first one that can train a prompt, in which it is trained at the latest."""
        return max(1, self.max_staleness)

    def room(self, in_flight: int, *, begun: int, next_step: int, steps_left: int) -> int:
        """How many prompts to start now.

        Args:
            in_flight: prompts that were started and are in no batch yet.
            begun: finished steps, whose weights they are begun under.
            next_step: finished steps before the batch that they can be in first.
            steps_left: batches to come, that one included.
        """
        in_time = begun + self.patience - next_step + 1
        most = min(math.ceil(self.factor * self.num_prompts), in_time * self.num_prompts, steps_left * self.num_prompts)
        return max(0, most - in_flight)

    def choose(
        self, finished: Sequence[TrajectoryGroup], *, open_at: Mapping[str, int], step: int
    ) -> list[TrajectoryGroup] | None:
        """A batch of what has finished, the earliest first; None as long as there is none.

        A group is passed over if, with it, so many of a later last step would be in the batch that older ones could not
        all be trained in time.

        Args:
            finished: in the order in which they finished.
            open_at: prompt id of everything in flight, finished or not -> finished steps before it was started.
            step: finished steps before this batch.
        """
        size = self.num_prompts
        # How many further steps each may wait. Of those that may wait j or fewer the next j batches take j * size; the
        # rest must be in this one, which leaves room[j] places in it for groups that may wait longer than j.
        slack = {name: max(0, begun + self.patience - step) for name, begun in open_at.items()}
        within = [sum(left <= steps for left in slack.values()) for steps in range(self.patience)]
        room = [size - max(0, number - j * size) for j, number in enumerate(within)]
        chosen: list[TrajectoryGroup] = []
        for group in finished:
            later_than = range(min(slack[group.prompt_id], self.patience))
            if all(room[j] > 0 for j in later_than):
                chosen.append(group)
                for j in later_than:
                    room[j] -= 1
            if len(chosen) == size:
                return chosen
        return None


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
    max_staleness: int = 0
    """`trainer.max_staleness`, where anything is trained."""
    over: OverSampling | None = None
    """More prompts than a step needs are in flight; None = those of whole steps."""
    greedy_too: bool = False
    """Each training prompt has a greedy answer too, which the others are compared with (ReMax)."""
    run: RunState = RunState()
    """What rewards are told of the run as a whole."""

    @property
    def several_steps(self) -> bool:
        """Prompts of later steps, or left by earlier ones, are in flight beside a step's own."""
        return self.max_staleness > 0 or self.over is not None

    @property
    def admission(self) -> dict[str, float]:
        """What decides when prompts are started, and in which steps they may be trained."""
        factor = 1.0 if self.over is None else self.over.factor
        return {"prompts": self.num_prompts, "over_sample": factor, "max_staleness": self.max_staleness}

    def rollout(self, prompts: list[Prompt], name: str, step: int) -> RolloutPlan:
        """A training rollout after `step` finished steps."""
        run = replace(self.run, step=step)
        return RolloutPlan(prompts, self.n, name, self.sampling, greedy_too=self.greedy_too, run=run)


@dataclass
class PromptsInFlight:
    """Draws prompts, starts their rollouts, hands over those of a step, and keeps account of all.

    Whatever is open in the log of prompts is in flight; what of it does not run begins again with the next `admit`.
    """

    plan: BatchPlan
    draws: PromptDraws
    stream: RolloutStream
    log: PromptLog
    spool: GroupSpool | None
    """Keeps finished groups for a run that is killed; a deterministic one samples them again."""
    while_waiting: Callable[[], None]
    """See `RolloutStream.collect`."""
    on_bad_row: Callable[[], None]
    """Called before what a draw has raised ends the run."""
    _counts: dict[int, dict[str, int]] = field(default_factory=dict)
    """Step -> `data/...` of what was drawn for it."""

    def __post_init__(self) -> None:
        self.stream.arrived = self.log.finished
        self.stream.keep = None if self.spool is None else self._keep

    def admit(self, step: int) -> None:
        """Start what may be started before the batch after `step` finished steps: its own rollout, and those that the
        bound allows ahead of theirs."""
        self._reopen(step)
        plan = self.plan
        if plan.over is not None:
            self._top_up(plan.over, plan_name(step), begun=step, next_step=step)
            return
        last = max(step, plan.total_steps - 1)
        for number in range(step, min(step + plan.max_staleness, last) + 1):
            if not self.stream.started(plan_name(number)):
                self._start(plan_name(number), plan.num_prompts, number)

    def admit_during_update(self, step: int) -> None:
        """The batch after `step` finished steps is there: what may be started before its update. Steps ahead have all
        begun."""
        if self.plan.over is not None and self.plan.max_staleness:
            self._top_up(self.plan.over, f"{plan_name(step)}.001", begun=step, next_step=step + 1)

    def collect(self, step: int) -> list[TrajectoryGroup]:
        """The groups of the batch after `step` finished steps."""
        over = self.plan.over
        if over is None:
            return self.stream.collect(plan_name(step), self.while_waiting)
        choose = partial(
            over.choose, open_at={known.prompt_id: step_of(known.plan) for known in self.log.open}, step=step
        )
        groups = self.stream.collect_some(choose, self.while_waiting)
        if not self.plan.max_staleness:
            self.give_up(but={group.prompt_id for group in groups})
        return groups

    def more(self, step: int, num_prompts: int, number: int) -> list[TrajectoryGroup]:
        """Rollout `number` of that step, from 2: the groups of the prompts that come next."""
        name = f"{plan_name(step)}.{number:03d}"
        self._start(name, num_prompts, step)
        return self.stream.collect(name, self.while_waiting)

    def _keep(self, plan: RolloutPlan, group: TrajectoryGroup) -> None:
        """Those of a validation are none of a step's."""
        if self.spool is not None and not plan.evaluation:
            self.spool.keep(plan, group)

    def give_up(self, but: Set[str] = frozenset()) -> None:
        """End what is in flight, and forget what of it is kept: no step may train on the weights that sampled it any
        more. It begins again with the next `admit`.

        Args:
            but: ids of prompts that are trained next.
        """
        # To its end: Ctrl-C in the middle would leave a rollback half done, and groups of weights that are gone.
        self.stream.stop()
        if self.spool is not None:
            self.spool.drop(known.prompt_id for known in self.log.open if known.prompt_id not in but)

    def ended(self, step: int, left_out: Mapping[str, str | None]) -> None:
        """The step with this number (from 1) is over: prompt id -> why it was not trained, None where it was."""
        self.log.ended(step, left_out)
        if self.spool is not None:
            self.spool.drop(left_out)

    def forget_finished(self) -> None:
        """What has finished is not used again: all is trained, or something has failed that will be repaired."""
        if self.spool is not None:
            self.spool.clear()

    def counts(self, step: int) -> dict[str, int]:
        """`data/...` of what was drawn after `step` finished steps; they are forgotten."""
        return self._counts.pop(step, {})

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, with the sampler's position."""
        return {
            "sampler": self.draws.sampler.state_dict(),
            "prompts": self.log.state_dict(),
            "drawn": dict(self._counts),
            "admission": self.plan.admission,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_rows: bool) -> None:
        """Go on; the log of prompts has begun from `state["prompts"]` already.

        Args:
            other_rows: the checkpoint's position counts in rows that are gone.
        """
        if other_rows:
            self.draws.sampler.go_on_in_other_rows(state["sampler"])
        else:
            self.draws.sampler.load_state_dict(state["sampler"])
            self._counts = dict(state.get("drawn", {}))
        changed = other_rows or state.get("admission") != self.plan.admission
        trainable = 0 if changed else max(0, self.plan.total_steps - state["step"]) * self.plan.num_prompts
        if left := self.log.open[trainable:]:
            log.warning(
                "%d prompts that were in flight are left out: the checkpoint is of a run with other rows or further "
                "steps, or with another data.train_batch_size, data.over_sample or trainer.max_staleness", len(left),
            )  # fmt: skip
            self.log.ended(state["step"], {known.prompt_id: "in flight, other steps" for known in left})

    def _top_up(self, over: OverSampling, name: str, *, begun: int, next_step: int) -> None:
        """Start as many prompts as may be in flight after `begun` finished steps, where `next_step` of them come before
        the next batch."""
        in_training = self.plan.num_prompts if next_step > begun else 0  # which the log has open until it ends
        in_flight = len(self.log.open) - in_training
        steps_left = self.plan.total_steps - next_step
        wanted = over.room(in_flight, begun=begun, next_step=next_step, steps_left=steps_left)
        if wanted:
            taken = {known.plan for known in self.log.open}
            further = (f"{name}.{number:03d}" for number in count(2))
            self._start(name if name not in taken else next(n for n in further if n not in taken), wanted, begun)

    def _reopen(self, step: int) -> None:
        """What is in flight and does not run begins again, under the names that it had: after a kill, and where its
        weights were given up."""
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
            self._begin(replace(plan, positions=[position for position, _ in there]))

    def _start(self, name: str, num_prompts: int, step: int) -> None:
        """Draw prompts and begin to roll them out, after `step` finished steps."""
        try:
            prompts, left_out, counts = self.draws.draw(num_prompts)
        except VerlMTError:
            self.on_bad_row()
            raise
        before = self._counts.get(step, {})
        self._counts[step] = {kind: before.get(kind, 0) + count for kind, count in counts.items()}
        self.log.drawn(name, [prompt.row for prompt in prompts], left_out)
        self._begin(self.plan.rollout(prompts, name, step))

    def _begin(self, plan: RolloutPlan) -> None:
        finished = [] if self.spool is None else self.spool.take(plan)
        self.stream.start(plan, finished)
        self.log.started(plan.name, but={group.prompt_id for group in finished})
        for group in finished:
            self.log.finished(group)
            for trajectory in group.trajectories:
                if trajectory.sanity is None:  # the share of mismatches is one of the whole step
                    self.stream.runner.context.sanity.observe(None, plan.name)


def require_bound(batch: TensorDict, version: int, max_staleness: int) -> None:
    """What `trainer.max_staleness` promises, looked at before each update.

    Args:
        batch: as built; [B, T].
        version: of the weights that it trains.

    Raises:
        EngineError: a trained token is older, or by weights that the trainer does not have yet: the engine's versions
            are not those of its updates.
    """
    ages = _ages(batch, version)[_trained(batch)]
    if len(ages) and not 0 <= int(ages.min()) <= int(ages.max()) <= max_staleness:
        raise EngineError(
            f"tokens are {int(ages.min())} to {int(ages.max())} updates older than the weights that they would train "
            f"(version {version}), trainer.max_staleness={max_staleness}: the engine took an update late, or gives "
            "tokens versions of its own (GenerationOutput.version_spans)"
        )


def add_ages(batch: TensorDict, version: int) -> None:
    """Fill in the batch's `ages`.

    Args:
        batch: as built; [B, T].
        version: of the weights that it trains.
    """
    batch[columns.AGES] = _ages(batch, version).masked_fill(~batch[columns.SAMPLED], 0).to(torch.int32)


def staleness_metrics(batch: TensorDict, version: int) -> dict[str, float]:
    """`staleness/mean` and `/max` over trained tokens, and by age the share of them. Of the tokens of each age that
    were sampled with a probability below `UNCERTAIN`: the mean |difference| of the trainer's and the sampler's
    log-probs before the update, and the share that the policy loss gave no gradient.

    Older tokens are the beginnings of turns, nearly all of them certain. Over all tokens the oldest would differ least.

    Args:
        batch: behind its update.
        version: of the weights that it has trained.
    """
    trained_BT, ages_BT = _trained(batch), _ages(batch, version)
    ages = ages_BT[trained_BT]
    if not len(ages):
        return {}
    found = {"staleness/mean": ages.float().mean().item(), "staleness/max": float(ages.max())}
    # An update of the critic alone (`trainer.critic_warmup`) looks at no log-probs of the policy.
    unknown_BT = torch.full(ages_BT.shape, torch.nan)
    difference_BT = (batch.get(columns.OLD_LOG_PROBS, unknown_BT) - batch[columns.ROLLOUT_LOG_PROBS]).abs()
    difference_BT = difference_BT.masked_fill(~batch[columns.HAS_LOG_PROBS][:, None], torch.nan)
    clipped_BT = batch.get(columns.CLIPPED, unknown_BT)
    cut_BT = torch.where(clipped_BT.isnan(), torch.nan, (clipped_BT > 0).float())
    uncertain_BT = batch[columns.ROLLOUT_LOG_PROBS] < math.log(UNCERTAIN)
    for age in ages.unique().tolist():
        of_age_BT = trained_BT & (ages_BT == age)
        parts = {
            "token_share": of_age_BT.sum() / len(ages),
            "logprob_diff": difference_BT[of_age_BT & uncertain_BT].nanmean(),
            "clip_fraction": cut_BT[of_age_BT & uncertain_BT].nanmean(),
        }
        found |= {f"staleness/age_{age}/{name}": value.item() for name, value in parts.items() if not value.isnan()}
    return found


def _trained(batch: TensorDict) -> Tensor:
    """bool [B, T]"""
    return batch[columns.LOSS_MASK] & batch[columns.SAMPLED]


def _ages(batch: TensorDict, version: int) -> Tensor:
    """int64 [B, T]"""
    return version - batch[columns.POLICY_VERSIONS]
