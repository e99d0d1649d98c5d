"""KL estimators, pinned by numbers and by their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.kl import KLControl, by_name, kl_penalty


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("kl", [0.5, -1.0, 0.0]),
        ("abs", [0.5, 1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0]),
        ("mse", [0.125, 0.5, 0.0]),
        ("k3", [0.1065307, 0.7182817, 0.0]),
        ("low_var_kl", [0.1065307, 0.7182817, 0.0]),
        ("k3+", [0.1065307, 0.7182817, 0.0]),
    ],
)
def test_pinned_values(kind, expected):
    value = kl_penalty(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5]), kind)
    assert value.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [0.5, -0.2]), ("k2", [0.125, 0.02]), ("k3", [0.106531, 0.021403])],
)
def test_pinned_values_of_a_log_ratio(kind, expected):
    log_ratio = torch.tensor([0.5, -0.2])
    assert kl_penalty(log_ratio, torch.zeros(2), kind).tolist() == pytest.approx(expected, abs=1e-6)


def test_low_var_kl_is_clamped_and_k3_is_not():
    log_probs, ref = torch.tensor([-30.0]), torch.tensor([-0.1])
    assert kl_penalty(log_probs, ref, "low_var_kl").item() == 10.0
    assert kl_penalty(log_probs, ref, "k3").item() == pytest.approx(math.exp(20) - 21)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-5, 0), min_size=2, max_size=2), st.sampled_from(["k1+", "k3+", "low_var_kl+"]))
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(pair, kind):
    log_probs = torch.tensor([pair[0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([pair[1]], dtype=torch.float64)
    value = kl_penalty(log_probs, ref, kind)
    assert value.item() == pytest.approx(kl_penalty(log_probs, ref, kind[:-1]).item())
    (grad,) = torch.autograd.grad(value.sum(), log_probs)
    assert grad.item() == pytest.approx(pair[0] - pair[1])


def test_the_unbiased_estimators_average_to_the_kl_over_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    policy, ref = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (policy.exp() * (policy - ref)).sum()
    for kind in ("k1", "k3"):
        assert (policy.exp() * kl_penalty(policy, ref, kind)).sum().item() == pytest.approx(exact.item())


@pytest.mark.parametrize("kind", [k for k in by_name if k != "abs"])
def test_gradcheck(kind):
    log_probs = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -0.9], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, kind), log_probs)


def test_an_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown KL estimator 'k4'. Known: kl, k1"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_every_choice_of_the_config_is_an_estimator_and_a_plus_has_the_gradient_of_k2():
    from dataclasses import fields

    from verl_mt.config.actor import ActorConfig

    choices = next(f for f in fields(ActorConfig) if f.name == "kl_loss_type").metadata["choices"]
    ref = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    for kind in choices:
        log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
        value = kl_penalty(log_probs, ref, kind)
        assert torch.allclose(value, kl_penalty(log_probs, ref, kind.removesuffix("+")))
        if kind.endswith("+"):
            (gradient,) = torch.autograd.grad(value.sum(), log_probs)
            assert torch.allclose(gradient, (log_probs - ref).detach())


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
