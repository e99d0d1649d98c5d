"""Group-relative advantages by explicit group ids."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.advantages import _Groups, by_name, grpo, has_signal, soft_overlong_penalty


def slow_grpo(rewards: list[float], groups: list[int], norm_by_std: bool, eps: float) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups):
        mine = [r for r, g in zip(rewards, groups) if g == group]
        mean = math.fsum(mine) / len(mine)
        if len(mine) == 1 or max(mine) == min(mine):
            result.append(0.0)
        elif norm_by_std:
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
            result.append((reward - mean) / (std + eps))
        else:
            result.append(reward - mean)
    return result


def run(rewards: list[float], groups: list[int], **kwargs) -> list[float]:
    return grpo(torch.tensor(rewards), torch.tensor(groups), **kwargs).tolist()


PINNED = [
    ([1, 0, 0, 1, 0, 0, 0, 1], [0] * 4 + [1] * 4, {"norm_by_std": False},
     [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75]),
    ([1, 0, 0, 1, 0, 0, 0, 1], [0] * 4 + [1] * 4, {"eps": 1e-4},
     [0.865875, -0.865875, -0.865875, 0.865875, -0.4999, -0.4999, -0.4999, 1.4997]),
    ([1, 0, 0, 1, 0, 0, 0, 1], [0] * 4 + [1] * 4, {},
     [0.866024, -0.866024, -0.866024, 0.866024, -0.499999, -0.499999, -0.499999, 1.499997]),
    ([1, 0, 1, 0.5], [0, 0, 1, 1], {}, [0.7071057, -0.7071057, 0.7071047, -0.7071047]),
    ([1, 0, 1, 0.5], [0, 0, 1, 1], {"norm_by_std": False}, [0.5, -0.5, 0.25, -0.25]),
    ([1, 0, 0, 0], [0] * 4, {}, [1.499997, -0.499999, -0.499999, -0.499999]),
    ([2], [0], {}, [0.0]),
    ([1, 1, 1], [0] * 3, {}, [0.0] * 3),
    ([1, 3, 5], [0, 0, 1], {}, [-0.7071, 0.7071, 0.0]),
    ([1, 0, 0], [0, 0, 0], {}, [1.154698, -0.577349, -0.577349]),
]  # fmt: skip


@pytest.mark.parametrize(("rewards", "groups", "kwargs", "expected"), PINNED)
def test_pinned_values(rewards, groups, kwargs, expected):
    assert run([float(r) for r in rewards], groups, **kwargs) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.integers(-3, 3)), max_size=12),
    norm_by_std=st.booleans(),
)
def test_equal_to_a_plain_loop_for_any_order_and_any_group_sizes(pairs, norm_by_std):
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    got = grpo(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        norm_by_std=norm_by_std,
    )
    assert got.tolist() == pytest.approx(slow_grpo(rewards, groups, norm_by_std, 1e-6), abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.permutations(list(range(7))))
def test_the_order_of_trajectories_does_not_matter(order):
    rewards, groups = torch.tensor([1.0, 0, 0, 1, 0.5, 0, 1]), torch.tensor([5, 5, 9, 9, 9, 2, 5])
    assert torch.allclose(grpo(rewards[order], groups[order]), grpo(rewards, groups)[order], atol=1e-7)


@pytest.mark.parametrize("reward", [0.1, 1e8 + 1 / 3, -7.7])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_group_of_equal_rewards_gets_exactly_zero(reward, eps):
    assert run([reward] * 7, [3] * 7, eps=eps) == [0.0] * 7


def test_no_trajectories_give_no_advantages():
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_a_reward_that_is_not_finite_is_refused_with_its_position():
    with pytest.raises(ValueError, match="reward 1 is nan"):
        run([1.0, math.nan], [0, 0])


def test_the_table_of_estimators_has_every_choice_of_the_config():
    from dataclasses import fields

    from verl_mt.config.schema import AlgorithmConfig

    choices = next(f for f in fields(AlgorithmConfig) if f.name == "adv_estimator").metadata["choices"]
    wired_apart = {"gae", "remax", "gdpo"}  # they need values, a greedy rollout, or several rewards
    assert set(choices) == {*by_name, *wired_apart}


def test_the_overlong_penalty_grows_over_its_buffer_and_ends_at_minus_one():
    lengths = torch.tensor([60, 80, 85, 90, 100, 120])
    got = soft_overlong_penalty(lengths, max_length=100, buffer=20)
    assert got.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    turns = torch.tensor([len([0, 1, 2]) + len([3, 4, 5, 6])])  # the sum over turns
    assert soft_overlong_penalty(turns, max_length=8, buffer=2).tolist() == [-0.5]


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_that_cannot_be_is_refused(buffer):
    with pytest.raises(ValueError, match="between 1 and max_length"):
        soft_overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)


def test_groups_without_a_difference_have_no_signal():
    rewards = torch.tensor([1.0, 0, 1, 1, 1, 0.1, 0.1, 0.1, -2, -2])
    groups = torch.tensor([9, 9, 4, 4, 7, 2, 2, 2, 3, 3])
    assert has_signal(rewards, groups).tolist() == [True, True, *[False] * 8]
    assert has_signal(rewards[:0], groups[:0]).tolist() == []


@pytest.mark.parametrize(("rewards", "groups"), [((2,), (3,)), ((2, 2), (2, 2)), ((2,), (2, 1))])
def test_rewards_and_groups_are_one_row_of_numbers_each(rewards, groups):
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        grpo(torch.zeros(rewards), torch.zeros(groups))


def test_a_group_of_one_has_no_spread():
    rewards, groups = _Groups.of(torch.tensor([7.0, 1.0, 4.0]), torch.tensor([5, 3, 3]))
    assert groups.std(rewards).tolist() == pytest.approx([0.0, 4.5**0.5, 4.5**0.5])


@pytest.mark.parametrize(
    ("lengths", "longest", "buffer", "expected"),
    [([0, 1, 4, 5], 4, 4, [0, -0.25, -1, -1]), ([2, 3, 4], 4, 1, [0, 0, -1])],
)
def test_the_buffer_may_be_one_token_or_the_whole_response(lengths, longest, buffer, expected):
    assert soft_overlong_penalty(torch.tensor(lengths), max_length=longest, buffer=buffer).tolist() == expected
