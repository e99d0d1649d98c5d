"""Returns and advantages per token: observations take no time, no reward is lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.gae import discounted_returns, gae, whiten_tokens
from verl_mt.algorithms.masked import masked_whiten


def run(rewards, values, mask, gamma, lam):
    advantages, returns = gae(
        torch.tensor([rewards], dtype=torch.float64), torch.tensor([values], dtype=torch.float64),
        torch.tensor([mask]), gamma=gamma, lam=lam,
    )  # fmt: skip
    return advantages[0].tolist(), returns[0].tolist()


def test_pinned_values():
    assert run([0, 0, 1], [0.5, 0.6, 0.8], [1, 1, 1], 1.0, 1.0)[0] == pytest.approx([0.5, 0.4, 0.2])
    expected = [0.451484, 0.380100, 0.2]
    assert run([0, 0, 1], [0.5, 0.6, 0.8], [1, 1, 1], 0.99, 0.95)[0] == pytest.approx(expected, abs=1e-6)
    inside = run([0, 0, 0, 0, 1], [0.5, 0.6, 9.0, 9.0, 0.8], [1, 1, 0, 0, 1], 0.99, 0.95)[0]
    assert inside == pytest.approx([*expected[:2], 0, 0, expected[2]], abs=1e-6)


@pytest.mark.parametrize(
    ("gamma", "lam", "returns", "whitened"),
    [(1.0, 1.0, [1, 1, 1], [0, 1, -1]), (0.9, 0.8, [0.668160, 0.828, 1.0], [-1.149124, 0.672722, 0.476402])],
)
def test_pinned_returns_and_whitened_advantages(gamma, lam, returns, whitened):
    mask = torch.tensor([[1, 1, 0, 0, 1]])
    advantages, got = gae(
        torch.tensor([[0, 0, 0, 0, 1.0]]), torch.tensor([[0.5, 0.4, 9, -9, 0.6]]), mask, gamma=gamma, lam=lam
    )
    kept = mask.bool()
    assert got[kept].tolist() == pytest.approx(returns, abs=1e-6)
    assert masked_whiten(advantages, mask)[kept].tolist() == pytest.approx(whitened, abs=1e-5)


def test_a_reward_behind_the_last_sampled_token_is_not_lost():
    assert run([0, 0, 0, 0, 1], [0.0] * 5, [1, 1, 1, 0, 0], 1.0, 1.0)[1] == [1, 1, 1, 0, 0]


def test_pinned_discounted_returns():
    rewards = torch.tensor([[0, 0, 0, 0, 1.0]])
    got = discounted_returns(rewards, torch.ones(1, 5), gamma=0.9)[0].tolist()
    assert got == pytest.approx([0.6561, 0.729, 0.81, 0.9, 1], abs=1e-6)
    assert discounted_returns(torch.tensor([[0, 0, 1.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5).tolist() == [
        [0.5, 0, 1]
    ]


def slow(rewards, values, mask, gamma, lam):
    """Take the observations out, then the textbook's recursion."""
    kept = [t for t, m in enumerate(mask) if m]
    result = [0.0] * len(mask)
    for place, t in enumerate(kept):
        total = 0.0
        for later in range(place, len(kept)):
            s = kept[later]
            until = kept[later + 1] if later + 1 < len(kept) else len(mask)
            following = values[kept[later + 1]] if later + 1 < len(kept) else 0.0
            reward = sum(rewards[s:until])
            total += (gamma * lam) ** (later - place) * (reward + gamma * following - values[s])
        result[t] = total
    return result


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=7),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_equal_to_a_plain_loop_and_junk_at_observations_changes_nothing(tokens, gamma, lam):
    rewards, values, mask = ([t[k] for t in tokens] for k in range(3))
    advantages, returns = run(rewards, values, mask, gamma, lam)
    assert advantages == pytest.approx(slow(rewards, values, mask, gamma, lam), abs=1e-9)
    assert returns == pytest.approx([(a + v) if m else 0 for a, v, m in zip(advantages, values, mask)], abs=1e-9)
    junk = [v if m else math.nan for v, m in zip(values, mask)]
    assert run(rewards, junk, mask, gamma, lam) == (advantages, returns)


def test_no_tokens_give_nothing():
    assert gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0), gamma=1.0, lam=1.0)[0].shape == (2, 0)
    assert run([0, 1], [3, 3], [0, 0], 1.0, 1.0) == ([0, 0], [0, 0])


def test_whitened_tokens_that_are_all_equal_are_exactly_zero():
    """The mean of three times -0.1 is another number."""
    for value in (-0.1, 0.1, 0.0):
        same = torch.full((1, 3), value, dtype=torch.float64)
        assert whiten_tokens(same, torch.ones(1, 3)).tolist() == [[0.0] * 3]
    assert whiten_tokens(torch.ones(1, 2), torch.zeros(1, 2)).tolist() == [[0.0] * 2]
    nearly = torch.tensor([[1.0, 1.0 + 0.9e-9], [1.0, 1.0 + 1.1e-9]], dtype=torch.float64)
    assert [whiten_tokens(row[None], torch.ones(1, 2)).any().item() for row in nearly] == [False, True]


def test_rewards_in_float64_keep_their_precision():
    rewards = torch.tensor([[0.1, 0.2]], dtype=torch.float64)
    advantages, returns = gae(rewards, torch.zeros(1, 2), torch.ones(1, 2), gamma=1.0, lam=1.0)
    assert advantages.dtype == returns.dtype == torch.float64 and returns.tolist() == [[0.2 + 0.1, 0.2]]
