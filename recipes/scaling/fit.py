"""Rates of a machine from steps that were measured: least squares of relative errors, no rate below zero.

Without waits for tools every phase is linear in what a `Machine` holds (in seconds per unit), so each phase is one
small non-negative least-squares problem. Steps with waits are predicted well by what the others say, and are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from verl_mt.doctor.step_time import Machine, Observed, decoding_steps, engine_flops


def fit(observed: Sequence[Observed]) -> Machine:
    """The rates under which the measured steps take as long as they took, as nearly as can be.

    What the steps do not tell apart (one model only: overheads per step and per layer) is given to one of the terms;
    predictions for work of the same kind do not depend on it.

    Raises:
        SystemExit: fewer than three steps without waits.
    """
    steps = [step for step in observed if step.work.calls * step.work.tool_latency_s < 0.02 * step.times.rollout_s]
    if len(steps) < 3:
        raise SystemExit(f"only {len(steps)} of {len(observed)} steps are without waits for tools; a fit needs three")
    rollout = non_negative([_rollout_quantities(s) for s in steps], [s.times.rollout_s for s in steps])
    inline = [s for s in steps if s.work.ranks == 1 and s.work.updates]
    update = non_negative([_update_quantities(s) for s in inline], [s.times.update_s for s in inline])
    weights = non_negative(
        [[1.0, s.work.sync_copies * s.model.parameters * s.model.bytes_per_parameter] for s in steps],
        [s.times.weights_s for s in steps],
    )
    rest = non_negative(
        [[1.0, s.work.trajectories * (s.work.prompt_tokens + s.work.response_tokens)] for s in steps],
        [s.times.rest_s for s in steps],
    )
    return Machine(
        step_overhead_s=rollout[0],
        layer_overhead_s=rollout[1],
        memory_bandwidth=_per_second(rollout[2]),
        token_overhead_s=rollout[3],
        turn_overhead_s=rollout[4],
        engine_flops=_per_second(rollout[5]),
        train_flops=_per_second(update[0]),
        train_attention_flops=_per_second(update[1]),
        train_activation_rate=_per_second(update[2]),
        train_layer_overhead_s=update[3],
        train_segment_overhead_s=update[4],
        optimizer_bandwidth=_per_second(update[5]),
        sync_overhead_s=weights[0],
        sync_bandwidth=_per_second(weights[1]),
        rest_overhead_s=rest[0],
        rest_token_s=rest[1],
    )


def _rollout_quantities(step: Observed) -> list[float]:
    model, work, steps = step.model, step.work, decoding_steps(step.work)
    share = 1 / work.engines
    sampled = share * work.trajectories * work.sampled_tokens
    return [
        steps,
        steps * model.layers,
        steps * model.matmul_parameters * model.bytes_per_parameter + sampled * model.kv_bytes * work.context,
        sampled,
        share * work.trajectories * work.turns,
        share * engine_flops(model, work),
    ]


def _update_quantities(step: Observed) -> list[float]:
    model, work = step.model, step.work
    return [
        work.trained_tokens * 3 * model.product_flops,
        work.attended * 3 * model.attention_flops,
        work.trained_tokens * model.layers * model.attention_width,
        work.passes * model.layers,
        work.segments * model.layers,
        work.updates * model.parameters,
    ]


def non_negative(quantities: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """x >= 0 that minimizes the sum of ((quantities x - seconds) / quantities x)^2: the best of all supports, which are
    few.

    Errors are taken relative to what is predicted: relative to what was measured, noise would make every prediction
    too small. The weights come from the solution before, a few times over.

    Args:
        quantities: [N, K].
        seconds: [N], above zero.
    """
    if not len(seconds):
        return [0.0] * 6
    target = np.maximum(np.asarray(seconds, dtype=float), 1e-9)
    matrix = np.asarray(quantities, dtype=float)
    predicted = target
    for _ in range(4):
        found = _solve(matrix / predicted[:, None], target / predicted)
        predicted = np.maximum(matrix @ found, 1e-3 * target)
    return [float(value) for value in found]


def _solve(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    matrix = matrix / scale
    best, found = math.inf, np.zeros(matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for support in itertools.combinations(range(matrix.shape[1]), size):
            chosen = list(support)
            x, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
            error = float(((matrix[:, chosen] @ x - target) ** 2).sum())
            # A larger support has to earn its place: terms that nothing tells apart stay at zero.
            if (x >= 0).all() and error < best * (1 - 1e-3):
                best, found = error, np.zeros(matrix.shape[1])
                found[chosen] = x
    return found / scale


def _per_second(seconds_per_unit: float) -> float:
    return 1 / seconds_per_unit if seconds_per_unit > 0 else math.inf
