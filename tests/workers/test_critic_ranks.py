"""A critic over several processes is the critic of one."""

from __future__ import annotations

import copy

import pytest
import torch
from actor_toys import REWARDS
from critic_toys import batch_with_values, critic
from sharded_jobs import resume_critic, train_critic

from verl_mt.data import batch as col
from verl_mt.errors import CheckpointError
from verl_mt.workers.sharding import ALONE

OPTIONS = {"ppo_mini_batch_size": 1, "ppo_epochs": 2, "ppo_micro_batch_size": 2}


def batches(count: int = 2):
    """The last prompt has fewer rows than three ranks could share: some run dummies."""
    return [batch_with_values(critic(), [*REWARDS[:2], [1.0]], seed=seed, records=2) for seed in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_values_metrics_and_weights_are_those_of_one_process(ranks, size, shared):
    data = batches()
    values, metrics, state = train_critic(ALONE, copy.deepcopy(data), shared=shared, **OPTIONS)
    for own in ranks(size)(train_critic, data, shared=shared, **OPTIONS):
        torch.testing.assert_close(own[0], values, atol=1e-5, rtol=1e-5)
        for expected, got in zip(metrics, own[1]):
            # A value at the edge of the clip falls to one side or the other by rounding.
            assert got.pop("critic/vf_clipfrac") == pytest.approx(expected["critic/vf_clipfrac"], abs=0.05)
            assert got == pytest.approx({k: v for k, v in expected.items() if "clipfrac" not in k}, abs=2e-4, rel=2e-3)
        assert own[2]["num_updates"] == state["num_updates"] == 12
        for name, tensor in state["tensors"].items():
            torch.testing.assert_close(own[2]["tensors"][name], tensor, atol=2e-3, rtol=1e-2, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks, tmp_path, before, after, shared):
    def run(size, function, *args):
        return (
            function(ALONE, *args, shared=shared, **OPTIONS)
            if size == 1
            else ranks(size)(function, *args, shared=shared, **OPTIONS)[0]
        )

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
    from verl_mt.workers import ray_group

    batch = batches(1)[0].select(*ray_group._SENT, strict=False)
    assert {col.VALUES, col.RETURNS} <= set(batch.keys())
    critic().update(batch)
