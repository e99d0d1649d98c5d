"""The clipped policy loss, pinned by numbers and by a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.losses import ppo_clip_loss


def loss_of_ratios(ratios, advantages, mask=None, **clip):
    new = torch.tensor(ratios, dtype=torch.float64).log()[None]
    mask = torch.ones_like(new) if mask is None else torch.tensor([mask])
    loss, metrics = ppo_clip_loss(new, torch.zeros_like(new), torch.tensor([advantages]).double(), mask, **clip)
    return loss[0].tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("advantage", "expected", "clipfrac"),
    [(1.0, [-0.5, -0.9, -1, -1.28, -1.28], 0.4), (-1.0, [0.8, 0.9, 1, 1.3, 2], 0.2)],
)
def test_pinned_clip_higher(advantage, expected, clipfrac):
    loss, metrics = loss_of_ratios([0.5, 0.9, 1, 1.3, 2], [advantage] * 5, clip_low=0.2, clip_high=0.28)
    assert loss == pytest.approx(expected)
    assert metrics["clipfrac"] == pytest.approx(clipfrac)


def test_pinned_dual_clip():
    assert loss_of_ratios([4], [-1], clip_low=0.2, clip_high=0.2, clip_c=3.0)[0] == pytest.approx([3.0])
    assert loss_of_ratios([4], [-1], clip_low=0.2, clip_high=0.2)[0] == pytest.approx([4.0])
    loss, _ = loss_of_ratios([2, 2, 0.5], [2, -2, 2], clip_low=0.2, clip_high=0.2, clip_c=1.5)
    assert loss == pytest.approx([-2.4, 3.0, -1.0])


def test_pinned_metrics_of_the_dual_clip():
    loss, metrics = loss_of_ratios([1.5, 0.5, 1.5, 5], [1, 1, -1, -1], clip_low=0.2, clip_high=0.2, clip_c=3.0)
    assert loss == pytest.approx([-1.2, -0.5, 1.5, 3.0])
    assert sum(loss) / 4 == pytest.approx(0.7)
    assert metrics["clipfrac_lower"] == pytest.approx(0.25)
    assert metrics["ppo_kl"] == pytest.approx(-0.431805, abs=1e-6)


def test_pinned_clipfrac_of_the_upper_clip():
    _, metrics = loss_of_ratios([1.5, 0.5, 1.5, 0.9], [1, 1, -1, -1], clip_low=0.2, clip_high=0.2, clip_c=3.0)
    assert metrics["clipfrac"] == pytest.approx(0.25)


def slow_loss(ratio: float, a: float, low: float, high: float, c: float | None) -> float:
    value = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
    return min(value, -a * c) if c is not None and a < 0 else value


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(0.05, 6), st.floats(-2, 2), st.booleans()), min_size=1, max_size=8),
    low=st.floats(0, 0.9),
    high=st.floats(0, 3),
    c=st.one_of(st.none(), st.floats(1, 5)),
)
def test_equal_to_a_plain_loop_and_zero_where_masked(tokens, low, high, c):
    ratios, advantages, mask = (list(column) for column in zip(*tokens))
    got, metrics = loss_of_ratios(ratios, advantages, mask, clip_low=low, clip_high=high, clip_c=c)
    expected = [slow_loss(r, a, low, high, c) if m else 0.0 for r, a, m in tokens]
    assert got == pytest.approx(expected, abs=1e-5)
    kept = [math.log(r) for r, _, m in tokens if m]
    assert metrics["ppo_kl"] == pytest.approx(-sum(kept) / len(kept) if kept else 0.0, abs=1e-9)


def test_observation_positions_change_neither_loss_nor_metrics_nor_gradient():
    mask = torch.tensor([[True, False, True]])
    results = []
    for junk in (0.0, -3.2, math.nan, math.inf):
        new = torch.tensor([[-1.0, junk, -2.0]], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([[-1.5, 0.0, -1.9]], dtype=torch.float64)
        advantages = torch.tensor([[1.0, junk, -1.0]], dtype=torch.float64)
        loss, metrics = ppo_clip_loss(new, old, advantages, mask, clip_low=0.2, clip_high=0.2, clip_c=3.0)
        (grad,) = torch.autograd.grad(loss.sum(), new)
        results.append((loss.tolist(), grad[mask].tolist(), [m.item() for m in metrics.values()]))
        assert loss[0, 1] == 0 and grad[0, 1] == 0
    assert all(result == results[0] for result in results)


def test_on_policy_the_gradient_is_the_policy_gradient():
    log_probs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[0.7, -1.3]], dtype=torch.float64)
    clip = {"clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0}
    loss, metrics = ppo_clip_loss(log_probs, log_probs.detach(), advantages, torch.ones(1, 2), **clip)
    (grad,) = torch.autograd.grad(loss.sum(), log_probs)
    assert torch.allclose(grad, -advantages)
    assert [m.item() for m in metrics.values()] == [0.0, 0.0, 0.0]


def test_gradcheck_on_both_sides_of_every_bound():
    log_probs = torch.tensor([[0.5, 0.1, -0.5, 0.05, 1.5, -0.6]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)

    def total(x: torch.Tensor) -> torch.Tensor:
        old, mask = torch.zeros_like(x), torch.ones_like(x)
        return ppo_clip_loss(x, old, advantages, mask, clip_low=0.2, clip_high=0.28, clip_c=3.0)[0]

    assert torch.autograd.gradcheck(total, log_probs)


def test_a_huge_log_ratio_stays_finite():
    loss, _ = ppo_clip_loss(
        torch.tensor([[0.0]]), torch.tensor([[-1e4]]), torch.tensor([[-1.0]]), torch.ones(1, 1),
        clip_low=0.2, clip_high=0.2,
    )  # fmt: skip
    assert torch.isfinite(loss).all()


def test_without_a_dual_clip_none_is_counted_and_a_loss_at_its_bound_is_not():
    _, metrics = loss_of_ratios([4, 4], [-1, 1], clip_low=0.2, clip_high=0.2)
    assert metrics["clipfrac_lower"] == 0.0
    ratio = torch.tensor(3.0, dtype=torch.float64).log().exp().item()
    loss, metrics = loss_of_ratios([3, 3], [-1, 0], clip_low=0.2, clip_high=0.2, clip_c=ratio)
    assert loss == [ratio, 0.0] and metrics["clipfrac_lower"] == 0.0
