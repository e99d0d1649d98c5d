"""The weight of the KL penalty in the reward."""

from __future__ import annotations

import pytest

from verl_mt.algorithms.kl import KLControl


@pytest.mark.parametrize(("kl", "expected"), [(12.0, 0.1002), (3.0, 0.0998), (6.0, 0.1), (6.6, 0.1001)])
def test_the_weight_follows_the_kl_in_small_steps(kl, expected):
    control = KLControl(0.1, target_kl=6.0, horizon=10000)
    control.update(kl, 100)
    assert control.coef == pytest.approx(expected, abs=1e-9)


def test_a_constant_one_stays():
    control = KLControl(0.1)
    control.update(100.0, 1000)
    control.load_state_dict({"coef": 5.0})
    assert control.coef == 0.1 and control.state_dict() == {}


def test_it_goes_on_where_it_was():
    control = KLControl(0.1, target_kl=0.5, horizon=100)
    control.update(3.0, 64)
    other = KLControl(0.1, target_kl=0.5, horizon=100)
    other.load_state_dict(control.state_dict())
    for each in (control, other):
        each.update(0.1, 64)
    assert other.coef == control.coef != 0.1
