"""The step between a scored batch and its update: values, the KL penalty, advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.kl import kl_penalty
from verl_mt.algorithms.kl_control import KLControl
from verl_mt.algorithms.masked import masked_fill_zero
from verl_mt.algorithms.streams import Streams
from verl_mt.data import batch as columns
from verl_mt.workers.worker_group import WorkerGroup

TrajectoryEstimator = Callable[[TensorDict, Tensor], Tensor]
"""(batch, rewards_N) -> advantages_N."""
TokenEstimator = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(rewards_NM, values_NM, mask_NM) -> (advantages_NM, returns_NM), over the streams of trajectories."""


@dataclass
class RewardPenalty:
    """The KL penalty in the reward."""

    kind: str
    """Its estimator; see `kl_penalty`."""
    control: KLControl


@dataclass
class AdvantageStep:
    """Calling it fills in a batch's advantages (and what the critic learns from) and returns metrics.

    Exactly one of the two estimators is there.
    """

    per_trajectory: TrajectoryEstimator | None = None
    per_token: TokenEstimator | None = None
    workers: WorkerGroup | None = None
    """Gives values and log-probs, where something asks for them."""
    penalty: RewardPenalty | None = None

    def __call__(self, batch: TensorDict) -> dict[str, float]:
        """Reference log-probs must be there where a penalty needs them."""
        if self.workers is not None:
            self.workers.add_values(batch)
        mask_BT = batch[columns.LOSS_MASK]
        streams = Streams.of(mask_BT, batch[columns.TRAJECTORY_INDEX], batch[columns.RECORD_INDEX])
        penalty_NM, metrics = self._penalise(batch, streams)
        metrics |= _greedy_metrics(batch)
        if self.per_trajectory is not None:
            rewards_N = columns.trajectory_rewards(batch)[0]
            if penalty_NM is not None:
                rewards_N = rewards_N - penalty_NM.sum(1)
            advantages_N = self.per_trajectory(batch, rewards_N).float()
            batch[columns.ADVANTAGES] = columns.expand_to_tokens(batch, advantages_N)
            return metrics
        assert self.per_token is not None
        rewards_NM = token_rewards(batch, streams)
        if penalty_NM is not None:
            rewards_NM = rewards_NM - penalty_NM
        # Values enter here as they are in float32; sums over long streams are taken in float64.
        values = batch.get(columns.VALUES, None)
        values_NM = torch.zeros_like(rewards_NM) if values is None else streams.gather(values).double()
        advantages_NM, returns_NM = self.per_token(rewards_NM, values_NM, streams.mask_NM)
        filled = {
            columns.ADVANTAGES: advantages_NM, columns.RETURNS: returns_NM, columns.TOKEN_REWARDS: rewards_NM,
        }  # fmt: skip
        for name, values_of_tokens in filled.items():
            batch[name] = streams.scatter(values_of_tokens.float())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What changes from step to step."""
        return {} if self.penalty is None else {"kl_control": self.penalty.control.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if self.penalty is not None:
            self.penalty.control.load_state_dict(state.get("kl_control", {}))

    def _penalise(self, batch: TensorDict, streams: Streams) -> tuple[Tensor | None, dict[str, float]]:
        """[N, M] of what is taken from each sampled token's reward; tokens that nobody sampled cost nothing."""
        if self.penalty is None:
            return None, {}
        assert self.workers is not None
        control = self.penalty.control
        log_probs = self.workers.compute_log_probs(batch)
        kl_BT = kl_penalty(log_probs, batch[columns.REF_LOG_PROBS], self.penalty.kind)
        counted_BT = batch[columns.LOSS_MASK] & batch[columns.SAMPLED]
        kl_NM = streams.gather(masked_fill_zero(kl_BT, counted_BT).double())
        num_N = streams.gather(counted_BT.double()).sum(1)
        mean = (kl_NM.sum(1) / num_N.clamp(min=1)).mean().item()
        metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": control.coef}
        taken_NM = control.coef * kl_NM
        control.update(mean, len(kl_NM))
        return taken_NM, metrics


def _greedy_metrics(batch: TensorDict) -> dict[str, float]:
    """Of the greedy answers that samples are compared with, where there are some."""
    if columns.GREEDY_REWARDS not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return {}
    greedy_N = batch[columns.GREEDY_REWARDS][columns.first_rows(batch)]
    known = ~torch.isnan(greedy_N)
    counts = {"rollout/greedy_failed": float((~known).sum())}
    return counts | ({"reward/greedy_mean": greedy_N[known].mean().item()} if known.any() else {})


def token_rewards(batch: TensorDict, streams: Streams) -> Tensor:
    """float64 [N, M]: what each token of a trajectory earned. What belongs to a turn stands at the turn's end; all the
    rest of the trajectory's reward on its last token, in whatever record that is."""
    rewards_N = columns.trajectory_rewards(batch)[0].double()
    placed = batch.get(columns.TURN_REWARDS, None)
    if placed is None:
        placed = torch.zeros_like(batch[columns.ROLLOUT_LOG_PROBS])
    rewards_NM = streams.gather_rewards(placed.double())
    rows = torch.arange(len(rewards_N), device=rewards_N.device)
    rest_N = rewards_N - _over_trajectories(batch, placed.double())
    rewards_NM[rows, (streams.length_N - 1).clamp(min=0)] += rest_N
    return rewards_NM


def _over_trajectories(batch: TensorDict, values_BT: Tensor) -> Tensor:
    _, index_B = torch.unique(batch[columns.TRAJECTORY_INDEX], return_inverse=True)
    sums = values_BT.new_zeros(int(index_B.max()) + 1)
    return sums.index_add(0, index_B, values_BT.sum(1))
