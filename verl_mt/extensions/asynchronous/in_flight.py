"""Prompts in flight: which may be started, which of those that are finished make a batch, and how old their tokens are.

The bound `trainer.max_staleness` is kept by admission: a prompt starts only if it will be trained within that many
updates, however long it takes. Nothing is thrown away. Steps ahead are whole steps, which are trained in the
order in which their prompts were drawn: a long conversation is in its batch as surely as a short one.

With `data.over_sample` more prompts are in flight than a step trains, and a batch is what has finished first. Without a
bound long conversations would be left to later steps again and again; here each prompt has a last step (`max_staleness`
updates after it was started, or the next one where nothing may be stale), which waits for it, and no more are started
than can be trained by then. (APRIL, Zhou et al. 2025, arXiv:2509.18521, and slime's partial rollout have the idea
without the bound.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.config.schema import correction_of
from verl_mt.data import batch as columns
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.diagnostics.step_metrics import prefix_cache_by_turn
from verl_mt.errors import EngineError
from verl_mt.trainer.rollout_source import TRAINING, SourceParts, plan_name, step_of
from verl_mt.trainer.spool import SpooledSource
from verl_mt.trainer.step_hook import HookParts, StepHook, TrainStep

UNCERTAIN = 0.9
"""Tokens that were sampled with at least this probability say nothing about how far the policy has moved."""


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


@dataclass
class AsynchronousSource(SpooledSource):
    """Asynchronous training: prompts of later steps, or left by earlier ones, are in flight beside a step's own.

    With a bound of 0 and no over-sampling it does what `RolloutSource` does.
    """

    max_staleness: int = 0
    """`trainer.max_staleness`, where anything is trained."""
    over: OverSampling | None = None
    """More prompts than a step needs are in flight; None = those of whole steps."""
    correction: str | None = None
    """What corrects tokens of older weights, for people; None = nothing does."""
    loss_mode: str = "vanilla"
    begun_s: float = 0.0
    """When `begin` was called last, on the clock of the spans of rollout rows."""

    @classmethod
    def of(cls, parts: SourceParts) -> AsynchronousSource:
        actor, bound = parts.config.actor_rollout_ref.actor, parts.config.trainer.steps_ahead
        source = cast(AsynchronousSource, super().of(parts))
        source.max_staleness = bound
        source.over = over_sampling(parts.plan.num_prompts, parts.config.data.over_sample, bound)
        source.loss_mode = actor.policy_loss.get("loss_mode", "vanilla")
        if actor.use_sampler_log_probs == "always":
            source.correction = "the loss's ratios to the sampler"
        elif options := {key: value for key, value in correction_of(parts.config).items() if value is not None}:
            source.correction = f"algorithm.rollout_correction={options}"
        return source

    @property
    def admission(self) -> dict[str, float]:
        factor = 1.0 if self.over is None else self.over.factor
        return {"prompts": self.plan.num_prompts, "over_sample": factor, "max_staleness": self.max_staleness}

    def begin(self, step: int) -> None:
        """Start the rollout of the batch after `step` finished steps, and the later ones that the bound allows."""
        self.begun_s = time.monotonic()
        self.reopen(step)
        if self.over is not None:
            self._top_up(self.over, plan_name(step), begun=step, next_step=step)
            return
        last = max(step, self.plan.total_steps - 1)
        for number in range(step, min(step + self.max_staleness, last) + 1):
            if not self.stream.started(plan_name(number)):
                self._draw(plan_name(number), self.plan.num_prompts, number)

    def begin_ahead(self, step: int) -> None:
        """The next step's conversations go on beside validation and checkpoint."""
        if self.max_staleness and step < self.plan.total_steps:
            self.begin(step)

    def collect(self, step: int) -> list[TrajectoryGroup]:
        """The groups of the batch after `step` finished steps. With over-sampling, further prompts are started then, as
        many as the bound allows before its update."""
        if self.over is None:
            return super().collect(step)
        choose = partial(
            self.over.choose, open_at={known.prompt_id: step_of(known.plan) for known in self.log.open}, step=step
        )
        groups = self.stream.collect_some(choose, self.while_waiting)
        if self.max_staleness:
            self._top_up(self.over, f"{plan_name(step)}.001", begun=step, next_step=step + 1)
        else:
            self.give_up(but={group.prompt_id for group in groups})
        return groups

    def plans(self, step: int) -> str:
        return super().plans(step) if self.over is None else TRAINING

    def metrics(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        if not self.max_staleness and self.over is None:
            return {}
        return {"rollout/prompts_in_flight": len(self.log.open) - len(groups)}

    def notes(self) -> list[str]:
        if not (ahead := self.max_staleness):
            return []
        in_flight = f"prompts of {ahead} later steps are in flight beside the one that is trained"
        if self.over is not None:
            factor = f"{self.over.factor:g}"
            in_flight = f"{factor} steps' prompts are in flight, of which a step trains those that finish first"
        told = f"corrected by {self.correction}" if self.correction else "not corrected (docs/asynchronous.md)"
        found = [f"{in_flight}; no token is more than {ahead} updates old, and older tokens are {told}"]
        if ahead > 1 and not self.correction:
            found.append(
                f"[yellow]trainer.max_staleness={ahead} and no correction: with policy_loss.loss_mode="
                f"{self.loss_mode}, tokens of {ahead} updates before count as new, and training may fall apart. Set "
                "trainer.max_staleness=1, algorithm.rollout_correction, or loss_mode=vanilla[/]"
            )
        return found

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
            self._draw(name if name not in taken else next(n for n in further if n not in taken), wanted, begun)


class Staleness(StepHook):
    """Holds each batch to the bound and measures how old its tokens are."""

    def __init__(self, source: AsynchronousSource):
        self._source = source

    @classmethod
    def of(cls, parts: HookParts) -> Staleness | None:
        return cls(parts.source) if isinstance(parts.source, AsynchronousSource) else None

    def before_update(self, step: TrainStep) -> None:
        assert step.batch is not None
        require_bound(step.batch, step.version, self._source.max_staleness)
        if self._source.max_staleness:
            add_ages(step.batch, step.version)

    def after_update(self, step: TrainStep) -> None:
        """A rollout overlaps with training: tokens per second are of the whole step."""
        if not self._source.max_staleness:
            return
        if step.batch is not None:
            step.metrics |= staleness_metrics(step.batch, step.version)
        trajectories = [t for g in step.groups for t in g.trajectories]
        sampled = sum(t.num_sampled_tokens for t in trajectories)
        step.metrics["rollout/tokens_per_s"] = sampled / step.timing["time/step_s"]
        step.metrics["staleness/trainer_wait_s"] = step.timing["time/rollout_s"]
        step.metrics |= prefix_cache_by_turn(trajectories)
        step.timing["time/begun_s"] = self._source.begun_s


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
            f"(version {version}), trainer.max_staleness={max_staleness}: the engine took an update late, or "
            "numbers versions differently (GenerationOutput.version_spans)"
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
