"""Loss aggregation: whole mini-batch denominators, a trajectory counts once."""

from __future__ import annotations

import pytest
import torch
from aggregated import aggregate_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.aggregate import MODES, token_weights, tokens_per_trajectory


def slow_aggregate(losses, mask, trajectory, mode, constant):
    """Python lists, one loop per definition."""
    tokens: dict[int, list[float]] = {}
    for row, keep, owner in zip(losses, mask, trajectory):
        tokens.setdefault(owner, []).extend(x for x, m in zip(row, keep) if m)
    kept = [values for values in tokens.values() if values]
    if not kept:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, kept)) / sum(map(len, kept))
    per_trajectory = {
        "seq-mean-token-mean": lambda v: sum(v) / len(v),
        "seq-mean-token-sum": sum,
        "seq-mean-token-sum-norm": lambda v: sum(v) / constant,
    }[mode]
    return sum(map(per_trajectory, kept)) / len(kept)


def run(losses, mask, mode, trajectory=None, constant=None):
    losses = torch.tensor(losses, dtype=torch.float64)
    index = torch.arange(len(losses)) if trajectory is None else torch.tensor(trajectory)
    return aggregate_loss(losses, torch.tensor(mask), index, mode=mode, norm_constant=constant).item()


RAGGED = ([[1, 2, 3, 4], [10, 0, 0, 0]], [[1, 0, 1, 1], [1, 1, 0, 0]])
SQUARE = ([[1, 2, 3], [4, 5, 6]], [[1, 1, 1], [1, 0, 0]])
EMPTY_ROW = ([[1, 2, 3], [4, 5, 6]], [[1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    ("case", "constant", "expected"),
    [
        (RAGGED, 8, [3.6, 3.833333, 9.0, 1.125]),
        (SQUARE, 3, [2.5, 3.0, 5.0, 1.666667]),
        (EMPTY_ROW, 3, [2.0, 2.0, 6.0, 2.0]),
    ],
)
def test_pinned_values(case, constant, expected):
    assert [run(*case, mode, constant=constant) for mode in MODES] == pytest.approx(expected, abs=1e-6)


def test_two_records_of_one_trajectory_count_once():
    assert run(*RAGGED, "seq-mean-token-mean", trajectory=[4, 4]) == pytest.approx(3.6)


@pytest.mark.parametrize("mode", MODES)
def test_everything_masked_gives_zero_and_a_zero_gradient(mode):
    losses = torch.full((2, 3), float("nan"), requires_grad=True)
    loss = aggregate_loss(losses, torch.zeros(2, 3), torch.arange(2), mode=mode, norm_constant=5)
    assert loss.item() == 0.0
    loss.backward()
    assert losses.grad is not None and losses.grad.tolist() == [[0.0] * 3] * 2


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=5, max_size=5)),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rows=ROWS, mode=st.sampled_from(MODES))
def test_equal_to_a_plain_loop(rows, mode):
    losses = [[float(x) for x, _ in row] for _, row in rows]
    mask = [[m for _, m in row] for _, row in rows]
    trajectory = [owner for owner, _ in rows]
    expected = slow_aggregate(losses, mask, trajectory, mode, 7.0)
    assert run(losses, mask, mode, trajectory, 7.0) == pytest.approx(expected, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, mode=st.sampled_from(MODES), cut=st.integers(0, 6), permute=st.randoms())
def test_any_split_into_micro_batches_sums_to_the_same_loss(rows, mode, cut, permute):
    losses = torch.tensor([[float(x) for x, _ in row] for _, row in rows])
    mask = torch.tensor([[m for _, m in row] for _, row in rows])
    weights = token_weights(mask, torch.tensor([o for o, _ in rows]), mode=mode, norm_constant=7.0)
    order = list(range(len(rows)))
    permute.shuffle(order)
    parts = [order[:cut], order[cut:]]
    total = sum((losses[part] * weights[part]).sum().item() for part in parts)
    assert total == pytest.approx((losses * weights).sum().item(), abs=1e-5)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "token-mean"])
def test_a_trajectorys_weight_does_not_depend_on_how_many_records_it_became(mode):
    whole = token_weights(torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]]), torch.tensor([0, 1]), mode=mode, norm_constant=9)
    split = token_weights(
        torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0]]), torch.tensor([0, 0, 1]), mode=mode, norm_constant=9
    )
    assert torch.allclose(split[:2].sum(0), whole[0])
    assert torch.allclose(split[2], whole[1])


def test_a_missing_constant_and_an_unknown_mode_are_refused():
    for constant in (None, 0, -1.0):
        with pytest.raises(ValueError, match="needs a positive norm_constant"):
            run(*RAGGED, "seq-mean-token-sum-norm", constant=constant)
    assert run(*SQUARE, "seq-mean-token-sum-norm", constant=0.5) == pytest.approx(10.0)
    with pytest.raises(ValueError, match=r"unknown loss aggregation 'mean'. Known: token-mean"):
        run(*RAGGED, "mean")


def test_the_tokens_of_a_trajectory_are_those_of_all_its_records():
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]])
    counts, place = tokens_per_trajectory(mask, torch.tensor([7, 2, 7, 2, 3]))
    assert counts.tolist() == [4, 0, 2] and place.tolist() == [2, 0, 2, 0, 1]
    none = tokens_per_trajectory(mask[:0], torch.zeros(0, dtype=torch.int64))
    assert [part.tolist() for part in none] == [[], []]
