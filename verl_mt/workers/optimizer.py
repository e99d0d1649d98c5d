"""AdamW with float32 master weights where the policy's own are in a lower precision; the learning rate of its steps.

A bfloat16 number has 8 bits of mantissa: at the learning rates of RL nearly every update of it would be rounded away.
So the optimizer keeps the exact weights, steps those, and rounds them into the policy (mixed precision training,
Micikevicius et al. 2018, section 3.1). Float32 parameters are left to torch.

What the optimizer keeps is 8 bytes per parameter (12 with exact weights). Offloaded, it lies in CPU memory and visits
the device one parameter at a time, during the step (as in ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, whose step
itself is on the CPU).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from verl_mt.config.actor import OptimConfig
from verl_mt.modeling.exact import take_exact

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter; `step` is a number."""
MASTER = "master"
"""The exact weights, float32, of a parameter in a lower precision."""


def build_adamw(parameters: Sequence[Tensor], *, offload: bool = False, **options: Any) -> torch.optim.AdamW:
    """AdamW for the parameters of one policy; with master weights where they are in a lower precision.

    Args:
        parameters: all float32, or all in a lower precision.
        offload: keep the state in CPU memory.
        options: of `torch.optim.AdamW`.

    Raises:
        ValueError: some are float32 and some are not.
    """
    low = sum(p.dtype != torch.float32 for p in parameters)
    if low not in (0, len(parameters)):
        raise ValueError(f"{low} of {len(parameters)} parameters are not float32. All or none must be")
    if not low and not offload:
        return torch.optim.AdamW(parameters, **options)
    optimizer = MasterAdamW(parameters, **options)
    optimizer.offload = offload
    return optimizer


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with moments and weights in float32, and a place for them that may be another device."""

    offload = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update; rounds the exact weights into the parameters."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not self.offload:
                self._update(group, parameters, [state_of(self, p) for p in parameters])
                continue
            for parameter in parameters:
                kept = state_of(self, parameter)
                visiting = {name: kept[name].to(parameter.device, copy=True) for name in kept if name != "step"}
                self._update(group, [parameter], [{**visiting, "step": kept["step"]}])
                for name, tensor in visiting.items():
                    kept[name].copy_(tensor)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Any]]) -> None:
        exact = [s.get(MASTER, p) for p, s in zip(parameters, states)]
        adamw(
            exact,
            [p.grad.float() for p in parameters if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            fused=group["fused"],
        )
        for parameter, weights in zip(parameters, exact):
            if weights is not parameter:
                parameter.copy_(weights)


def names_of_state(parameter: Tensor) -> tuple[str, ...]:
    """What the optimizer keeps of a parameter."""
    return MOMENTS if parameter.dtype == torch.float32 else (*MOMENTS, MASTER)


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The state of one parameter, made where there is none yet: moments 0, master = the weights, as exact as they are
    known (a float32 checkpoint's own)."""
    state = optimizer.state[parameter]
    if not state:
        offload = getattr(optimizer, "offload", False)
        device = torch.device("cpu") if offload else parameter.device
        # A fused kernel reads the number where the parameter is.
        state["step"] = torch.zeros((), device=parameter.device if optimizer.param_groups[0]["fused"] else "cpu")
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32, device=device)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32, device=device)
        if parameter.dtype != torch.float32:
            exact = take_exact(parameter)
            known = parameter.detach() if exact is None else exact
            state[MASTER] = known.to(device, torch.float32)
    return state


def warmup_steps_of(optim: OptimConfig, total_steps: int) -> int:
    """Optimizer steps of warm-up in a run of `total_steps` optimizer steps."""
    if optim.lr_warmup_steps_ratio:
        return int(optim.lr_warmup_steps_ratio * total_steps + 1e-9)  # 0.285 x 400 is just below 114 in floating point
    return optim.lr_warmup_steps


def lr_factor(step: int, *, warmup_steps: int, total_steps: int, kind: str, min_ratio: float) -> float:
    """What the peak learning rate is multiplied with at an optimizer step.

    Warm-up: (step + 1) / warmup_steps, so that no step is wasted on 0 and the peak is reached at its last step.
    Then with x = (step - warmup_steps) / (total_steps - warmup_steps) in [0, 1]: constant 1; linear 1 - x; cosine
    (1 + cos(pi x)) / 2; the last two scaled to end at `min_ratio`.

    Args:
        step: counts from 0.
        warmup_steps: 0 = none.
        total_steps: of the whole run; later steps get the last value.
        kind: constant, linear or cosine.
        min_ratio: the value at `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_ratio + (1.0 - min_ratio) * shape
