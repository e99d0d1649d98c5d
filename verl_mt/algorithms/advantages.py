"""From the rewards of trajectories to their advantages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def grpo(rewards_N: Tensor, group_index_N: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: (R - mean of the group) / (std of the group + eps).

    DeepSeekMath (Shao et al. 2024, arXiv:2402.03300, section 4.1.2, outcome supervision); without the
    division it is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2). The std has Bessel's
    correction. A group of one has nothing to be compared with and gets 0, and so does a group whose rewards
    are all equal.

    Args:
        rewards_N: float, one per trajectory (not per record).
        group_index_N: int64, the group of each trajectory; any numbers, any order, groups of any size.
        norm_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation.

    Returns:
        advantages_N, in float64 where the rewards are, else float32.

    Raises:
        ValueError: shapes differ, or a reward is not finite (names the position).
    """
    if rewards_N.shape != group_index_N.shape or rewards_N.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards_N.shape)} and groups {tuple(group_index_N.shape)} must both be [N]")
    if not torch.isfinite(rewards_N).all():
        bad = int((~torch.isfinite(rewards_N)).nonzero()[0])
        raise ValueError(f"reward {bad} is {rewards_N[bad].item()}; every trajectory in a group needs a finite reward")
    # float64 inside: a sum of squares in float32 would give equal rewards like 0.1 a tiny std, and eps would
    # not hide it.
    rewards = rewards_N.double()
    _, group = torch.unique(group_index_N, return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    zeros = rewards.new_zeros(num_groups)
    size = zeros.index_add(0, group, torch.ones_like(rewards))
    centred = rewards - (zeros.index_add(0, group, rewards) / size)[group]
    low = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    advantages = torch.where((low == high)[group], torch.zeros_like(centred), centred)
    if norm_by_std:
        std = (zeros.index_add(0, group, advantages**2) / (size - 1).clamp(min=1)).sqrt()
        # With eps = 0 an all-equal group would divide 0 by 0.
        advantages = torch.where((low == high)[group], advantages, advantages / (std[group] + eps))
    return advantages.to(rewards_N.dtype if rewards_N.dtype == torch.float64 else torch.float32)


by_name: dict[str, Callable[..., Tensor]] = {"grpo": grpo}
"""`algorithm.adv_estimator` -> the function."""
