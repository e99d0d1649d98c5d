"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens; the weight of a penalty.

With r = pi_ref(token) / pi(token) and log r = ref_log_prob - log_prob (Schulman 2020, "Approximating KL
divergence", http://joschu.net/blog/kl-approx.html):

- k1 = -log r: unbiased, high variance, may be negative.
- abs = |log r|.
- k2 = (log r)^2 / 2: biased, low variance; on-policy its gradient is the unbiased gradient of the KL.
- k3 = (r - 1) - log r: unbiased, low variance, never negative.
- low_var_kl = k3 clamped to [-10, 10] (GRPO's estimator, Shao et al. 2024, arXiv:2402.03300, eq. 4).

A name with a plus (`k1+`, `k3+`) has the value of its estimator and the gradient of k2 (straight-through).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LOG_RATIO_BOUND = 20.0
"""exp(20) is finite in every float type but float16; a larger log ratio carries no more information."""
_LOW_VAR_BOUND = 10.0
_LARGEST_ERROR = 0.2


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log_prob - ref_log_prob."""
    return log_probs - ref_log_probs


def abs_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log_prob - ref_log_prob|."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log_prob - ref_log_prob)^2 / 2."""
    return 0.5 * (log_probs - ref_log_probs) ** 2


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref_log_prob - log_prob, d clamped to [-20, 20] against overflow."""
    delta = (ref_log_probs - log_probs).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return torch.expm1(delta) - delta


def low_var_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """k3 clamped to [-10, 10]."""
    return k3(log_probs, ref_log_probs).clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND)


by_name: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": abs_kl,
    "mse": k2,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
}


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token KL estimate, the shape of `log_probs`.

    Args:
        log_probs: log pi(token), carries the gradient.
        ref_log_probs: log pi_ref(token), the same shape.
        kind: a name of the module's table, optionally with a trailing `+`.

    Raises:
        ValueError: unknown kind. Lists the known ones.
    """
    base = kind.removesuffix("+")
    if base not in by_name:
        raise ValueError(f"unknown KL estimator {kind!r}. Known: {', '.join(by_name)} (a trailing + is allowed)")
    value = by_name[base](log_probs, ref_log_probs)
    if base == kind:
        return value
    surrogate = k2(log_probs, ref_log_probs)
    return value.detach() + surrogate - surrogate.detach()


@dataclass
class KLControl:
    """beta, the weight of a KL penalty in the reward: constant, or adapted so that the KL stays near a target.

    ::

        e    = clamp(KL / target - 1, -0.2, 0.2)
        beta = beta * (1 + e * n / horizon)

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593, section 2.2).

    Args:
        coef: beta at the start.
        target_kl: nats per trajectory token that the mean penalty is held near. None = beta never changes.
        horizon: trajectories after which an error of 1 would have doubled beta.
    """

    coef: float
    target_kl: float | None = None
    horizon: float = 10000.0

    def update(self, kl: float, num_trajectories: int) -> None:
        """After a batch: its mean KL, and how many trajectories it was measured on."""
        if self.target_kl is not None:
            error = min(max(kl / self.target_kl - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.coef *= 1.0 + error * num_trajectories / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """beta, where it changes."""
        return {} if self.target_kl is None else {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A constant beta is the configuration's, whatever the checkpoint says."""
        if self.target_kl is not None:
            self.coef = state.get("coef", self.coef)
