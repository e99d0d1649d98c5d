"""Advantage estimators without a critic: pinned numbers, the formulas written out with loops, and what they share."""

from __future__ import annotations

import inspect
import math
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms import advantages as a
from verl_mt.algorithms.gae import whiten_tokens
from verl_mt.algorithms.masked import masked_whiten
from verl_mt.data.trajectory import MAX_REWARD

TWO_GROUPS = ([1.0, 0, 0, 1, 0, 0, 0, 1], [0] * 4 + [1] * 4)


def run(name, rewards, groups, tokens=None, **kwargs):
    estimate = a.by_name[name]
    if "tokens_N" in inspect.signature(estimate).parameters:
        kwargs["tokens_N"] = torch.tensor(tokens or [1] * len(rewards))
    return estimate(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64), **kwargs
    ).tolist()


@pytest.mark.parametrize(
    ("name", "rewards", "groups", "kwargs", "expected"),
    [
        ("rloo", *TWO_GROUPS, {}, [0.666667, -0.666667, -0.666667, 0.666667, *[-0.333333] * 3, 1.0]),
        ("rloo", [1.0, 0, 0, 0], [0] * 4, {}, [1.0, *[-0.333333] * 3]),
        ("reinforce_plus_plus_baseline", *TWO_GROUPS, {}, [1.0, -1.0, -1.0, 1.0, *[-0.5] * 3, 1.5]),
        ("reinforce_plus_plus_baseline", [1.0, 0, 0, 0], [0] * 4, {}, [1.5, *[-0.5] * 3]),
        ("grpo_passk", [3.0, 1, 0], [0] * 3, {}, [1.309307, 0, 0]),
        ("grpo_passk", [3.0, 1, 0], [0] * 3, {"norm_by_std": False}, [2.0, 0, 0]),
        ("grpo_passk", [1.0, 1, 0], [0] * 3, {}, [0, 0, 0]),
        ("opo", [1.0, 0], [0, 0], {"tokens": [3, 1]}, [0.25, -0.75]),
        ("gpg", [1.0, 0, 1, 1], [0, 0, 1, 1], {}, [1.0, -1.0, 0, 0]),
        ("reinforce_plus_plus", [1.0, 2, 3], [0, 1, 2], {}, [-1.0, 0, 1.0]),
    ],
)
def test_pinned_values(name, rewards, groups, kwargs, expected):
    assert run(name, rewards, groups, **kwargs) == pytest.approx(expected, abs=2e-6)


def slow(name, rewards, groups, tokens):
    """One trajectory after the other, straight from the formulas."""
    members = {g: [i for i, other in enumerate(groups) if other == g] for g in groups}
    signal = {g: max(rewards[i] for i in m) > min(rewards[i] for i in m) for g, m in members.items()}
    centred = [r - mean(rewards[j] for j in members[g]) if signal[g] else 0.0 for r, g in zip(rewards, groups)]

    def whitened(values):
        on_tokens = [v for v, n in zip(values, tokens) for _ in range(n)]
        if len(on_tokens) < 2 or len(set(on_tokens)) == 1:
            return [0.0] * len(values)
        centre, spread = mean(on_tokens), math.sqrt(stdev(on_tokens) ** 2 + 1e-8)
        return [(v - centre) / spread for v in values]

    if name == "reinforce_plus_plus":
        return whitened(rewards) if len(set(rewards)) > 1 else [0.0] * len(rewards)
    if name == "reinforce_plus_plus_baseline":
        variance = sum(c * c for c in centred) / max(1, len(centred) - 1)
        return [c / math.sqrt(variance + 1e-8) for c in centred]
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups)):
        mine = members[group]
        others = [rewards[j] for j in mine if j != i]
        if not signal[group]:
            result.append(0.0)
        elif name == "rloo":
            result.append(reward - mean(others))
        elif name == "opo":
            result.append(reward - sum(tokens[j] * rewards[j] for j in mine) / sum(tokens[j] for j in mine))
        elif name == "gpg":
            result.append(len(rewards) / sum(signal[g] for g in groups) * centred[i])
        elif name == "grpo":
            result.append(centred[i] / (stdev(rewards[j] for j in mine) + 1e-6))
        else:
            lead = reward - max(others)
            result.append(max(0.0, lead) / (stdev(rewards[j] for j in mine) + 1e-6))
    return result


TRAJECTORIES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.integers(-2, 2), st.integers(1, 5)), max_size=10
)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(a.by_name))
@settings(max_examples=40, deadline=None)
@given(TRAJECTORIES)
def test_equal_to_a_plain_loop_for_any_groups(name, trajectories):
    rewards, groups, tokens = ([t[k] for t in trajectories] for k in range(3))
    assert run(name, rewards, groups, tokens) == pytest.approx(slow(name, rewards, groups, tokens), abs=1e-6)


@pytest.mark.parametrize("name", sorted(a.by_name))
def test_equal_rewards_and_a_group_of_one_get_zero_and_nothing_is_nan(name):
    assert run(name, [0.1] * 5, [0, 0, 0, 0, 7]) == [0.0] * 5
    assert run(name, [2.0], [3]) == [0.0]
    assert run(name, [], []) == []
    if name != "reinforce_plus_plus":  # whose groups play no part
        assert run(name, [1.0, 0.0, 9.0], [0, 0, 1], [4, 1, 2])[2] == 0.0


@pytest.mark.parametrize("name", sorted(a.by_name))
def test_the_order_of_trajectories_does_not_matter(name):
    rewards, groups, tokens = [1.0, 0, 0, 2, 0.5, 0, 1], [5, 5, 9, 9, 9, 2, 5], [3, 1, 4, 1, 5, 9, 2]
    order = [4, 2, 6, 0, 5, 1, 3]
    shuffled = run(name, *([values[i] for i in order] for values in (rewards, groups, tokens)))
    plain = run(name, rewards, groups, tokens)
    assert shuffled == pytest.approx([plain[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("name", sorted(a.by_name))
def test_a_reward_that_is_not_finite_is_refused_with_its_position(name):
    with pytest.raises(ValueError, match="reward 1 is nan"):
        run(name, [1.0, math.nan], [0, 0])


@pytest.mark.parametrize("name", sorted(a.by_name))
def test_advantages_of_the_largest_rewards_are_finite_in_float32(name):
    parts = torch.tensor([1.0, -1.0, -1.0, 0.5, -0.5, -1.0, 0.5, -1.0]).repeat(512)
    estimate, kwargs = a.by_name[name], {}
    if "tokens_N" in inspect.signature(estimate).parameters:
        kwargs["tokens_N"] = torch.full((len(parts),), 8)
    for plain in ({}, {"norm_by_std": False}):
        if plain.keys() <= inspect.signature(estimate).parameters.keys():
            advantages = estimate(parts * MAX_REWARD, torch.arange(len(parts)) // 8, **kwargs, **plain)
            assert advantages.isfinite().all() and advantages.float().square().sum().isfinite()
            assert advantages.abs().max() > 0.1
    values = masked_whiten(parts * MAX_REWARD, torch.ones(len(parts)))
    assert values.isfinite().all() and values.abs().min() > 0.1


def test_several_rewards_are_normalised_one_by_one_before_they_are_added():
    rewards = torch.tensor([[1.0, 0], [0, 0], [1, 1], [0, 1]], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    assert a.gdpo(rewards, groups).tolist() == pytest.approx([0, -1.224745, 1.224745, 0], abs=1e-5)
    scaled = rewards * torch.tensor([1.0, 100.0])
    assert a.gdpo(scaled, groups).tolist() == pytest.approx([0, -1.224745, 1.224745, 0], abs=1e-5)
    only_first = a.gdpo(rewards, groups, weights_K=torch.tensor([1.0, 0.0]))
    assert only_first.tolist() == pytest.approx([0.866025, -0.866025, 0.866025, -0.866025], abs=1e-5)
    assert a.gdpo(rewards, torch.arange(4)).tolist() == [0.0] * 4
    uneven = torch.tensor([[1.0, 0.3], [0.0, 0.7], [1.0, 0.1], [0.5, 0.5], [0.2, 0.2], [0.2, 0.2]])
    beside = a.gdpo(uneven, torch.tensor([0, 0, 0, 1, 2, 2]))  # a group of one, a group of equals
    assert beside[:3].abs().min() > 0.1 and beside[3:].tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="one column per reward"):
        a.gdpo(rewards[:, 0], groups)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([0.0, 0.5]), st.integers(0, 2)),
        min_size=2,
        max_size=8,
    ),
    st.floats(0, 2),
)
def test_gdpo_is_its_formula(rows, weight):
    groups = [g for _, _, g in rows]
    total = [0.0] * len(rows)
    for k, w in ((0, 1.0), (1, weight)):
        column = slow("grpo", [row[k] for row in rows], groups, [1] * len(rows))
        total = [t + w * value for t, value in zip(total, column)]
    expected = [(t - mean(total)) / (stdev(total) + 1e-6) for t in total]
    got = a.gdpo(
        torch.tensor([row[:2] for row in rows], dtype=torch.float64),
        torch.tensor(groups),
        weights_K=torch.tensor([1.0, weight], dtype=torch.float64),
    )
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_gdpo_adds_eps_to_each_standard_deviation():
    """With eps = 1/2 GRPO's advantages of 0, 1, 2 are -2/3, 0, 2/3; their deviation is 2/3, and gets eps again."""
    rewards = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    found = a.gdpo(rewards, torch.zeros(3, dtype=torch.int64), eps=0.5)
    assert found.tolist() == pytest.approx([-4 / 7, 0, 4 / 7])


def test_remax_takes_the_greedy_answer_for_baseline():
    assert a.remax(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25])).tolist() == [0.75, -0.25]
    with pytest.raises(ValueError, match="must be alike"):
        a.remax(torch.zeros(2), torch.zeros(3))


def test_the_number_added_to_the_variance_counts_where_rewards_hardly_differ():
    """Two rewards 2e-4 apart: variance 2e-8, eps 1e-8."""
    rewards = torch.tensor([1e-4, -1e-4], dtype=torch.float64)
    got = a.by_name["reinforce_plus_plus"](rewards, torch.tensor([0, 1]), tokens_N=torch.ones(2), eps=1e-8)
    assert got.tolist() == pytest.approx([3**-0.5, -(3**-0.5)], rel=1e-6)


def test_equal_rewards_of_a_batch_give_exactly_zero_whatever_their_mean_rounds_to():
    for reward, tokens in ((0.1, [3] * 6 + [1]), (-1.8223974331296149, [13, 40, 8])):
        rewards = torch.full((len(tokens),), reward, dtype=torch.float64)
        got = a.by_name["reinforce_plus_plus"](rewards, torch.arange(len(tokens)), tokens_N=torch.tensor(tokens))
        assert got.tolist() == [0.0] * len(tokens)


def test_one_trained_token_alone_has_no_variance_and_no_advantage():
    got = a.by_name["reinforce_plus_plus"](torch.tensor([0.7]), torch.tensor([0]), tokens_N=torch.tensor([1]))
    assert got.tolist() == [0.0]


def test_small_advantages_are_whitened_like_large_ones():
    """Equal but for rounding is a question of their size."""
    mask = torch.tensor([[True, True, False]])
    for size in (1e-6, 1e6):
        values = torch.tensor([[1.0, 3.0, 9.0]], dtype=torch.float64) * size
        expected = size * torch.tensor([[-1.0, 1.0, 0.0]], dtype=torch.float64) / math.sqrt(2 * size**2 + 1e-8)
        torch.testing.assert_close(whiten_tokens(values, mask), expected)


def test_without_trained_tokens_a_mean_over_tokens_is_0():
    assert run("opo", [1.0, 0.5], [0, 0], [0, 0]) == [1.0, 0.5]
    assert run("reinforce_plus_plus", [1.0, 0.0], [0, 1], [0, 0], eps=0.25) == [2.0, 0.0]
    assert run("reinforce_plus_plus", [1.0, 0.0], [0, 1], [1, 0], eps=0.25) == [0.0, -2.0], "one token, no variance"


def test_one_trajectory_or_none_has_no_spread_of_several_rewards():
    for count in (0, 1):
        assert a.gdpo(torch.ones(count, 2), torch.zeros(count, dtype=torch.int64)).tolist() == [0.0] * count
