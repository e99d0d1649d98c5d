"""A critic over several processes is the critic of one."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from actor_toys import REWARDS, tiny_policy
from critic_toys import batch_with_values, critic
from sharded_jobs import resume_critic, train_critic
from torch import nn

from verl_mt.data import batch as col
from verl_mt.errors import CheckpointError
from verl_mt.workers.sharding import ALONE, Ranks, ShardedPolicy, hidden_states, score

OPTIONS = {"ppo_mini_batch_size": 1, "ppo_epochs": 2, "ppo_micro_batch_size": 2}


def batches(count: int):
    """The last prompt has fewer rows than three ranks could share: some run dummies."""
    return [batch_with_values(critic(), [*REWARDS[:2], [1.0]], seed=seed, records=2) for seed in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "shared"), [(2, True), (3, False)])
def test_values_metrics_and_weights_are_those_of_one_process(ranks, size, shared):
    data = batches(1)
    values, metrics, state = train_critic(ALONE, copy.deepcopy(data), shared=shared, **OPTIONS)
    for own in ranks(size)(train_critic, data, shared=shared, **OPTIONS):
        torch.testing.assert_close(own[0], values, atol=1e-5, rtol=1e-5)
        for expected, got in zip(metrics, own[1]):
            # A value at the edge of the clip falls to one side or the other by rounding.
            assert got.pop("critic/vf_clipfrac") == pytest.approx(expected["critic/vf_clipfrac"], abs=0.05)
            assert got == pytest.approx({k: v for k, v in expected.items() if "clipfrac" not in k}, abs=2e-4, rel=2e-3)
        assert own[2]["num_updates"] == state["num_updates"] == 6
        for name, tensor in state["tensors"].items():
            torch.testing.assert_close(own[2]["tensors"][name], tensor, atol=2e-3, rtol=1e-2, msg=name)


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """A rank that is a thread. Threads compute one at a time and meet in `sum`."""

    values: list = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)
    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def sum(self, value):
        self.values[self.rank] = value.clone()
        self._meet()
        total = torch.stack(self.values).sum(0)
        self._meet()
        return total

    def _meet(self):
        self.turn.release()
        try:
            self.meeting.wait(60)
        finally:
            self.turn.acquire()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sequence"), [(2, 1), (3, 1), (2, 2)])
def test_a_head_learns_on_every_rank_what_it_learns_in_one_process(size, sequence):
    policy, (batch,) = tiny_policy(), batches(1)
    options = {"policy": policy, "ppo_mini_batch_size": 1, "cliprange_value": None}
    alone = critic(**options)
    values, metrics = alone.compute_values(batch), alone.update(batch)
    shared = ([torch.empty(0)] * size, threading.Lock(), threading.Barrier(size))
    workers = [critic(**options) for _ in range(size)]
    for rank, worker in enumerate(workers):
        worker.ranks = ThreadRanks(rank, size, sequence, *shared)

    def one_rank(worker):
        with worker.ranks.turn:
            try:
                return worker.compute_values(batch), worker.update(batch)
            except BaseException:
                worker.ranks.meeting.abort()
                raise

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(one_rank, workers))
    for worker, (own_values, own_metrics) in zip(workers, found, strict=True):
        torch.testing.assert_close(own_values, values, atol=1e-6, rtol=1e-5)
        assert own_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-4)
        assert worker.num_updates == alone.num_updates == 3
        for own, other in zip(worker.module.parameters(), alone.module.parameters(), strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("shared", "size", "expected"), [(True, 2, [5.0, 3.0]), (True, 1, [2.0, None]), (False, 2, [2.0, None])]
)
def test_gradients_are_added_up_only_for_a_head_that_every_rank_has_whole(shared, size, expected):
    """The sum of this test adds 3, the gradient of another rank."""

    @dataclass(frozen=True)
    class Plus(Ranks):
        def sum(self, value):
            return value + 3.0

    worker = critic(policy=tiny_policy() if shared else None)
    worker.ranks = Plus(0, size)
    first, second = worker._parameters[:2]
    first.grad = torch.full_like(first, 2.0)
    worker._add_up_gradients()
    found = [None if p.grad is None else p.grad.unique().item() for p in (first, second)]
    assert found == expected


class Gathered(ShardedPolicy):
    """Records its calls. A pass returns `found`."""

    def __init__(self, *found):
        nn.Module.__init__(self)
        self.model, self.found, self.calls = tiny_policy(), found, []

    def forward(self, *args, **kwargs):
        self.calls.append(("pass", args, kwargs))
        return self.found

    def reshard(self):
        self.calls.append("reshard")


@pytest.mark.parametrize("gradient", [False, True])
def test_weights_are_sharded_again_behind_a_pass_that_no_backward_pass_follows(gradient):
    states = torch.ones(2, 3)
    for own, factor in ((None, 1.0), (SimpleNamespace(everyone=lambda states: 2 * states), 2.0)):
        policy = Gathered(states, own)
        with torch.no_grad():
            assert torch.equal(hidden_states(policy, "ids", wanted_BT="wanted"), factor * states)
        assert policy.calls == [("pass", ("ids",), {"hidden": True, "wanted_BT": "wanted"}), "reshard"]
    policy = Gathered(states, 2 * states)
    with torch.set_grad_enabled(gradient):
        output = score(policy, "ids", temperature=1.0)
    assert output.log_probs_BT is states and torch.equal(output.entropy_BT, 2 * states)
    assert policy.calls == [("pass", ("ids",), {"temperature": 1.0})] + ["reshard"] * (not gradient)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "shared"), [(2, 1, False), (1, 2, True), (2, 3, False)])
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks, tmp_path, before, after, shared):
    options = OPTIONS | {"ppo_epochs": 1, "shared": shared}

    def run(size, function, *args):
        return function(ALONE, *args, **options) if size == 1 else ranks(size)(function, *args, **options)[0]

    state = run(before, train_critic, batches(1), tmp_path)[2]
    tensors = state.pop("tensors")
    loaded = run(after, resume_critic, state, tmp_path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in loaded)
    whole = run(after, resume_critic, {**state, "tensors": tensors}, None)
    assert all(torch.equal(whole[name], tensors[name]) for name in tensors)


def test_sharded_checkpoint_that_are_missing_are_named_as_the_critics(tmp_path):
    worker = critic()
    with pytest.raises(CheckpointError, match=r"no shards of the critic \(critic/.metadata\)"):
        worker.load_checkpoint(worker.progress(), tmp_path, "critic")


def test_the_columns_that_a_critic_reads_are_sent_to_other_processes():
    from verl_mt.extensions.cluster.workers import ray_group

    batch = batches(1)[0].select(*ray_group._SENT, strict=False)
    assert {col.VALUES, col.RETURNS} <= set(batch.keys())
    critic().update(batch)
