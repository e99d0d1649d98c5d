"""The critic's loss, and how much of the returns its values explain."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mt.algorithms.masked import masked_fill_zero, masked_mean, masked_var


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """Squared error to the returns, with values held near the old ones.

    ::

        clipped = V_old + clamp(V - V_old, -c, c)
        loss    = max((V - R)^2, (clipped - R)^2) / 2

    PPO with a clipped value function (Schulman et al. 2017, arXiv:1707.06347, eq. 9 without the clip; the clip is
    that of its authors' code, described by Huang et al. 2022, "The 37 implementation details of PPO", no. 9).

    Args:
        values: V, carries the gradient; any shape.
        old_values: by the critic before the batch's first update, the same shape.
        returns: R, the same shape.
        cliprange: c; None = no clip.

    Returns:
        (losses, clipped), the same shape; `clipped` is 1 where the clip decides the loss and there is no gradient.
    """
    plain = (values - returns) ** 2
    if cliprange is None:
        return 0.5 * plain, torch.zeros_like(plain)
    held = old_values + (values - old_values).clamp(-cliprange, cliprange)
    clipped = (held - returns) ** 2
    # Within the range `held` is V but for a rounding, which is no clip.
    decides = (clipped > plain) & ((values - old_values).abs() > cliprange)
    return 0.5 * torch.maximum(plain, clipped), decides.to(plain.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over the mask: 1 = perfect, 0 = as good as a constant, below 0 = worse than that.

    0 where all returns are equal: there is nothing to explain.

    Args:
        values, returns, mask: of one shape; masked-out positions may hold anything.
    """
    values, returns = (masked_fill_zero(x.double(), mask) for x in (values, returns))
    # In float64 a mean of equal numbers may be off by a rounding; a share of 1e-12 is no variance.
    total = masked_var(returns, mask)
    if not bool(total > 1e-12 * masked_mean(returns**2, mask)):
        return torch.zeros_like(total)
    return 1.0 - masked_var(returns - values, mask) / total
