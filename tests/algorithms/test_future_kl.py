"""FIPO: weights from how later tokens moved."""

from __future__ import annotations

import math

import pytest
import torch

from verl_mt.algorithms.future_kl import discounted_future, fipo_loss
from verl_mt.algorithms.losses import ppo_clip_loss

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
