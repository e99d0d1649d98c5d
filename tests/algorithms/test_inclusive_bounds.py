"""Bounds of weights and covariances are inclusive, and a mean of 0 divides nothing."""

from __future__ import annotations

import pytest
import torch

from verl_mt.algorithms.corrections import batch_normalise, inside
from verl_mt.extensions.rare_losses.covariance import choose_between

VALUES = torch.tensor([[0.25, 0.5, 1.0, 2.0, 4.0]])
"""Exact in binary, so a bound can be hit."""


@pytest.mark.parametrize("masked", [False, True])
def test_both_bounds_belong_to_the_range(masked: bool):
    mask = torch.ones_like(VALUES)
    mask[0, 2] = not masked
    expected = [False, True, not masked, True, False]
    assert inside(VALUES, mask, 0.5, 2.0).tolist() == [expected]
    chosen = choose_between(VALUES, mask, fraction=1.0, lower=0.5, upper=2.0, generator=torch.Generator())
    assert chosen.tolist() == [expected]


def test_weights_that_are_all_0_stay_0():
    weights = torch.zeros(1, 3)
    assert batch_normalise(weights, torch.ones(1, 3)).tolist() == [[0.0] * 3]
