"""Weights against a sampler that drifts from the trainer: pinned numbers and the formulas written out with loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.algorithms import corrections as c

TRAIN = torch.tensor([[-1.0, -1.0, -1.0, 0.0, -2.0]])
ROLLOUT = torch.tensor([[-1.0, -2.0, -0.5, 0.0, -1.0]])
MASK = torch.tensor([[1, 1, 1, 0, 1]])
RAW = [1.0, math.e, math.exp(-0.5), 0.0, math.exp(-1.0)]


def close(found: torch.Tensor, expected: list[float]) -> None:
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.cap("C65")
def test_token_weights_and_their_truncation():
    raw = c.importance_weights(TRAIN, ROLLOUT, MASK)
    close(raw, RAW)
    close(c.truncate(raw, 2.0), [1.0, 2.0, 0.606531, 0.0, 0.367879])


def test_a_sequence_has_its_product_or_its_geometric_mean():
    close(c.importance_weights(TRAIN, ROLLOUT, MASK, level="sequence"), [0.606531, 0.606531, 0.606531, 0, 0.606531])
    close(c.importance_weights(TRAIN, ROLLOUT, MASK, level="geometric"), [0.882497, 0.882497, 0.882497, 0, 0.882497])


def test_normalised_weights_have_mean_one():
    weights = c.truncate(c.importance_weights(TRAIN, ROLLOUT, MASK), 2.0)
    close(c.batch_normalise(weights, MASK), [1.006439, 2.012877, 0.610436, 0.0, 0.370248])
    assert c.batch_normalise(weights, torch.zeros_like(MASK)).tolist() == [[0.0] * 5]


def test_tokens_outside_of_the_bounds_are_masked():
    raw = c.importance_weights(TRAIN, ROLLOUT, MASK)
    assert c.inside(raw, MASK, 0.5, 2.0).int().tolist() == [[1, 0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("over", "estimator", "bounds", "kept"),
    [
        ("token", "k1", (0.5, 2.0), [[0, 1, 0], [1, 1, 0]]),
        ("seq_mean", "k3", (0.0, 0.1), [[0, 0, 0], [1, 1, 0]]),
        ("seq_sum", "k1", (0.9, 1.1), [[1, 1, 1], [0, 0, 0]]),
        ("seq_mean", "k1", (0.95, 1.2), [[1, 1, 1], [1, 1, 0]]),
        ("seq_max", "k2", (0.0, 0.4), [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_pinned_rejections(over, estimator, bounds, kept):
    train, mask = torch.tensor([[1.0, 0.0, -1.0], [0.1, 0.1, 9.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    values = c.divergences(train, torch.zeros(2, 3), mask, over=over, estimator=estimator)
    got = c.within(values, mask, estimator=estimator, lower=bounds[0], upper=bounds[1])
    assert got.int().tolist() == kept


def test_icepop_keeps_the_ratio_inside_and_drops_what_is_outside():
    raw = c.importance_weights(TRAIN, ROLLOUT, MASK)
    close(c.truncate(raw, 2.0) * c.inside(raw, MASK, 0.5, 2.0), [1.0, 0.0, 0.606531, 0.0, 0.0])


def test_weights_between_two_bounds():
    raw = c.importance_weights(TRAIN, ROLLOUT, MASK)
    close(c.truncate(raw, 2.0, 0.5) * MASK, [1.0, 2.0, 0.606531, 0.0, 0.5])


def test_one_hopeless_token_vetoes_its_sequence():
    assert c.veto(TRAIN, ROLLOUT, MASK, 1e-4).int().tolist() == MASK.tolist()
    rollout = ROLLOUT.clone()
    rollout[0, -1] = 8.0
    assert not c.veto(TRAIN, rollout, MASK, 1e-4).any()


@pytest.mark.parametrize("level", c.LEVELS)
def test_what_was_not_sampled_never_changes_a_weight(level):
    plain = c.importance_weights(TRAIN, ROLLOUT, MASK, level=level)
    for filler in (-3.2, float("nan"), float("-inf")):
        train = TRAIN.clone()
        train[0, 3] = filler
        assert torch.equal(c.importance_weights(train, ROLLOUT, MASK, level=level), plain)


NUMBERS = st.floats(-4, 0, allow_nan=False)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=8))
def test_the_formulas_written_out(tokens):
    train, rollout, mask = (torch.tensor([list(column)], dtype=torch.float64) for column in zip(*tokens))
    inside = [(a, b) for a, b, m in tokens if m]
    total = sum(a - b for a, b in inside)
    expected = {
        "token": [math.exp(a - b) if m else 0.0 for a, b, m in tokens],
        "sequence": [math.exp(max(-20.0, min(20.0, total))) if m else 0.0 for _, _, m in tokens],
        "geometric": [math.exp(total / max(1, len(inside))) if m else 0.0 for _, _, m in tokens],
    }
    for level, weights in expected.items():
        found = c.importance_weights(train, rollout, mask, level=level)
        assert found[0].tolist() == pytest.approx(weights, rel=1e-9)
    ratios = [math.exp(a - b) for a, b in inside]
    ess = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)) if ratios else 1.0
    weights = c.importance_weights(train, rollout, mask)
    assert c.effective_sample_size(weights, mask).item() == pytest.approx(ess, rel=1e-9)
    chosen = c.bounded_ratio((train - rollout)[mask.bool()])
    assert torch.equal(chosen, weights[mask.bool()])
    assert c.effective_sample_size(chosen).item() == pytest.approx(ess, rel=1e-9)


def test_no_gradient_flows_through_a_weight():
    train = TRAIN.clone().requires_grad_()
    assert not c.importance_weights(train, ROLLOUT, MASK).requires_grad


def test_an_unknown_level_lists_those_there_are():
    with pytest.raises(ValueError, match="token, sequence, geometric"):
        c.importance_weights(TRAIN, ROLLOUT, MASK, level="turn")


def test_a_sequence_is_a_trajectory_whatever_number_of_records_it_became():
    generator = torch.Generator().manual_seed(0)
    train, rollout = (-torch.rand(1, 6, generator=generator) for _ in range(2))
    rollout[0, 4] = 9.0  # hopeless, in what becomes the second record
    whole = torch.ones(1, 6, dtype=torch.bool)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()
    index = torch.tensor([7, 7])
    split = train.expand(2, 6), rollout.expand(2, 6), mask
    for level in c.LEVELS:
        expected = c.importance_weights(train, rollout, whole, level=level)
        found = c.importance_weights(*split, level=level, trajectory_index_B=index)
        torch.testing.assert_close(found.sum(0), expected[0])
    assert not c.veto(*split, 1e-3, index).any()
    assert c.veto(*split, 1e-3).any(), "by rows, the first record would stay"
    sign = -torch.ones(2, 6)
    assert c.off_policy_sequences(*split[:2], sign, mask, 0.5, index).sum() == 0
    assert c.off_policy_sequences(*split[:2], sign, mask, 0.5).sum() == 3


@pytest.mark.parametrize(("advantage", "kept"), [(-1.0, [0, 0]), (1.0, [1, 1])])
def test_drifted_sequences_unlearn_nothing(advantage, kept):
    new, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.8, -0.8]])
    mask = c.off_policy_sequences(new, old, advantage * torch.ones(1, 2), torch.ones(1, 2), 0.05)
    assert mask[0].int().tolist() == kept
    assert c.off_policy_sequences(new, old, advantage * torch.ones(1, 2), torch.ones(1, 2), 0.3).all()


def test_a_drifted_sequence_without_an_advantage_stays():
    old, new = torch.full((1, 2), -1.0), torch.full((1, 2), -2.0)
    kept = [c.off_policy_sequences(new, old, torch.full((1, 2), a), torch.ones(1, 2), 0.5).all() for a in (0.0, -1.0)]
    assert kept == [True, False]


def test_a_ratio_is_bounded_and_so_is_its_divergence():
    log_ratio = torch.tensor([[-30.0, -20.0, 0.0, 20.0, 30.0]], dtype=torch.float64)
    bounds = [math.exp(-20), math.exp(-20), 1.0, math.exp(20), math.exp(20)]
    assert c.bounded_ratio(log_ratio)[0].tolist() == pytest.approx(bounds, rel=1e-12)
    found = c.divergences(log_ratio, 0 * log_ratio, torch.ones(1, 5), over="token", estimator="k3")
    expected = [math.exp(-20) + 19, math.exp(-20) + 19, 0.0, math.exp(20) - 21, math.exp(20) - 21]
    assert found[0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("over", "estimator", "expected"),
    [
        ("token", "k2", [[0.5, 0.0], [2.0, 0.0], [4.5, 0.0]]),
        ("seq_sum", "k1", [[-3.0, 0.0], [-3.0, 0.0], [3.0, 0.0]]),
        ("seq_mean", "k2", [[1.25, 0.0], [1.25, 0.0], [4.5, 0.0]]),
        ("seq_max", "k2", [[2.0, 0.0], [2.0, 0.0], [4.5, 0.0]]),
        ("seq_max", "k3", [[math.e**2 - 3, 0.0], [math.e**2 - 3, 0.0], [math.exp(-3) + 2, 0.0]]),
    ],
)
def test_divergences_over_all_records_of_a_trajectory(over, estimator, expected):
    train = torch.tensor([[1.0, 9.0], [2.0, 9.0], [-3.0, 9.0]], requires_grad=True)
    mask, index = torch.tensor([[1, 0]] * 3), torch.tensor([7, 7, 2])
    found = c.divergences(train, torch.zeros(3, 2), mask, over=over, estimator=estimator, trajectory_index_B=index)
    assert found.tolist() == [pytest.approx(row) for row in expected] and not found.requires_grad


def test_a_drift_of_exactly_the_threshold_is_none_and_a_given_one_decides():
    new, old = torch.tensor([[-1.5, -1.5], [-1.5, -1.5]]), torch.full((2, 2), -1.0)
    minus, mask = -torch.ones(2, 2), torch.ones(2, 2)
    assert c.off_policy_sequences(new, old, minus, mask, 0.5).all()
    assert not c.off_policy_sequences(new, old, minus, mask, 0.49).any()
    given = torch.tensor([math.nan, -0.6])
    assert c.off_policy_sequences(new, old, minus, mask, 0.55, log_ratio_B=given).tolist() == [[True] * 2, [False] * 2]
    assert c.off_policy_sequences(new, old, minus, mask, 0.49, log_ratio_B=-given).tolist() == [[False] * 2, [True] * 2]


def test_the_worth_of_small_weights_and_of_none():
    assert c.effective_sample_size(torch.tensor([0.1, 0.1])).item() == pytest.approx(1.0)
    assert c.effective_sample_size(torch.tensor([0.1, 0.3])).item() == pytest.approx(0.8)
    for weights in ([0.0, 0.0], []):
        assert c.effective_sample_size(torch.tensor(weights)).item() == 1.0


def test_a_ratio_at_the_threshold_is_no_veto():
    log_ratio = torch.tensor([[math.log(0.25), 3.0], [math.log(0.24), 3.0]], dtype=torch.float64)
    assert c.veto(log_ratio, 0 * log_ratio, torch.ones(2, 2), 0.25).tolist() == [[True, True], [False, False]]
    assert c.veto(log_ratio, 0 * log_ratio, torch.tensor([[1, 0], [0, 1]]), 0.25).tolist() == [
        [True, False],
        [False, True],
    ]
