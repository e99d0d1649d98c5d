"""FIPO: weights from how later tokens moved."""

from __future__ import annotations

import math

import pytest
import torch

from verl_mt.algorithms.losses import ppo_clip_loss
from verl_mt.extensions.rare_losses.future_kl import discounted_future, fipo_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 10.0}


def batch(seed: int = 0, size: int = 9):
    draw = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(3, size, generator=draw, dtype=torch.float64)
    new = old + torch.randn(3, size, generator=draw, dtype=torch.float64)
    advantages = torch.tensor([1.3, -0.7, 0.4], dtype=torch.float64).unsqueeze(1).expand(3, size)
    mask = torch.rand(3, size, generator=draw) < 0.7
    return new.requires_grad_(), old, advantages, mask


def slow_weight(ratios: list[float], at: int, a: float, *, half: float, low: float, high: float, safe: float) -> float:
    """Of token `at` among those of the mask, whose log ratios are given."""
    gamma = 2 ** (-1 / half)
    counted = [0.0 if math.exp(r) > CLIP["clip_c"] else r for r in ratios]
    future = sum(gamma ** (k - at) * counted[k] for k in range(at, len(ratios)))
    weight = min(max(math.exp(future), low), high)
    return min(max(weight, 0.8), 1.0) if safe and a < 0 and math.exp(ratios[at]) > safe else weight


@pytest.mark.parametrize(
    "options",
    [
        {"half": 32.0, "low": 1.0, "high": 1.2, "safe": 4.0},
        {"half": 2.0, "low": 0.5, "high": 1.5, "safe": 2.0},
        {"half": 1.0, "low": 0.0, "high": 1e9, "safe": 0.0},
    ],
)
@pytest.mark.parametrize("size", [1, 2, 9, 16])
def test_each_token_of_ppos_loss_is_weighted_by_the_discounted_sum_over_later_tokens(options, size):
    new, old, advantages, mask = batch(size, size)
    names = {
        "half": "fipo_half_life",
        "low": "fipo_weight_low",
        "high": "fipo_weight_high",
        "safe": "fipo_safety_ratio",
    }
    given = {names[key]: value for key, value in options.items()}
    loss, metrics = fipo_loss(new, old, advantages, mask, **CLIP, **given)
    plain, _ = ppo_clip_loss(new, old, advantages, mask, **CLIP)
    expected = torch.zeros_like(old)
    for b in range(3):
        places = mask[b].nonzero().flatten().tolist()
        ratios = (new - old)[b, places].tolist()
        for at, place in enumerate(places):
            expected[b, place] = slow_weight(ratios, at, advantages[b, 0].item(), **options)
    torch.testing.assert_close(loss, plain * expected)
    gradient, of_plain = (torch.autograd.grad(x.sum(), new, retain_graph=True)[0] for x in (loss, plain))
    torch.testing.assert_close(gradient, of_plain * expected)  # the weights are held still
    assert metrics["fipo_weight"].item() == pytest.approx((expected.sum() / mask.sum().clamp(min=1)).item())


def test_on_policy_it_is_ppos_loss():
    new, _, advantages, mask = batch()
    loss, _ = fipo_loss(new, new.detach(), advantages, mask, **CLIP)
    torch.testing.assert_close(loss, ppo_clip_loss(new, new.detach(), advantages, mask, **CLIP)[0])


def test_what_stands_outside_of_the_mask_changes_no_weight():
    new, old, advantages, mask = batch()
    spoiled = torch.where(mask, old, torch.full_like(old, math.nan))
    torch.testing.assert_close(
        fipo_loss(new, spoiled, advantages, mask, **CLIP)[0], fipo_loss(new, old, advantages, mask, **CLIP)[0]
    )
    wider = torch.zeros(1, 6, dtype=torch.float64)
    wider[0, [0, 5]] = torch.tensor([1.0, 2.0], dtype=torch.float64)
    places = torch.tensor([[True, False, False, False, False, True]])
    assert discounted_future(wider, places, gamma=0.5)[0, [0, 5]].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("log_ratio", "safe", "weight"),
    [
        (25.0, 0.0, math.exp(20)),
        (-25.0, 0.0, math.exp(-20)),
        (25.0, 4.8e8, 1.0),  # e^20 is 4.85e8
        (25.0, 4.9e8, math.exp(20)),
        (-25.0, 2e-9, 0.8),  # e^-20 is 2.06e-9
        (-25.0, 2.1e-9, math.exp(-20)),
    ],
)
def test_ratios_and_weights_are_bounded(log_ratio, safe, weight):
    new, old = torch.tensor([[log_ratio]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    limits = {"fipo_weight_low": 0.0, "fipo_weight_high": 1e12, "fipo_safety_ratio": safe}
    _, metrics = fipo_loss(new, old, -torch.ones(1, 1), torch.ones(1, 1), clip_low=0.2, clip_high=0.2, **limits)
    assert metrics["fipo_weight"].item() == pytest.approx(weight)


@pytest.mark.parametrize(("advantage", "weight"), [(-1.0, 1.0), (0.0, 1.1), (1.0, 1.1)])
def test_only_tokens_of_negative_advantage_are_held(advantage, weight):
    """Their ratio is 5."""
    new, old = torch.tensor([[math.log(5.0)]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    _, metrics = fipo_loss(new, old, torch.full((1, 1), advantage), torch.ones(1, 1), **CLIP, fipo_weight_high=1.1)
    assert metrics["fipo_weight"].item() == pytest.approx(weight)


def test_a_ratio_at_a_limit_is_not_above_it():
    """2 and 4 are exact."""
    new = torch.tensor([[math.log(2.0), math.log(4.0)]], dtype=torch.float64)
    limits = {"fipo_half_life": 1.0, "fipo_weight_low": 0.0, "fipo_weight_high": 1e9}
    ones, minus = torch.ones(1, 2), -torch.ones(1, 2)
    loss, _ = fipo_loss(
        new, 0 * new, minus, ones, clip_low=0.2, clip_high=0.2, clip_c=4.0, fipo_safety_ratio=4.0, **limits
    )
    assert loss[0].tolist() == pytest.approx([2 * 4, 4 * 4]), "weights 2 x 4^(1/2) and 4, losses 2 and 4"
