"""Means, sums and whitening that see only the positions of a mask.

Shape suffixes of this package: `B` sequences (rows of a batch), `T` tokens, `N` trajectories, `V` vocabulary.
A masked-out position never changes a result, whatever it holds (NaN and infinity included).
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_fill_zero(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask`, exactly 0 elsewhere (a product would keep NaN * 0 = NaN).

    Args:
        values: any shape.
        mask: bool or 0/1, broadcastable to `values`.
    """
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """sum_i m_i x_i over `dim` (None = all dimensions)."""
    return masked_fill_zero(values, mask).sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """sum_i m_i x_i / sum_i m_i over `dim` (None = all dimensions); 0 where the mask is empty."""
    count = mask.bool().expand_as(values).to(values.dtype).sum(dim=dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance over all masked-in values, with Bessel's correction n / (n - 1) if `unbiased`; 0 for fewer
    than two.
    """
    mask = mask.bool().expand_as(values)
    count = mask.sum()
    squares = masked_sum((masked_fill_zero(values, mask) - masked_mean(values, mask)) ** 2, mask)
    return squares / (count - 1 if unbiased else count).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the masked-in values, unbiased variance; 0 at masked-out positions.

    Args:
        values: any shape.
        mask: bool or 0/1, broadcastable to `values`.
        shift_mean: False keeps the mean (only the scale changes).
        eps: added to the variance.
    """
    mean = masked_mean(values, mask)
    scaled = (masked_fill_zero(values, mask) - mean) * torch.rsqrt(masked_var(values, mask) + eps)
    return masked_fill_zero(scaled if shift_mean else scaled + mean, mask)


def at_least_quantile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """bool: the mask's entries whose value is at least the quantile `share` of the mask's values, which is taken
    between two of them where it falls there."""
    inside = values[mask.bool()].float()
    if inside.numel() == 0:
        return torch.zeros_like(mask, dtype=torch.bool)
    ordered = inside.sort().values  # torch.quantile takes 16 million values at most
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    threshold = torch.lerp(ordered[below], ordered[above], place - below)
    return mask.bool() & (values >= threshold)
