"""Float32 values of weights that a model holds in a lower precision: what its checkpoint has and rounding took away.

Master weights begin with them. Begun at the rounded weights, which lie in the middle of their rounding intervals, they
would have to travel half an interval before the policy changes at all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_KEY = "_verl_mt_exact"


def remember_exact(parameter: nn.Parameter, values: Tensor) -> None:
    """Keep them with a parameter, whole or sharded as it is, until `take_exact`."""
    parameter.__dict__[_KEY] = values


def take_exact(parameter: Tensor) -> Tensor | None:
    """What was kept with a parameter, once; None = nothing, or the parameter itself is exact."""
    return parameter.__dict__.pop(_KEY, None)


def remember_all(model: nn.Module, exact: nn.Module) -> None:
    """Of a model, from the same one in float32; only where something was rounded away."""
    values = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 and not torch.equal(parameter.detach().float(), values[name].detach()):
            remember_exact(parameter, values[name].detach())
