"""The weight of a KL penalty in the reward, and how it follows the KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LARGEST_ERROR = 0.2


@dataclass
class KLControl:
    """beta; constant, or adapted so that the KL stays near a target.

    ::

        e    = clamp(KL / target - 1, -0.2, 0.2)
        beta = beta * (1 + e * n / horizon)

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593, section 2.2).

    Args:
        coef: beta at the start.
        target_kl: nats per trajectory token that the mean penalty is held near; None = beta never changes.
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
