"""Masked means, sums and whitening: a masked-out position never matters, whatever it holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.masked import at_least_quantile, masked_mean, masked_sum, masked_var, masked_whiten


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=12))
def test_sums_and_means_equal_a_plain_loop_over_the_kept_values(pairs):
    values = torch.tensor([v for v, _ in pairs], dtype=torch.float64)
    mask = torch.tensor([m for _, m in pairs])
    kept = [v for v, m in pairs if m]
    assert masked_sum(values, mask).item() == pytest.approx(sum(kept))
    assert masked_mean(values, mask).item() == pytest.approx(sum(kept) / len(kept) if kept else 0.0)
    mean = sum(kept) / len(kept) if kept else 0.0
    var = sum((v - mean) ** 2 for v in kept) / (len(kept) - 1) if len(kept) > 1 else 0.0
    assert masked_var(values, mask).item() == pytest.approx(var, abs=1e-12)


@pytest.mark.parametrize("junk", [98.0, math.nan, math.inf, -math.inf])
def test_a_masked_out_value_never_matters_even_if_it_is_not_a_number(junk):
    values, mask = torch.tensor([1.0, 2.0, 3.0, junk]), torch.tensor([1, 1, 1, 0])
    assert masked_mean(values, mask).item() == 2.0
    assert masked_var(values, mask).item() == 1.0
    assert torch.allclose(masked_whiten(values, mask), torch.tensor([-1.0, 0.0, 1.0, 0.0]), atol=1e-6)


def test_whitening_may_keep_the_mean():
    whitened = masked_whiten(torch.tensor([2.0, 4.0, 6.0]), torch.ones(3), shift_mean=False)
    assert torch.allclose(whitened, torch.tensor([3.0, 4.0, 5.0]), atol=1e-6)


def test_an_empty_mask_gives_zero():
    values, mask = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    assert masked_mean(values, mask).item() == 0.0
    assert masked_whiten(values, mask).tolist() == [[0.0, 0.0]]


def test_a_mean_per_row_with_an_empty_row():
    values = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    assert masked_mean(values, torch.tensor([[1, 1], [0, 0]]), dim=1).tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("values", "share", "kept"),
    [
        ([1, 2, 3, 4], 0.5, [0, 0, 1, 1]),  # the quantile is 2.5
        ([1, 2, 3, 4], 1 / 6, [0, 1, 1, 1]),  # 1.5
        ([50, 20, 10, 40, 30], 0.25, [1, 1, 0, 1, 1]),  # 20 itself
        ([3, 1, 2], 0.0, [1, 1, 1]),
        ([3, 1, 2], 1.0, [1, 0, 0]),
        ([7], 0.5, [1]),
    ],
)
def test_a_quantile_lies_between_two_values_of_the_mask(values, share, kept):
    wider = torch.tensor([[99.0, *values, -99.0]])
    mask = torch.tensor([[0, *[1] * len(values), 0]])
    assert at_least_quantile(wider, mask, share).int().tolist() == [[0, *kept, 0]]


def test_without_values_none_reaches_a_quantile():
    assert at_least_quantile(torch.ones(1, 2), torch.zeros(1, 2), 0.0).tolist() == [[False, False]]
