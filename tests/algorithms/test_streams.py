"""Trained tokens of a trajectory in order of time, and what they earned."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.streams import Streams

ROWS = st.lists(
    st.tuples(st.integers(-1, 2), st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=4, max_size=4)),
    min_size=1,
    max_size=6,
)


def streams_of(rows):
    """The n-th row of a trajectory is its n-th record; rows come in any order of trajectories."""
    seen: dict[int, int] = {}
    records = [seen.update({t: seen.get(t, -1) + 1}) or seen[t] for t, _ in rows]
    mask = torch.tensor([[m for m, _ in tokens] for _, tokens in rows])
    values = torch.tensor([[float(v) for _, v in tokens] for _, tokens in rows])
    return Streams.of(mask, torch.tensor([t for t, _ in rows]), torch.tensor(records)), mask, values


def slow(rows):
    """Trajectory -> its tokens' values, and what each earned; one token after the other."""
    tokens: dict[int, list[float]] = {t: [] for t, _ in rows}
    earned: dict[int, list[float]] = {t: [] for t, _ in rows}
    for trajectory in tokens:
        for own, row in rows:
            for mask, value in row if own == trajectory else []:
                if mask:
                    tokens[trajectory].append(value)
                    earned[trajectory].append(0.0)
                if earned[trajectory]:
                    earned[trajectory][-1] += value
    return [tokens[t] for t in sorted(tokens)], [earned[t] for t in sorted(earned)]


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_equal_to_a_plain_loop_and_back_again(rows):
    streams, mask, values = streams_of(rows)
    tokens, earned = slow(rows)
    assert streams.length_N.tolist() == [len(t) for t in tokens]
    for place, (own, rewards) in enumerate(zip(tokens, earned)):
        assert streams.gather(values)[place, : len(own)].tolist() == own
        assert streams.gather_rewards(values)[place, : len(own)].tolist() == rewards
        assert not streams.gather(values)[place, len(own) :].any()
    assert torch.equal(streams.scatter(streams.gather(values)), values * mask)
    assert streams.mask_NM.sum() == mask.sum()


def test_a_second_record_comes_behind_the_first_whatever_the_order_of_rows():
    mask = torch.tensor([[True, True], [True, False], [False, True]])
    values = torch.tensor([[3.0, 4.0], [9.0, 0.0], [0.0, 1.0]])
    streams = Streams.of(mask, torch.tensor([7, 2, 7]), torch.tensor([1, 0, 0]))
    assert streams.gather(values).tolist() == [[9, 0, 0], [1, 3, 4]]


def test_a_reward_behind_the_last_token_of_a_record_belongs_to_it_and_one_before_the_first_to_nobody():
    mask = torch.tensor([[False, True, False], [False, True, True]])
    rewards = torch.tensor([[5.0, 0.0, 2.0], [1.0, 0.0, 4.0]])
    streams = Streams.of(mask, torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert streams.gather_rewards(rewards).tolist() == [[3, 0, 4]]


def test_without_rows_there_are_no_places():
    none = torch.zeros(0, dtype=torch.long)
    assert Streams.of(torch.zeros(0, 4, dtype=torch.bool), none, none).mask_NM.shape == (0, 0)
