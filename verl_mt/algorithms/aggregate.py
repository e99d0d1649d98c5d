"""How token losses become one number.

Every mode is a weighted sum of token losses. The weights are computed once over a whole mini-batch, so any
split into micro-batches gives the same sum and the same gradient. "Sequence" means trajectory: the records
of one trajectory (equal `trajectory_index`) count once together, however many there are. A trajectory
without a token in the mask does not count; a mini-batch without one has loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def token_weights(
    mask_BT: Tensor, trajectory_index_B: Tensor, *, mode: str, norm_constant: float | None = None
) -> Tensor:
    """The weight of each token, so that `loss = (token_losses * weights).sum()`.

    With n the tokens in the mask, n_i those of trajectory i and N the trajectories that have any::

        token-mean               1 / n           every token the same (DAPO, arXiv:2503.14476, section 3.3)
        seq-mean-token-mean      1 / (N n_i)     every trajectory the same (GRPO, arXiv:2402.03300, eq. 3)
        seq-mean-token-sum       1 / N
        seq-mean-token-sum-norm  1 / (N L)       L = norm_constant (Dr. GRPO, arXiv:2503.20783, section 3.2)

    Args:
        mask_BT: tokens of the loss in the WHOLE mini-batch.
        trajectory_index_B: int64, the trajectory of each row; any numbers.
        mode: one of `MODES`.
        norm_constant: L, a constant number of tokens such as the longest response; only the last mode uses
            it.

    Returns:
        float32 [B, T], 0 where masked out.

    Raises:
        ValueError: unknown mode, or a missing or non-positive `norm_constant`.
    """
    mask = mask_BT.bool()
    weights_B = row_weights(mask.sum(1), trajectory_index_B, mode=mode, norm_constant=norm_constant)
    return mask.float() * weights_B.unsqueeze(1)


def row_weights(
    tokens_B: Tensor, trajectory_index_B: Tensor, *, mode: str, norm_constant: float | None = None
) -> Tensor:
    """The weight of each token of a row: it is the same for all of them, in every mode.

    Args:
        tokens_B: how many tokens of the loss each row of the WHOLE mini-batch has.
        trajectory_index_B, mode, norm_constant: see `token_weights`.

    Returns:
        float32 [B].

    Raises:
        ValueError: as `token_weights`.
    """
    if mode not in MODES:
        raise ValueError(f"unknown loss aggregation {mode!r}. Known: {', '.join(MODES)}")
    tokens_B = tokens_B.float()
    one_B = torch.ones_like(tokens_B)
    if mode == "token-mean":
        return one_B / tokens_B.sum().clamp(min=1)
    tokens_N, row_B = _summed(tokens_B, trajectory_index_B)
    num_trajectories = (tokens_N > 0).sum().clamp(min=1)
    if mode == "seq-mean-token-mean":
        return one_B / tokens_N[row_B].clamp(min=1) / num_trajectories
    if mode == "seq-mean-token-sum":
        return one_B / num_trajectories
    if norm_constant is None or norm_constant <= 0:
        raise ValueError(f"{mode} needs a positive norm_constant (the longest response in tokens), got {norm_constant}")
    return one_B / (num_trajectories * norm_constant)


def tokens_per_trajectory(mask_BT: Tensor, trajectory_index_B: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of the mask each trajectory has over all its records.

    Returns:
        float32 [N] counts, and int64 [B] the place of each row's trajectory in them.
    """
    return _summed(mask_BT.bool().float().sum(1), trajectory_index_B)


def _summed(tokens_B: Tensor, trajectory_index_B: Tensor) -> tuple[Tensor, Tensor]:
    names, row_B = torch.unique(trajectory_index_B, return_inverse=True)
    counts = torch.zeros(len(names), device=tokens_B.device)
    return counts.index_add(0, row_B, tokens_B), row_B
