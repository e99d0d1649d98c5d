"""GSPO, CISPO, SAPO, GPG, Clip-Cov and KL-Cov: pinned numbers, the formulas written out with loops, gradients."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from aggregated import aggregate_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms import losses
from verl_mt.algorithms.aggregate import MODES
from verl_mt.extensions.rare_losses import covariance as cov
from verl_mt.extensions.rare_losses.single_tokens import gpg_loss, sapo_loss


def tensors(*rows):
    return tuple(torch.tensor([row], dtype=torch.float64) for row in rows)


def numbers(metrics):
    return {name: value.item() for name, value in metrics.items()}


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
CHOSEN = torch.tensor([[True, False, False, True, False, False]])
LOSSES = {
    "ppo": partial(losses.ppo_clip_loss, **CLIP, clip_c=3.0),
    "gspo": partial(losses.gspo_loss, **CLIP),
    "cispo": partial(losses.cispo_loss, **CLIP),
    "sapo": sapo_loss,
    "gpg": gpg_loss,
    "clip_cov": lambda *args: cov.clip_cov_loss(*args, CHOSEN, **CLIP),
    "kl_cov": lambda *args: cov.kl_cov_loss(*args, CHOSEN, ppo_kl_coef=0.1),
}


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -0.935507), (-1.0, 0.9997)])
def test_pinned_gspo(advantage, expected):
    new, old, mask = tensors([-1, -2, -0.5, -3], [-1.2, -2, -0.1, -2.6], [1, 1, 0, 1])
    loss, metrics = losses.gspo_loss(new, old, advantage * torch.ones(1, 4), mask, clip_low=3e-4, clip_high=4e-4)
    assert loss[0].tolist() == pytest.approx([expected, expected, 0, expected], abs=1e-6)
    assert numbers(metrics) == pytest.approx({"clipfrac": float(advantage < 0), "ppo_kl": 0.2 / 3})


@pytest.mark.parametrize(
    ("ratios", "low", "high", "expected", "clipfrac"),
    [
        ([1, 1.14, 1.56, 0.4], 0.2, 0.28, [0.7, -0.684, 1.024, -1.68], 0.5),
        ([1, 3, 9, 0.4], 1.0, 4.0, [0.7, -1.8, 4.0, -0.84], 0.25),
    ],
)
def test_pinned_cispo(ratios, low, high, expected, clipfrac):
    new, advantages, mask = tensors([-0.7, -1.2, -0.4, -2.1], [1, -0.5, 2, -1], [1] * 4)
    new.requires_grad_()
    old = new.detach() - torch.tensor([ratios]).double().log()
    loss, metrics = losses.cispo_loss(new, old, advantages, mask, clip_low=low, clip_high=high)
    assert loss[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert metrics["clipfrac"].item() == pytest.approx(clipfrac)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    bounded = torch.tensor([ratios]).double().clamp(1 - low, 1 + high)
    assert torch.allclose(gradient, -bounded * advantages), "the gradient flows through the log-prob only"


@pytest.mark.parametrize(
    ("advantage", "expected"), [(1.0, [-1.510163, -2.0, -2.924234]), (-1.0, [1.415938, 1.904762, 2.822000])]
)
def test_pinned_sapo(advantage, expected):
    new = torch.tensor([[0.5, 1, 2]], dtype=torch.float64).log()
    loss, metrics = sapo_loss(new, torch.zeros_like(new), advantage * torch.ones(1, 3), torch.ones(1, 3))
    assert loss[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert 0.5 < metrics["gate_slope"].item() < 1


@pytest.mark.parametrize("tau", [0.3, 1.0, 4.0])
def test_at_ratio_one_the_soft_gate_has_the_gradient_of_the_policy_gradient(tau):
    new, advantages, mask = tensors([-1.0, -2.0], [0.7, -1.3], [1, 1])
    new.requires_grad_()
    loss, metrics = sapo_loss(new, new.detach(), advantages, mask, tau_pos=tau, tau_neg=tau)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert torch.allclose(gradient, -advantages)
    assert metrics["gate_slope"].item() == pytest.approx(1.0)


def slow(name, tokens, chosen):
    """One row of (new, old, advantage, in the mask), token by token."""
    inside = [math.exp(n - o) for n, o, _, m in tokens if m]
    geometric = math.exp(sum(map(math.log, inside)) / max(1, len(inside)))

    def clipped(a, r):
        return max(-a * r, -a * min(max(r, 0.8), 1.28))

    out = []
    for (new, old, a, m), picked in zip(tokens, chosen):
        r = math.exp(new - old)
        tau = 1.0 if a > 0 else 1.05
        value = {
            "ppo": min(clipped(a, r), -a * 3.0) if a < 0 else clipped(a, r),
            "gspo": clipped(a, geometric),
            "cispo": -min(max(r, 0.8), 1.28) * a * new,
            "sapo": -a * 4 / tau / (1 + math.exp(-tau * (r - 1))),
            "gpg": -a * new,
            "clip_cov": 0.0 if picked else clipped(a, r),
            "kl_cov": -a * r + (0.1 * abs(new - old) if picked else 0.0),
        }[name]
        out.append(value if m else 0.0)
    return out


TOKEN = st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2), st.booleans())


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=30, deadline=None)
@given(st.lists(TOKEN, min_size=6, max_size=6))
def test_equal_to_a_plain_loop_and_zero_where_masked(name, tokens):
    new, old, advantages, mask = tensors(*([float(t[k]) for t in tokens] for k in range(4)))
    loss, metrics = LOSSES[name](new, old, advantages, mask)
    assert loss[0].tolist() == pytest.approx(slow(name, tokens, CHOSEN[0].tolist()), abs=1e-8)
    kept = [o - n for n, o, _, m in tokens if m]
    assert metrics["ppo_kl"].item() == pytest.approx(sum(kept) / max(1, len(kept)), abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_observation_positions_change_neither_loss_nor_metrics_nor_gradient(name):
    mask = torch.tensor([[True, False, True, True, True, False]])
    results = []
    for junk in (0.0, -3.2, math.nan, math.inf):
        new = torch.tensor([[-1.0, junk, -2.0, -0.3, -1.0, junk]], dtype=torch.float64, requires_grad=True)
        (old,) = tensors([-1.5, 0.0, -1.9, -0.4, -2.0, 0.0])
        (advantages,) = tensors([1.0, junk, -1.0, 1.0, -1.0, junk])
        loss, metrics = LOSSES[name](new, old, advantages, mask)
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert loss[0, 1] == 0 and gradient[0, 1] == 0
        results.append((loss.tolist(), gradient.tolist(), numbers(metrics)))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_honours_every_aggregation_and_all_masked_is_zero(name, mode):
    new, old, advantages = tensors([-1, -2, -0.5, -1, -1, -2], [-1.1, -2, -1, -1.5, -1, -1.9], [1, 1, -1, 1, -1, 1])
    new.requires_grad_()
    for mask, expected in ((torch.tensor([[1, 1, 0, 1, 1, 0]]), None), (torch.zeros(1, 6), 0.0)):
        loss_BT, _ = LOSSES[name](new, old, advantages, mask)
        loss = aggregate_loss(loss_BT, mask, torch.zeros(1), mode=mode, norm_constant=7.0)
        divisor = {"token-mean": 4, "seq-mean-token-mean": 4, "seq-mean-token-sum": 1, "seq-mean-token-sum-norm": 7}
        wanted = loss_BT[mask.bool()].sum().item() / divisor[mode] if expected is None else expected
        assert loss.item() == pytest.approx(wanted, rel=1e-5)
        (gradient,) = torch.autograd.grad(loss, new)
        assert torch.isfinite(gradient).all() and (expected is None) == bool(gradient.any())


def test_on_policy_all_of_them_have_the_gradient_of_the_policy_gradient():
    new, mask = tensors([-1.0, -2.0, -0.3, -1.0, -2.0, -0.4], [1] * 6)
    advantages = torch.full_like(new, 0.7)
    for name in LOSSES:
        at = new.clone().requires_grad_()
        loss, _ = LOSSES[name](at, new, advantages, mask)
        (gradient,) = torch.autograd.grad(loss.sum(), at)
        kept = ~CHOSEN if name == "clip_cov" else torch.ones_like(CHOSEN)
        assert torch.allclose(gradient, -advantages * kept), name


def test_off_policy_their_gradients_differ_pairwise():
    new, old, mask = tensors([-1, -2, -0.3, -1, -2, -0.4], [-1.4, -1.1, -0.5, -1, -2.2, -0.3], [1] * 6)
    advantages = torch.full_like(new, 0.7)
    found = {}
    for name in LOSSES:
        at = new.clone().requires_grad_()
        (found[name],) = torch.autograd.grad(LOSSES[name](at, old, advantages, mask)[0].sum(), at)
    for one, other in itertools.combinations(found, 2):
        assert not torch.allclose(found[one], found[other], rtol=1e-3), (one, other)


@pytest.mark.parametrize("name", ["ppo", "sapo", "gpg", "clip_cov", "kl_cov"])
def test_gradcheck(name):
    new, old, advantages, mask = tensors(
        [-1, -2, -0.3, -1, -2, -0.4], [-1.4, -1.1, -0.5, -1.05, -2.2, -0.3], [1, 1, -1, 1, -1, -1], [1, 1, 1, 1, 0, 1]
    )
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, old, advantages, mask)[0], new.requires_grad_())


def test_gradcheck_of_the_ratio_that_cispo_holds_still():
    new, old, advantages, mask = tensors([-1, -2, -0.3], [-1.4, -1.1, -0.5], [1, 1, -1], [1, 0, 1])
    held = (new - old).exp().clamp(0.8, 1.28)

    def fixed(x):
        return -held * advantages * x * mask

    assert torch.autograd.gradcheck(fixed, new.clone().requires_grad_())
    one, other = new.clone().requires_grad_(), new.clone().requires_grad_()
    losses.cispo_loss(one, old, advantages, mask, **CLIP)[0].sum().backward()
    fixed(other).sum().backward()
    assert torch.allclose(one.grad, other.grad)


def sequence_gspo(new, old, advantages_B, mask, trajectory, clip):
    """GSPO as the paper has it: one ratio per sequence, differentiated as a whole; each trajectory counts once."""
    total = torch.zeros((), dtype=torch.float64)
    for owner in sorted(set(trajectory)):
        mine = [(b, t) for b, o in enumerate(trajectory) if o == owner for t in range(mask.shape[1]) if mask[b, t]]
        ratio = (sum(new[b, t] - old[b, t] for b, t in mine) / len(mine)).exp()
        a = advantages_B[trajectory.index(owner)]
        total = total + torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip))
    return total / len(set(trajectory))


@pytest.mark.parametrize("clip", [0.001, 0.3])
def test_gspo_has_the_gradient_of_its_sequence_form_over_all_records_of_a_trajectory(clip):
    generator = torch.Generator().manual_seed(0)
    new = -torch.rand(4, 5, generator=generator, dtype=torch.float64)
    old = -torch.rand(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    trajectory = [3, 8, 3, 1]
    advantages_B = torch.tensor([1.0, -1.0, 1.0, 0.5]).double()
    assert torch.autograd.gradcheck(
        lambda x: sequence_gspo(x, old, advantages_B, mask, trajectory, clip), new.clone().requires_grad_()
    )
    index = torch.tensor(trajectory)
    whole, token = new.clone().requires_grad_(), new.clone().requires_grad_()
    expected = sequence_gspo(whole, old, advantages_B, mask, trajectory, clip)
    log_ratio_B = losses.sequence_log_ratio(token, old, mask, index)
    loss_BT, _ = losses.gspo_loss(
        token, old, advantages_B[:, None].expand(4, 5), mask, clip_low=clip, clip_high=clip, log_ratio_B=log_ratio_B
    )
    got = aggregate_loss(loss_BT, mask, index, mode="seq-mean-token-mean")
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    (one,), (other,) = torch.autograd.grad(expected, whole), torch.autograd.grad(got, token)
    assert torch.allclose(one, other, rtol=1e-5, atol=1e-9)
    assert one.abs().sum() > 0 or clip < 0.01
    per_record = losses.gspo_loss(new, old, advantages_B[:, None].expand(4, 5), mask, clip_low=clip, clip_high=clip)[0]
    assert not torch.allclose(per_record, loss_BT), "a record's own mean is another ratio"


def test_the_ratio_of_rows_that_are_trajectories_is_their_own():
    new, old, mask = tensors([-1, -2, -0.5, -3], [-1.2, -2, -0.1, -2.6], [1, 1, 0, 1])
    got = losses.sequence_log_ratio(new, old, mask, torch.tensor([4]))
    assert got.tolist() == pytest.approx([-0.2 / 3])
    assert losses.sequence_log_ratio(new, old, torch.zeros_like(mask), torch.tensor([4])).tolist() == [0.0]


def slow_covariances(tokens):
    kept = [(n, a) for n, a, m in tokens if m]
    if not kept:
        return [0.0] * len(tokens)
    mean_n, mean_a = (sum(column) / len(kept) for column in zip(*kept))
    return [(n - mean_n) * (a - mean_a) if m else 0.0 for n, a, m in tokens]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-2, 2), st.booleans()), min_size=1, max_size=9), st.floats(0, 1))
def test_covariances_and_the_choice_of_tokens(tokens, fraction):
    log_probs, advantages, mask = tensors(*([float(t[k]) for t in tokens] for k in range(3)))
    values = cov.covariances(log_probs, advantages, mask)
    assert values[0].tolist() == pytest.approx(slow_covariances(tokens), abs=1e-9)
    num = max(1, int(fraction * int(mask.sum())))
    largest = cov.choose_largest(values, mask, fraction=fraction)
    assert largest.sum() == min(num, int(mask.sum())) and not largest[mask == 0].any()
    rest = mask.bool() & ~largest
    if rest.any() and largest.any():
        assert values[largest].min() >= values[rest].max()
    drawn = cov.choose_between(values, mask, fraction=fraction, lower=-0.5, upper=0.5)
    candidates = mask.bool() & (values.abs() <= 0.5)
    assert not (drawn & ~candidates).any() and drawn.sum() == min(num, int(candidates.sum()))


def test_the_draw_of_tokens_depends_on_its_generator_only():
    values, mask = torch.linspace(0, 9, 64).reshape(4, 16), torch.ones(4, 16)
    draws = [
        cov.choose_between(
            values, mask, fraction=0.1, lower=1.0, upper=5.0, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("loss", "clip", "expected"),
    [(losses.gspo_loss, {"clip_low": 0.03, "clip_high": 0.04}, 0.4823450), (sapo_loss, {}, 0.9090832)],
)
def test_pinned_losses_of_sequences_as_other_libraries_make_one_number_of_them(loss, clip, expected):
    """What verl 0.6.1's `compute_policy_loss_gspo` and TRL 1.16's loss `sapo` give for these numbers."""
    old = torch.tensor([[-1.0, -2.0, -0.5, -0.2], [-1.5, -0.3, -0.7, -1.0]], dtype=torch.float64)
    new = torch.tensor([[-1.3, -1.6, -0.5, -0.4], [-1.2, -0.3, -1.1, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]], dtype=torch.bool)
    loss_BT, _ = loss(new, old, torch.tensor([[1.0], [-2.0]]).double().expand(2, 4), mask, **clip)
    got = aggregate_loss(loss_BT, mask, torch.arange(2), mode="seq-mean-token-mean")
    assert got.item() == pytest.approx(expected, abs=1e-6)


AT_LOW = -0.5
"""A log ratio; `CLIP_LOW` is where PPO clips it."""
CLIP_LOW = 1 - torch.tensor(AT_LOW, dtype=torch.float64).exp().item()
AT_HIGH = math.log1p(0.28)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "clipped"),
    [
        (0.5, AT_HIGH + 0.01, True), (0.5, AT_HIGH, False), (0.5, 0.0, False), (0.5, -9.0, False),
        (-0.5, AT_LOW - 0.01, True), (-0.5, AT_LOW, False), (-0.5, 0.0, False), (-0.5, 9.0, False),
        (0.0, 9.0, False), (0.0, -9.0, False),
    ],
)  # fmt: skip
def test_only_tokens_that_ppo_clips_are_no_candidates(advantage, log_ratio, clipped):
    """A ratio at a bound is not clipped."""
    new, values, advantages = tensors([log_ratio], [3.0], [advantage])
    found = cov.without_clipped(values, new, 0 * new, advantages, clip_low=CLIP_LOW, clip_high=0.28)
    assert found.tolist() == [[-math.inf if clipped else 3.0]]


def test_candidates_depend_on_the_ratio_to_the_old_policy():
    new, old, values, advantages = tensors([-2, -1], [-2, -2], [3, 3], [-1, 1])
    found = cov.without_clipped(values, new, old, advantages, clip_low=0.2, clip_high=0.28)
    assert found.tolist() == [[3.0, -math.inf]]


def test_metrics_carry_no_gradient():
    new, old, advantages, mask = tensors(
        [-1, -2, -0.3, -1, -2, -0.4], [-1.4, -1.1, -0.5, -1.05, -2.2, -0.3], [1, 1, -1, 1, -1, -1], [1, 1, 1, 1, 0, 1]
    )
    new.requires_grad_()
    for name, loss in LOSSES.items():
        values, metrics = loss(new, old, advantages, mask)
        assert values.requires_grad and not any(m.requires_grad for m in metrics.values()), name
    assert not losses.sequence_log_ratio(new, old, mask, torch.tensor([0])).requires_grad
    assert not cov.covariances(new, advantages, mask).requires_grad


@pytest.mark.parametrize("log_ratio", [-30.0, 30.0])
def test_ratios_of_all_losses_are_bounded(log_ratio):
    new, advantages, old, mask = tensors([log_ratio - 40] * 6, [-1] * 6, [-40] * 6, [1] * 6)
    ratio = math.exp(math.copysign(20, log_ratio))
    expected = {
        "gspo": max(ratio, 0.8), "cispo": -1 * (log_ratio - 40) * -min(max(ratio, 0.8), 1.28), "kl_cov": ratio,
        "ppo": min(max(ratio, 0.8), 3.0), "sapo": 4 / 1.05 / (1 + math.exp(-1.05 * (ratio - 1))),
    }  # fmt: skip
    for name, value in expected.items():
        found = LOSSES[name](new, old, advantages, mask)[0][0, 1].item()
        assert found == pytest.approx(value), name


def test_pinned_gate_slope():
    new, old, advantages, mask = tensors([math.log(2), 0, 0], [0, 0, 0], [1, -1, 1], [1, 1, 0])
    gate = 1 / (1 + math.exp(-1))
    _, metrics = sapo_loss(new, old, advantages, mask, tau_pos=1.0, tau_neg=3.0)
    assert metrics["gate_slope"].item() == pytest.approx((4 * gate * (1 - gate) + 1.0) / 2)


def test_pinned_chosen_frac_and_penalty():
    new, old, advantages, mask = tensors([0, -1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0])
    chosen = torch.tensor([[True, True, False, True]])
    loss, metrics = cov.kl_cov_loss(new, old, advantages, mask, chosen, ppo_kl_coef=0.5)
    assert loss[0].tolist() == pytest.approx([-1.0, -math.exp(-1) + 0.5, -1.0, 0.0])
    assert numbers(metrics) == pytest.approx({"ppo_kl": 1 / 3, "chosen_frac": 2 / 3})
    loss, metrics = cov.clip_cov_loss(new, old, advantages, mask, chosen, **CLIP)
    assert loss[0].tolist() == [0.0, 0.0, -1.0, 0.0] and metrics["chosen_frac"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 1), (0.24, 1), (0.5, 2), (0.74, 2), (0.75, 3), (1.0, 4)])
def test_a_fraction_of_the_tokens_rounds_down_to_one_at_least(fraction, count):
    (values,) = tensors([1.0, 2.0, 3.0, 4.0, 9.0])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    largest = cov.choose_largest(values, mask, fraction=fraction)
    assert largest.tolist() == [[place >= 4 - count and place < 4 for place in range(5)]]
    drawn = cov.choose_between(values, mask, fraction=fraction, lower=0.0, upper=9.0)
    assert drawn.sum() == count and not drawn[0, 4]


def test_a_token_without_advantage_fades_as_one_of_negative_advantage():
    new, old, advantages, mask = tensors([math.log(2)], [0], [0], [1])
    _, metrics = sapo_loss(new, old, advantages, mask, tau_pos=1.0, tau_neg=3.0)
    gate = 1 / (1 + math.exp(-3))
    assert metrics["gate_slope"].item() == pytest.approx(4 * gate * (1 - gate))
