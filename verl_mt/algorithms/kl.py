"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens.

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

import torch
from torch import Tensor

_LOG_RATIO_BOUND = 20.0
"""exp(20) is finite in every float type but float16; a larger log ratio carries no more information."""
_LOW_VAR_BOUND = 10.0


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
        ValueError: unknown kind; lists the known ones.
    """
    base = kind.removesuffix("+")
    if base not in by_name:
        raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(by_name)} (a trailing + is allowed)")
    value = by_name[base](log_probs, ref_log_probs)
    if base == kind:
        return value
    surrogate = k2(log_probs, ref_log_probs)
    return value.detach() + surrogate - surrogate.detach()
