"""Who takes which row, and which GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.engines.base import Receiver
from verl_mt.errors import EngineError
from verl_mt.workers.rank_worker import RankWorker, cuda_index
from verl_mt.workers.sharding import ALONE, Ranks
from verl_mt.workers.worker_group import HandedOver


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.integers(1, 4000), max_size=40), size=st.integers(1, 6))
def test_every_item_has_one_owner_and_no_rank_has_much_more_than_its_share(costs, size):
    shares = Ranks(0, size).shares(costs)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    heaviest = max(sum(costs[i] for i in share) for share in shares)
    assert heaviest <= sum(costs) / size + max(costs, default=0)
    assert shares == Ranks(size - 1, size).shares(costs)


def test_the_split_balances_tokens_not_rows():
    shares = Ranks(0, 2).shares([1000, 100, 100, 100, 300, 400])
    assert shares == [[0], [1, 2, 3, 4, 5]]


def test_fewer_rows_than_ranks_leave_a_rank_empty():
    assert sorted(map(len, Ranks(0, 3).shares([5, 7]))) == [0, 1, 1]


def test_one_rank_needs_no_process_group():
    values = torch.tensor([1.0, torch.nan])
    assert ALONE.sum(values) is values
    assert ALONE.gather("x") == ["x"]


@pytest.mark.parametrize(
    ("given", "visible", "expected"),
    [
        (("3",), "3", 0),
        (("3",), "0,1,2,3", 3),
        (("3",), "3,1", 0),
        (("2",), None, 2),
        (("GPU-ab",), "GPU-cd,GPU-ab", 1),
        ((), "0,1", 0),
    ],
    ids=["its own alone", "all in sight", "renumbered", "nothing said", "by name", "none given"],
)
def test_a_rank_takes_the_gpu_that_ray_gave_it_even_where_it_sees_all(given, visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cuda_index(given, environment) == expected


@pytest.mark.parametrize(("where", "raises"), [("giving", False), ("gathering", True)])
def test_what_goes_wrong_with_engines_is_told_and_what_goes_wrong_with_gathering_is_raised(where, raises):
    """Also when the last tensor has been taken: the ranks are then where they were before."""
    worker = RankWorker.__new__(RankWorker)
    worker.actor = worker.critic = None
    worker._ranks, worker._buckets = Ranks(0, 1), lambda: [{"w": torch.zeros(2)}]

    def gather(bucket, converted):
        if where == "gathering":
            raise RuntimeError("a connection closed")
        return bucket

    class Giver:
        def give(self, tensors, version, bucket_bytes, receivers):
            assert [name for name, _ in tensors] == ["w"]
            raise EngineError("weight update: 1 of 2 weights are missing: v")

    worker._gather, worker._giver = gather, lambda update: Giver()
    receivers = {0: [Receiver(print), Receiver(repr)]}
    if raises:
        with pytest.raises(RuntimeError, match="a connection closed"):
            worker.hand_over(HandedOver(1, "", (), 8), receivers)
    else:
        told = worker.hand_over(HandedOver(1, "", (), 8), receivers)
        assert [str(problem) for problem in told] == ["weight update: 1 of 2 weights are missing: v"] * 2
