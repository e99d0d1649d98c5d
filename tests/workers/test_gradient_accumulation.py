"""Gradients of many micro-batches of a bfloat16 policy are added up in float32."""

from __future__ import annotations

import pytest
import torch
from actor_toys import make_batch, tiny_policy, worker
from sharded_jobs import one_update, reduced_types

from verl_mt.workers.sharding import ALONE

BFLOAT16 = torch.bfloat16


def a_batch():
    """16 rows, so that one row a pass makes 16 micro-batches."""
    return make_batch([[1.0, 0.0, 0.5, 0.0] for _ in range(4)], seed=3)


def gradient(actor, batch) -> torch.Tensor:
    seen = []
    actor.optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in actor.module.parameters() if p.grad is not None])
    )
    actor.update(batch.clone())
    assert all(grad.dtype == torch.float32 for grad in seen[0])
    return torch.cat([grad.double().flatten() for grad in seen[0]])


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.slow
def test_the_sum_over_micro_batches_is_that_of_one_pass():
    """Each row's gradient has the rounding of bfloat16; their sum adds none."""
    policy = tiny_policy().to(BFLOAT16)
    tiny_policy.cache_clear()
    options = {"grad_clip": 0.0, "ppo_micro_batch_size": 1, "share_prefixes": False}
    apart = gradient(worker(policy, **options), a_batch())
    exact = gradient_in_float64(policy, options)
    in_low = gradient_in_bfloat16(policy, options)
    assert off(apart, exact) < 1e-4 * off(in_low, exact)


def rows_alone(policy, options):
    """The gradient of each micro-batch by itself, as autograd gave it."""
    actor, pieces = worker(policy, **options), []

    def keep(parameter):
        pieces.append((parameter, parameter.grad.clone()))
        parameter.grad = None

    for parameter in actor.module.parameters():
        parameter.register_post_accumulate_grad_hook(keep)
    actor._step = lambda loss: None  # there is nothing left to step with
    actor.update(a_batch())
    by_parameter: dict[torch.Tensor, list[torch.Tensor]] = {}
    for parameter, grad in pieces:
        by_parameter.setdefault(parameter, []).append(grad)
    return [by_parameter[p] for p in actor.module.parameters()]


def gradient_in_bfloat16(policy, options) -> torch.Tensor:
    """What autograd would have added up without `Trainable`."""
    sums = []
    for pieces in rows_alone(policy, options):
        total = torch.zeros_like(pieces[0], dtype=BFLOAT16)
        for piece in pieces:
            total += piece.to(BFLOAT16)
        sums.append(total.double().flatten())
    return torch.cat(sums)


def gradient_in_float64(policy, options) -> torch.Tensor:
    return torch.cat([sum(p.double() for p in pieces).flatten() for pieces in rows_alone(policy, options)])


@pytest.mark.slow
def test_over_ranks_too(ranks):
    batch = a_batch()
    options = {"ppo_micro_batch_size": 1, "grad_clip": 0.0}
    expected = one_update(ALONE, batch.clone(), dtype=BFLOAT16, **options)["gradients"][0]
    for got in ranks(2)(one_update, batch, dtype=BFLOAT16, **options):
        assert all(grad.dtype == torch.float32 for grad in got["gradients"][0].values())
        for name, grad in got["gradients"][0].items():
            assert off(grad, expected[name]) < 0.02
    assert ranks(2)(reduced_types, make_batch([[1.0, 0.0]]), dtype=BFLOAT16, **options) == [{torch.float32}] * 2
