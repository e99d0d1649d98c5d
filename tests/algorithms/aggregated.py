"""Token losses as one number, as the workers make it of them."""

from __future__ import annotations

from torch import Tensor

from verl_mt.algorithms.aggregate import token_weights
from verl_mt.algorithms.masked import masked_sum


def aggregate_loss(
    losses_BT: Tensor,
    mask_BT: Tensor,
    trajectory_index_B: Tensor,
    *,
    mode: str,
    norm_constant: float | None = None,
) -> Tensor:
    """One number from token losses; see `token_weights`. 0 (with a gradient of 0) if everything is masked
    out.
    """
    weights = token_weights(mask_BT, trajectory_index_B, mode=mode, norm_constant=norm_constant)
    return masked_sum(losses_BT * weights.to(losses_BT.dtype), mask_BT)
