"""The learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math


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
