"""DAPO's penalty and filter."""

from __future__ import annotations

import pytest
import torch

from verl_mt.algorithms.advantages import has_signal, soft_overlong_penalty


def test_the_overlong_penalty_grows_over_its_buffer_and_ends_at_minus_one():
    lengths = torch.tensor([60, 80, 85, 90, 100, 120])
    got = soft_overlong_penalty(lengths, max_length=100, buffer=20)
    assert got.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    turns = torch.tensor([len([0, 1, 2]) + len([3, 4, 5, 6])])  # the sum over turns
    assert soft_overlong_penalty(turns, max_length=8, buffer=2).tolist() == [-0.5]


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_that_cannot_be_is_refused(buffer):
    with pytest.raises(ValueError, match="between 1 and max_length"):
        soft_overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)


def test_groups_without_a_difference_have_no_signal():
    rewards = torch.tensor([1.0, 0, 1, 1, 1, 0.1, 0.1, 0.1])
    groups = torch.tensor([9, 9, 4, 4, 7, 2, 2, 2])
    assert has_signal(rewards, groups).tolist() == [True, True, *[False] * 6]
    assert has_signal(rewards[:0], groups[:0]).tolist() == []
