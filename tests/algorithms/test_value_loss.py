"""The critic's loss: a pinned number, the formula with loops, gradients, and what explained variance means."""

from __future__ import annotations

import math
from statistics import variance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.value_loss import explained_variance, value_loss

NUMBERS = st.floats(-3, 3, width=32)


def test_the_pinned_value():
    losses, clipped = value_loss(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]), torch.zeros(2), cliprange=0.2)
    assert losses.mean().item() == pytest.approx(1.25)
    assert clipped.tolist() == [0, 0]


def test_the_clip_decides_where_it_makes_the_loss_larger():
    """The value has moved towards the return further than it may."""
    losses, clipped = value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), cliprange=0.2)
    assert losses.item() == pytest.approx(0.32) and clipped.tolist() == [1]


def test_a_value_within_the_range_is_not_clipped_however_large_it_is():
    """0.1 is no sum of floats here: the held value differs from the value by a rounding, and makes the loss larger."""
    values, old = torch.tensor([5.3, -5.3, 5.3]), torch.tensor([5.2, -5.2, 5.0])
    _, clipped = value_loss(values, old, torch.tensor([5.3, -5.3, 5.3]), cliprange=0.2)
    assert clipped.tolist() == [0, 0, 1]
    opposite = value_loss(torch.tensor([0.5]), torch.tensor([-0.5]), torch.tensor([0.5]), cliprange=0.2)
    assert opposite[1].tolist() == [1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=6), st.none() | st.floats(0, 2))
def test_equal_to_a_plain_loop(tokens, cliprange):
    values, old, returns = (torch.tensor([t[k] for t in tokens], dtype=torch.float64) for k in range(3))
    got = value_loss(values, old, returns, cliprange=cliprange)[0].tolist()
    expected = []
    for value, before, target in zip(values.tolist(), old.tolist(), returns.tolist()):
        held = value if cliprange is None else min(max(value, before - cliprange), before + cliprange)
        expected.append(0.5 * max((value - target) ** 2, (held - target) ** 2))
    assert got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("cliprange", [None, 0.2])
def test_gradients_are_those_of_finite_differences(cliprange):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    values.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, cliprange=cliprange)[0], (values,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=8))
def test_explained_variance_is_its_formula_and_never_nan(tokens):
    kept = [(v, r) for v, r, m in tokens if m]
    junk = torch.tensor([(v, r) if m else (math.nan, math.nan) for v, r, m in tokens], dtype=torch.float64)
    got = explained_variance(junk[:, 0], junk[:, 1], torch.tensor([m for *_, m in tokens])).item()
    returns = [r for _, r in kept]
    if len(set(returns)) < 2 or variance(returns) <= 1e-12 * sum(r * r for r in returns) / len(returns):
        assert got == 0
    else:
        assert got == pytest.approx(1 - variance(r - v for v, r in kept) / variance(returns), rel=1e-6, abs=1e-6)


def test_one_is_perfect_and_zero_a_constant():
    returns, mask = torch.tensor([0.0, 1.0, 1.0]), torch.ones(3)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((3,), 0.7), returns, mask).item() == pytest.approx(0, abs=1e-6)
    assert explained_variance(1 - returns, returns, mask) < 0


@pytest.mark.parametrize(("old", "value", "clipped"), [(0.0, -1.0, 1), (0.0, 1.0, 1), (0.0, 0.1, 0), (0.0, -0.1, 0)])
def test_a_value_is_held_on_both_sides(old, value, clipped):
    found = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([value]), cliprange=0.2)
    assert found[1].tolist() == [clipped] and found[0].item() == pytest.approx(0.5 * clipped * 0.8**2)


def test_a_value_at_the_end_of_the_range_is_not_held():
    """1.4 - 0.3 is no 1.1 in float32, and what is held differs from 1.4 by a rounding."""
    value, old = torch.tensor([1.4]), torch.tensor([0.3])
    assert value_loss(value, old, value, cliprange=(value - old).item())[1].tolist() == [0]
