"""REAL: trajectories of a group as two classes."""

from __future__ import annotations

import math

import pytest
import torch

from verl_mt.extensions.rare_losses.contrast import contrast_slopes, real_loss


def loss_of(scores, advantages, groups, tau):
    """The sum over groups, divided by their number."""
    total = torch.zeros((), dtype=torch.float64)
    for group in sorted(set(groups)):
        own = [k for k, g in enumerate(groups) if g == group]
        good, bad = [k for k in own if advantages[k] > 0], [k for k in own if advantages[k] <= 0]
        if good and bad:
            total = total + torch.log(1 + sum(torch.exp(scores[k] / tau) for k in bad))
            total = total + torch.log(1 + sum(torch.exp(-scores[k] / tau) for k in good))
    return total / len(set(groups))


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_slopes_are_the_gradient_of_the_loss(tau):
    draw = torch.Generator().manual_seed(0)
    groups, advantages = [3, 3, 3, 7, 7, 1, 1, 1], [1.0, -0.5, 0.0, 2.0, -2.0, 0.0, 0.0, 0.0]
    scores = torch.randn(8, generator=draw, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(scores, advantages, groups, tau), scores)
    found = contrast_slopes(scores.detach(), torch.tensor(advantages), torch.tensor(groups), tau=tau)
    torch.testing.assert_close(found, expected)
    assert found[5:].tolist() == [0, 0, 0], "a group of one class has no loss"


def test_on_policy_every_slope_is_known_by_counting():
    found = contrast_slopes(torch.zeros(4), torch.tensor([1.0, -1, -1, -1]), torch.zeros(4, dtype=torch.int64), tau=0.5)
    assert found.tolist() == pytest.approx([-2 / 2, 2 / 4, 2 / 4, 2 / 4])


def test_a_token_moves_with_its_trajectorys_slope():
    new = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64).requires_grad_()
    old = torch.tensor([[-1.5, math.nan, -2.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True]])
    loss, metrics = real_loss(new, old, torch.ones(1, 3), mask, torch.tensor([-0.5]))
    assert loss.tolist() == [[-0.25, 0.0, 0.5]]
    assert {name: value.item() for name, value in metrics.items()} == {"slope": 0.5, "ppo_kl": 0.25}
    assert not any(value.requires_grad for value in metrics.values())
    assert torch.autograd.grad(loss.sum(), new)[0].tolist() == [[-0.5, 0.0, -0.5]]
