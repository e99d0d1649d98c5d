"""From the rewards of trajectories to their advantages, without a critic (`gae.py` needs one).

Every function gets one reward per trajectory, not per record, so a trajectory that became several records counts once.
Groups are named by explicit ids; nothing is compared by position, and groups may have any size. A group of one has
nothing to be compared with and gets 0 from every estimator that compares inside a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Groups:
    """Sums and means inside groups, in float64: in float32 equal rewards like 0.1 would get a tiny std, and eps would
    not hide it."""

    index_N: Tensor
    size_N: Tensor
    """Trajectories in each one's group."""
    num: int
    equal_N: Tensor
    """All rewards of the group are equal; true for a group of one."""

    @classmethod
    def of(cls, rewards_N: Tensor, group_index_N: Tensor) -> tuple[Tensor, _Groups]:
        """(rewards in float64, the groups).

        Raises:
            ValueError: shapes differ, or a reward is not finite (names the position).
        """
        if rewards_N.shape != group_index_N.shape or rewards_N.dim() != 1:
            raise ValueError(
                f"rewards {tuple(rewards_N.shape)} and groups {tuple(group_index_N.shape)} must both be [N]"
            )
        if not torch.isfinite(rewards_N).all():
            bad = int((~torch.isfinite(rewards_N)).nonzero()[0])
            raise ValueError(
                f"reward {bad} is {rewards_N[bad].item()}. Every trajectory in a group needs a finite reward"
            )
        rewards = rewards_N.double()
        names, index = torch.unique(group_index_N, return_inverse=True)
        zeros = rewards.new_zeros(len(names))
        low = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
        high = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
        size = zeros.index_add(0, index, torch.ones_like(rewards))
        return rewards, cls(index, size[index], len(names), (low == high)[index])

    def sum(self, values_N: Tensor) -> Tensor:
        """[N]: the sum over each one's group."""
        return values_N.new_zeros(self.num).index_add(0, self.index_N, values_N)[self.index_N]

    def centred(self, rewards_N: Tensor) -> Tensor:
        """R - mean of the group. Exactly 0 where the group's rewards are equal."""
        return self.without_equal(rewards_N - self.sum(rewards_N) / self.size_N)

    def std(self, rewards_N: Tensor) -> Tensor:
        """[N]: that of each one's group, with Bessel's correction. 0 for equal rewards."""
        return (self.sum(self.centred(rewards_N) ** 2) / (self.size_N - 1).clamp(min=1)).sqrt()

    def without_equal(self, values_N: Tensor) -> Tensor:
        return torch.where(self.equal_N, torch.zeros_like(values_N), values_N)


def grpo(rewards_N: Tensor, group_index_N: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: (R - mean of the group) / (std of the group + eps).

    DeepSeekMath (Shao et al. 2024, arXiv:2402.03300, section 4.1.2, outcome supervision). Without the
    division it is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2). The std has Bessel's
    correction. A group of one has nothing to be compared with and gets 0, and so does a group whose rewards
    are all equal.

    Args:
        rewards_N: float, one per trajectory (not per record).
        group_index_N: int64, the group of each trajectory. Any numbers, any order, groups of any size.
        norm_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation.

    Returns:
        advantages_N, in float64 where the rewards are, else float32.

    Raises:
        ValueError: shapes differ, or a reward is not finite (names the position).
    """
    rewards, groups = _Groups.of(rewards_N, group_index_N)
    advantages = groups.centred(rewards)
    if norm_by_std:
        # With eps = 0 an all-equal group would divide 0 by 0.
        advantages = groups.without_equal(advantages / (groups.std(rewards) + eps))
    return _as(rewards_N, advantages)


def rloo(rewards_N: Tensor, group_index_N: Tensor) -> Tensor:
    """R - the mean of the others of the group: K / (K - 1) * (R - mean of the group), an unbiased baseline.

    Kool et al. 2019. For language models Ahmadian et al. 2024 (arXiv:2402.14740, section 3.2).

    Args, returns, raises: as for `grpo`.
    """
    rewards, groups = _Groups.of(rewards_N, group_index_N)
    return _as(rewards_N, groups.centred(rewards) * groups.size_N / (groups.size_N - 1).clamp(min=1))


def opo(rewards_N: Tensor, group_index_N: Tensor, *, tokens_N: Tensor) -> Tensor:
    """R - sum(l R) / sum(l) over the group: the baseline of least variance if a gradient's size grows with its length.

    Hao et al. 2025 (On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585).

    Args:
        rewards_N, group_index_N: as for `grpo`.
        tokens_N: l, the trained tokens of each trajectory over all its records.

    Returns, raises: as for `grpo`.
    """
    rewards, groups = _Groups.of(rewards_N, group_index_N)
    length = tokens_N.double()
    baseline = groups.sum(length * rewards) / groups.sum(length).clamp(min=1)
    return _as(rewards_N, groups.without_equal(rewards - baseline))


def gpg(rewards_N: Tensor, group_index_N: Tensor) -> Tensor:
    """alpha * (R - mean of the group), alpha = N / (N in groups whose rewards are not all equal).

    The factor makes up for trajectories that add nothing to the gradient. Chu et al. 2025 (GPG, arXiv:2504.02546),
    without normalisation (F_norm = 1). verl counts trajectories with a reward other than 0 instead.

    Args, returns, raises: as for `grpo`.
    """
    rewards, groups = _Groups.of(rewards_N, group_index_N)
    alpha = len(rewards) / (~groups.equal_N).sum().clamp(min=1)
    return _as(rewards_N, alpha * groups.centred(rewards))


def pass_at_k(rewards_N: Tensor, group_index_N: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Only the best of a group has an advantage: (its reward - the second best) / (std of the group + eps).

    Tang et al. 2025 (Optimizing language models for inference time objectives using RL, arXiv:2503.19595). It
    rewards that one of K samples is right, not that all are. A tie for the best gives 0.

    Args, returns, raises: as for `grpo`.
    """
    rewards, groups = _Groups.of(rewards_N, group_index_N)
    advantages = torch.zeros_like(rewards)
    for group in range(groups.num):
        mine = (groups.index_N == group).nonzero().squeeze(1)
        if len(mine) > 1:
            best = rewards[mine].topk(2)
            advantages[mine[best.indices[0]]] = best.values[0] - best.values[1]
    if norm_by_std:
        advantages = groups.without_equal(advantages / (groups.std(rewards) + eps))
    return _as(rewards_N, advantages)


def reinforce_plus_plus(rewards_N: Tensor, group_index_N: Tensor, *, tokens_N: Tensor, eps: float = 1e-8) -> Tensor:
    """(R - mean) / sqrt(var + eps) over the tokens of the whole batch, the variance with Bessel's correction.

    REINFORCE++ (Hu et al. 2025, arXiv:2501.03262) without discount: each trained token has its trajectory's return.
    Groups play no part, so one sample per prompt will do. `discounted_returns` and `masked_whiten` are its parts
    with a discount.

    Args:
        rewards_N, group_index_N: as for `grpo`.
        tokens_N: trained tokens of each trajectory over all its records. A mean over tokens weighs with them.
        eps: added to the variance.

    Returns, raises: as for `grpo`. All 0 where all rewards are equal.
    """
    rewards, _ = _Groups.of(rewards_N, group_index_N)
    if len(rewards) == 0 or bool((rewards == rewards[0]).all()):
        return _as(rewards_N, torch.zeros_like(rewards))
    return _as(rewards_N, _whiten(rewards, tokens_N.double(), eps))


def reinforce_plus_plus_baseline(rewards_N: Tensor, group_index_N: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(R - mean of the group) / sqrt(var + eps), the variance of that difference over the trajectories of the batch.

    The form of REINFORCE++ with several samples per prompt (Hu et al. 2025, arXiv:2501.03262): whitening over the
    batch, whose mean is 0 already. Over trajectories and not tokens as in verl, where a group of one would get minus
    the mean over tokens instead of 0.

    Args:
        rewards_N, group_index_N: as for `grpo`.
        eps: added to the variance (with Bessel's correction).

    Returns, raises: as for `grpo`.
    """
    rewards, groups = _Groups.of(rewards_N, group_index_N)
    centred = groups.centred(rewards)
    variance = (centred**2).sum() / max(1, len(centred) - 1)
    return _as(rewards_N, centred * torch.rsqrt(variance + eps))


def gdpo(rewards_NK: Tensor, group_index_N: Tensor, *, weights_K: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Several rewards, each normalised inside its group before they are added. The sum is normalised over the batch.

    ::

        A_k = (R_k - mean of the group) / (std of the group + eps)
        S   = sum_k w_k A_k
        A   = (S - mean of the batch) / (std of the batch + eps)

    So a reward of small scale is not drowned by one of large scale, and different mixtures with one sum keep different
    advantages. Liu et al. 2026 (GDPO, arXiv:2601.05242).

    Args:
        rewards_NK: K rewards per trajectory.
        group_index_N: as for `grpo`.
        weights_K: w. None = 1 each.
        eps: added to every standard deviation (with Bessel's correction).

    Returns:
        advantages_N.

    Raises:
        ValueError: not [N, K], or a reward is not finite.
    """
    if rewards_NK.dim() != 2:
        raise ValueError(f"rewards {tuple(rewards_NK.shape)} must be [N, K], one column per reward")
    total = rewards_NK.new_zeros(len(rewards_NK), dtype=torch.float64)
    for k in range(rewards_NK.shape[1]):
        weight = 1.0 if weights_K is None else weights_K[k].double()
        total = total + weight * grpo(rewards_NK[:, k].double(), group_index_N, eps=eps)
    # The mean of the batch is 0, as that of each group is.
    std = (total**2).sum().div(max(1, len(total) - 1)).sqrt()
    return _as(rewards_NK, total / (std + eps))


def remax(rewards_N: Tensor, greedy_rewards_N: Tensor) -> Tensor:
    """R - the reward of the greedy answer to the same prompt (Li et al. 2023, ReMax, arXiv:2310.10505, section 4).

    Args:
        rewards_N: one per trajectory.
        greedy_rewards_N: that of its prompt's greedy rollout.

    Raises:
        ValueError: shapes differ.
    """
    if rewards_N.shape != greedy_rewards_N.shape:
        raise ValueError(
            f"rewards {tuple(rewards_N.shape)} and baselines {tuple(greedy_rewards_N.shape)} must be alike"
        )
    return rewards_N - greedy_rewards_N


def _whiten(values_N: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """Mean 0 and variance 1 where value i stands on weight_i tokens."""
    count = weight_N.sum()
    centred = values_N - (values_N * weight_N).sum() / count.clamp(min=1)
    variance = (centred**2 * weight_N).sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + eps)


def _as(rewards: Tensor, advantages: Tensor) -> Tensor:
    return advantages.to(rewards.dtype if rewards.dtype == torch.float64 else torch.float32)


by_name: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": pass_at_k,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
"""`algorithm.adv_estimator` -> the function; it gets those of `norm_by_std` and `tokens_N` that it takes."""


# What is done to rewards and groups before advantages: DAPO, Yu et al. 2025 (arXiv:2503.14476).


def soft_overlong_penalty(lengths_N: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """A penalty that grows from 0 to -1 over the last `buffer` tokens before `max_length` (DAPO, section 3.4, eq. 13).

    ::

        0 up to max_length - buffer, then ((max_length - buffer) - length) / buffer, -1 from max_length on

    Args:
        lengths_N: tokens of each trajectory, the sum over its turns.
        max_length: of a whole response, in tokens.
        buffer: tokens before it on which the penalty grows.

    Returns:
        float32 [N] in [-1, 0], to be added to the rewards.

    Raises:
        ValueError: `buffer` is not in 1..max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}, must be between 1 and max_length ({max_length})")
    return (((max_length - buffer) - lengths_N.float()) / buffer).clamp(-1.0, 0.0)


def has_signal(rewards_N: Tensor, group_index_N: Tensor) -> Tensor:
    """bool [N]: the rewards of the trajectory's group are not all equal (DAPO, section 3.2, dynamic sampling).

    The others have advantage 0 and add nothing to a gradient. A group of one has no signal.

    Args:
        rewards_N: one per trajectory, however many records it has.
        group_index_N: int64, the group of each. Any numbers.
    """
    names, group = torch.unique(group_index_N, return_inverse=True)
    zeros = rewards_N.new_zeros(len(names))
    low = zeros.scatter_reduce(0, group, rewards_N, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, rewards_N, "amax", include_self=False)
    return (low != high)[group]
