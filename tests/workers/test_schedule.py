"""The learning rate is a pure function of the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.workers.optimizer import lr_factor


def factors(kind: str, warmup: int, total: int, min_ratio: float = 0.0) -> list[float]:
    return [
        lr_factor(step, warmup_steps=warmup, total_steps=total, kind=kind, min_ratio=min_ratio)
        for step in range(total + 1)
    ]


def test_linear_warms_up_without_a_wasted_step_and_decays_to_its_end():
    assert factors("linear", 2, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_and_its_minimum():
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * x / 4)) / 2 for x in range(5)]
    assert factors("cosine", 0, 4, 0.1) == pytest.approx(expected)


def test_constant_stays():
    assert factors("constant", 3, 5, 0.5) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 9),
    total=st.integers(0, 30),
    min_ratio=st.floats(0, 1),
    step=st.integers(0, 99),
)
def test_always_between_nothing_and_the_peak_also_after_the_end(kind, warmup, total, min_ratio, step):
    assert 0.0 <= lr_factor(step, warmup_steps=warmup, total_steps=total, kind=kind, min_ratio=min_ratio) <= 1.0
