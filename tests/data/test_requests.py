"""Sampling parameters: each bound by itself."""

from __future__ import annotations

import pytest

from verl_mt.data.requests import SamplingParams


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_new_tokens", [1, 7], [0, -1]),
        ("temperature", [0.0, 0.5, 2.0], [-0.1]),
        ("top_p", [0.1, 1.0], [0.0, -0.5, 1.1]),
        ("min_p", [0.0, 0.5], [-0.1, 1.0, 1.5]),
        ("top_k", [-1, 1, 40], [0, -2]),
    ],
)
def test_each_bound_alone_decides(name: str, good: list, bad: list):
    for value in good:
        assert getattr(SamplingParams(**{"max_new_tokens": 4, name: value}), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{"max_new_tokens": 4, name: value})


def test_greedy_is_the_same_turn_without_chance():
    sampling = SamplingParams(
        4, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, stop=("a",), stop_token_ids=(1,)
    )
    assert sampling.greedy() == SamplingParams(4, temperature=0.0, seed=3, stop=("a",), stop_token_ids=(1,))
