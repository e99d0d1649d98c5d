"""What of a rollout is trained on: DAPO's dynamic sampling, its penalty on overlong responses and its filter of them.

Yu et al. 2025 (DAPO, arXiv:2503.14476): section 3.2 (groups whose members all do equally well say nothing and are
replaced), section 3.4 (responses that come near the limit are penalised; those that were cut may be left out).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

from verl_mt.algorithms.advantages import has_signal, soft_overlong_penalty
from verl_mt.algorithms.masked import masked_fill_zero
from verl_mt.data import batch as columns
from verl_mt.data.trajectory import Status, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import total_failure
from verl_mt.errors import ConfigError

log = logging.getLogger(__name__)

_REWARD = ("seq_reward", "seq_final_reward")
"""verl's names of what the advantages are made from."""
_OVERLONG = "overlong"
"""The penalty's name among the parts of a reward."""


@dataclass
class Selection:
    """By default all of a rollout is trained as it is.

    A step calls `shape` on what it sampled, `fill` to get a batch of groups with a signal, and `mask_overlong` once the
    advantages are there.
    """

    metric: str | None = None
    """The number whose differences within a group are its signal; None = groups are not filtered."""
    max_gen_batches: int = 10
    """Rollouts per step; 0 or less = until the batch is full."""
    overlong_buffer: int | None = None
    """Tokens before the end of `max_length` on which the penalty grows; None = no penalty."""
    overlong_factor: float = 1.0
    max_length: int = 0
    """Of a response, in tokens, observations included."""
    filter_overlong: bool = False
    several: tuple[str, ...] = ()
    """The parts of a reward that advantages are made from one by one (GDPO); empty = they are made from their sum."""
    _counts: dict[str, float] = field(default_factory=dict)
    _warned: bool = False

    def shape(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Add the penalty on overlong responses to the rewards, once, and to their parts as `overlong`.

        A response's length is what `rollout.response_length` limits: everything after the first prompt, observations
        included, over all records. At the limit the penalty is -factor.
        """
        if self.overlong_buffer is None:
            return
        scored = [t for g in groups for t in g.trajectories if t.reward is not None]
        lengths = torch.tensor([response_length(t) for t in scored])
        penalties = soft_overlong_penalty(lengths, max_length=self.max_length, buffer=self.overlong_buffer)
        for trajectory, penalty in zip(scored, (self.overlong_factor * penalties).tolist()):
            assert trajectory.reward is not None
            trajectory.reward_parts = {**trajectory.reward_parts, _OVERLONG: penalty}
            trajectory.reward += penalty
            if (sample := trajectory.sample) is not None:
                own = sample.reward
                sample.reward = {**own, "score": trajectory.reward} if isinstance(own, dict) else trajectory.reward

    def fill(
        self,
        first: list[TrajectoryGroup],
        more: Callable[[int, int], list[TrajectoryGroup]],
        wanted: int,
    ) -> list[TrajectoryGroup]:
        """Replace groups without signal by those of further prompts, until `wanted` have one or the limit is reached.

        Further rollouts are as large as the rate of groups with a signal says, at most `wanted` prompts; groups beyond
        the last that is needed are filtered too. With fewer than `wanted` at the limit the step trains on what it has.

        Args:
            first: the groups of the step's own prompts.
            more: (number of prompts, number of the rollout from 2) -> shaped groups of the next prompts.
            wanted: prompts of a training batch.

        Returns:
            All groups that were sampled; those that are not to be trained on are marked (`TrajectoryGroup.filtered`).

        Raises:
            ConfigError: a trajectory lacks the number that `metric` names.
        """
        self._counts = {}
        if self.metric is None:
            return first
        groups, rollouts = list(first), 1
        kept = [g for g in groups if self._has_signal(g)]
        limit = self.max_gen_batches if self.max_gen_batches > 0 else math.inf
        while len(kept) < wanted and rollouts < limit and total_failure(groups) is None:
            rate = max(len(kept), 1) / len(groups)
            rollouts += 1
            drawn = more(min(wanted, math.ceil((wanted - len(kept)) / rate)), rollouts)
            groups += drawn
            kept += [g for g in drawn if self._has_signal(g)]
        surplus = len(kept[wanted:])
        for group in [g for g in groups if g not in kept[:wanted]]:
            group.leave_out()
        self._counts = {
            "data/filtered_groups": float(len(groups) - len(kept)),
            "data/surplus_groups": float(surplus),
            "rollout/gen_batches": float(rollouts),
        }
        self._warn_if_short(len(kept), wanted)
        return groups

    def metrics(self) -> dict[str, float]:
        """Of the last `fill`; nothing where groups are not filtered."""
        return dict(self._counts)

    def mask_overlong(self, batch: TensorDict, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Take the tokens of trajectories that were cut by a limit out of the loss, and out of its denominators.

        Called when the advantages are there: the rewards of cut trajectories are part of their groups' statistics.
        """
        if not self.filter_overlong:
            return {}
        cut = {t.trajectory_id for g in groups for t in g.trajectories if t.status is Status.TRUNCATED}
        trained = list(batch[columns.TRAJECTORY_ID])
        stays_B1 = torch.tensor([name not in cut for name in trained], device=batch.device).unsqueeze(1)
        batch[columns.LOSS_MASK] = batch[columns.LOSS_MASK] & stays_B1
        batch[columns.ADVANTAGES] = masked_fill_zero(batch[columns.ADVANTAGES], stays_B1)
        return {"data/filtered_overlong": float(len(cut & set(trained)))}

    def _has_signal(self, group: TrajectoryGroup) -> bool:
        """Of any of the groups that roles make of a prompt's trajectories."""
        members = [t for t in group.trajectories if t.trainable and t.reward is not None]
        ids = {name: place for place, name in enumerate(dict.fromkeys(t.group_id for t in members))}
        groups = torch.tensor([ids[t.group_id] for t in members], dtype=torch.int64)
        assert self.metric is not None
        numbers = self.several if self.several and self.metric in _REWARD else (self.metric,)
        values = (torch.tensor([self._value(t, number) for t in members], dtype=torch.float64) for number in numbers)
        return any(bool(has_signal(of_one, groups).any()) for of_one in values)

    def _value(self, trajectory: Trajectory, number: str) -> float:
        assert trajectory.reward is not None
        if number in _REWARD:
            return trajectory.reward
        parts = trajectory.reward_parts
        if number == "acc" and "acc" not in parts and "score" in parts:
            return parts["score"]
        if number not in parts:
            raise ConfigError(
                f"algorithm.filter_groups.metric is {number!r}, but the reward of {trajectory.trajectory_id} has "
                f"only {', '.join(sorted(parts)) or 'no parts'}: name one of them, or seq_final_reward (what "
                "advantages are made from)"
            )
        return parts[number]

    def _warn_if_short(self, kept: int, wanted: int) -> None:
        if kept < wanted and not self._warned:
            self._warned = True
            log.warning(
                "algorithm.filter_groups: only %d of %d groups had different rewards after %d rollouts "
                "(max_num_gen_batches); steps like this train on fewer groups (data/filtered_groups counts them). "
                "Easier or harder prompts, more samples per prompt (rollout.n), or a higher limit give full batches",
                kept, wanted, self.max_gen_batches,
            )  # fmt: skip


def why_left_out(groups: Sequence[TrajectoryGroup], batch: TensorDict | None) -> dict[str, str | None]:
    """Of the prompt of each group, why none of its tokens was trained; None where some were."""
    trained = set() if batch is None else trained_ids(batch)
    found: dict[str, str | None] = {}
    for group in groups:
        if any(t.trajectory_id in trained for t in group.trajectories):
            found[group.prompt_id] = None
        elif group.filtered:
            found[group.prompt_id] = "algorithm.filter_groups"
        elif any(t.trainable for t in group.trajectories):
            found[group.prompt_id] = "algorithm.filter_overlong"
        else:
            reasons = {t.stop_reason.value for t in group.trajectories if t.stop_reason is not None}
            found[group.prompt_id] = f"nothing to train: {', '.join(sorted(reasons))}"
    return found


def trained_ids(batch: TensorDict) -> set[str]:
    """Of the trajectories of a batch, those with tokens in the loss."""
    rows = batch[columns.LOSS_MASK].any(1).tolist()
    return {name for name, is_in in zip(batch[columns.TRAJECTORY_ID], rows) if is_in}


def response_length(trajectory: Trajectory) -> int:
    """Tokens after the first prompt over all records, each counted once: what `rollout.response_length` limits."""
    if not trajectory.records:
        return 0
    return sum(len(r.token_ids) - r.num_prompt_tokens for r in trajectory.records)
