"""Every loss with every aggregation: value and gradient against loops over trajectories and their tokens."""

from __future__ import annotations

import math

import pytest
import torch
from aggregated import aggregate_loss

from verl_mt.algorithms import losses
from verl_mt.algorithms.aggregate import MODES
from verl_mt.extensions.rare_losses import covariance as cov
from verl_mt.extensions.rare_losses.single_tokens import gpg_loss, sapo_loss

LOW, HIGH, DUAL, COEF, LENGTH = 0.2, 0.28, 3.0, 0.1, 7.0
OWNERS = [4, 9, 4, 2]
"""The trajectory of each row: the first and the third are records of one."""
NAMES = ("ppo", "gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov")


def batch(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    new = -2 * torch.rand(4, 6, generator=generator, dtype=torch.float64)
    old = new + torch.randn(4, 6, generator=generator, dtype=torch.float64) * 0.7
    of_owner = {4: -1.3, 9: 0.8, 2: 1.7}
    advantages = torch.tensor([[of_owner[o]] * 6 for o in OWNERS], dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    chosen = (torch.rand(4, 6, generator=generator) < 0.3) & mask
    return new, old, advantages, mask, chosen


def token_losses(name: str, new, old, advantages, mask, chosen):
    arguments, clip = (new, old, advantages, mask), {"clip_low": LOW, "clip_high": HIGH}
    if name == "gspo":
        log_ratio_B = losses.sequence_log_ratio(new, old, mask, torch.tensor(OWNERS))
        return losses.gspo_loss(*arguments, **clip, log_ratio_B=log_ratio_B)[0]
    return {
        "ppo": lambda: losses.ppo_clip_loss(*arguments, **clip, clip_c=DUAL)[0],
        "cispo": lambda: losses.cispo_loss(*arguments, **clip)[0],
        "sapo": lambda: sapo_loss(*arguments)[0],
        "gpg": lambda: gpg_loss(*arguments)[0],
        "clip_cov": lambda: cov.clip_cov_loss(*arguments, chosen, **clip)[0],
        "kl_cov": lambda: cov.kl_cov_loss(*arguments, chosen, ppo_kl_coef=COEF)[0],
    }[name]()


def slow_token(name: str, new: float, old: float, a: float, picked: bool, geometric: float) -> tuple[float, float]:
    """(loss, its derivative by the log-prob) of one token."""
    r = math.exp(new - old)
    if name == "gpg":
        return -a * new, -a
    if name == "cispo":
        bounded = min(max(r, 1 - LOW), 1 + HIGH)
        return -bounded * a * new, -bounded * a
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * r
    if name == "kl_cov":
        penalty = COEF * abs(new - old) if picked else 0.0
        return -a * r + penalty, -a * r + (math.copysign(COEF, new - old) if picked else 0.0)
    if name == "clip_cov" and picked:
        return 0.0, 0.0
    if name == "gspo":
        r = geometric
    bounded = min(max(r, 1 - LOW), 1 + HIGH)
    loss, slope = (-a * r, -a * r) if -a * r >= -a * bounded else (-a * bounded, 0.0)
    if name == "ppo" and a < 0 and loss > -a * DUAL:
        return -a * DUAL, 0.0
    return loss, slope


def slow(name: str, mode: str, new, old, advantages, mask, chosen) -> tuple[float, list[list[float]]]:
    total, gradient = 0.0, [[0.0] * 6 for _ in OWNERS]
    inside = {o: [(b, t) for b, own in enumerate(OWNERS) if own == o for t in range(6) if mask[b, t]] for o in OWNERS}
    inside = {o: places for o, places in inside.items() if places}
    every = sum(map(len, inside.values()))
    for places in inside.values():
        geometric = math.exp(sum((new[p] - old[p]).item() for p in places) / len(places))
        share = {
            "token-mean": 1 / every,
            "seq-mean-token-mean": 1 / (len(inside) * len(places)),
            "seq-mean-token-sum": 1 / len(inside),
            "seq-mean-token-sum-norm": 1 / (len(inside) * LENGTH),
        }[mode]
        for b, t in places:
            numbers = new[b, t].item(), old[b, t].item(), advantages[b, t].item()
            loss, slope = slow_token(name, *numbers, bool(chosen[b, t]), geometric)
            total += share * loss
            gradient[b][t] = share * slope
    return total, gradient


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_the_loops(name, mode):
    for seed in range(3):
        new, old, advantages, mask, chosen = batch(seed)
        new.requires_grad_()
        losses_BT = token_losses(name, new, old, advantages, mask, chosen)
        index = torch.tensor(OWNERS)
        loss = aggregate_loss(losses_BT, mask, index, mode=mode, norm_constant=LENGTH)
        (gradient,) = torch.autograd.grad(loss, new)
        expected, slopes = slow(name, mode, new.detach(), old, advantages, mask, chosen)
        assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_without_a_token_in_the_mask_loss_and_gradient_are_zero(name, mode):
    new, old, advantages, mask, chosen = batch()
    new.requires_grad_()
    nothing = torch.zeros_like(mask)
    losses_BT = token_losses(name, new, old, advantages, nothing, chosen)
    loss = aggregate_loss(losses_BT, nothing, torch.tensor(OWNERS), mode=mode, norm_constant=LENGTH)
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.item() == 0.0 and not gradient.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("gspo", "cispo")])
def test_gradcheck_through_the_aggregation(name, mode):
    """GSPO's and CISPO's losses hold a factor still; their gradients are checked above and in test_policy_losses."""
    new, old, advantages, mask, chosen = batch(1)

    def whole(x):
        losses_BT = token_losses(name, x, old, advantages, mask, chosen)
        return aggregate_loss(losses_BT, mask, torch.tensor(OWNERS), mode=mode, norm_constant=LENGTH)

    assert torch.autograd.gradcheck(whole, new.requires_grad_(), atol=1e-6)
