"""What is done to rewards and groups before advantages: DAPO's parts, and the unbiased pass@k.

DAPO: Yu et al. 2025 (arXiv:2503.14476).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def soft_overlong_penalty(lengths_N: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """A penalty that grows from 0 to -1 over the last `buffer` tokens before `max_length` (section 3.4, eq. 13).

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
    """bool [N]: the rewards of the trajectory's group are not all equal (section 3.2, dynamic sampling).

    The others have advantage 0 and add nothing to a gradient. A group of one has no signal.

    Args:
        rewards_N: one per trajectory, however many records it has.
        group_index_N: int64, the group of each; any numbers.
    """
    _, group = torch.unique(group_index_N, return_inverse=True)
    zeros = rewards_N.new_zeros(int(group.max()) + 1 if len(group) else 0)
    low = zeros.scatter_reduce(0, group, rewards_N, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, rewards_N, "amax", include_self=False)
    return (low != high)[group]


def pass_at_k_estimate(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that one of k samples is right, unbiased from n of which c are.

    Chen et al. 2021 (Codex, arXiv:2107.03374, eq. 1).

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"need 1 <= k <= n and 0 <= c <= n, got n={num_samples}, c={num_correct}, k={k}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
