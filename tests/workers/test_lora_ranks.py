"""Low-rank adapters over several ranks: trained and frozen weights in one sharded layer."""

from __future__ import annotations

import pytest
import torch
from actor_toys import REWARDS, lora_policy, make_batch, tiny_policy, worker
from sharded_jobs import load_and_train, lora_reference, merged_weights, one_update, published_adapters, train_and_save
from tables import before_release

from verl_mt.data import batch as col
from verl_mt.modeling.lora import adapter_of, is_adapter
from verl_mt.modeling.weights import named_weights
from verl_mt.workers.sharded_checkpoint import stored_shapes
from verl_mt.workers.sharding import ALONE

pytestmark = pytest.mark.slow
OPTIONS = {"lora_rank": 4, "total_steps": 6}


def a_batch(seed: int = 0):
    batch = make_batch(REWARDS, seed=seed, records=2)
    batch[col.REF_LOG_PROBS] = torch.where(batch[col.LOSS_MASK], -3.1, 0.0)
    return batch


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 3),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, 2),
        ({"checkpointing": True}, 2),
        ({"ppo_micro_batch_size": 2}, 2),
    ],
    ids=["plain", "KL", "checkpointing", "micro-batches"],
)
def test_gradients_over_ranks_are_those_of_one_process(ranks, size, options):
    batch = a_batch()
    alone = {k: v for k, v in options.items() if k.startswith(("use_kl", "kl_"))}
    common = {"lora_rank": 4, "grad_clip": 0.5, "keep_weights": True}
    expected = one_update(ALONE, batch.clone(), **common, **alone)
    assert len(expected["gradients"][0]) == 28
    for got in ranks(size)(one_update, batch, **common, **options):
        torch.testing.assert_close(got["gradients"], expected["gradients"], atol=1e-5, rtol=1e-5)
        assert got["metrics"] == pytest.approx(expected["metrics"], abs=1e-5, rel=1e-4)
        for name, tensor in expected["weights"].items():
            if not is_adapter(name):
                assert torch.equal(got["weights"][name], tensor), f"{name} is frozen"


def test_a_rank_holds_optimizer_state_of_its_share_of_the_adapters_only(ranks):
    trained = sum(p.numel() for n, p in lora_policy().named_parameters() if is_adapter(n))
    for got in ranks(2)(one_update, a_batch(), lora_rank=4):
        assert got["bytes"][1] < 0.55 * 8 * trained + 4 * 28  # two moments, and a step count per tensor


def test_the_reference_of_sharded_adapters_is_the_base(ranks):
    batch = a_batch()
    expected = worker(tiny_policy()).compute_log_probs(batch)
    for before, after, trainable in ranks(2)(lora_reference, batch):
        torch.testing.assert_close(before, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(before, after), "an update has moved the reference"
        assert trainable == {True}


def test_merged_weights_gathered_from_ranks_are_those_of_one_process(ranks):
    expected = dict(named_weights(lora_policy()))
    got, nothing = ranks(2)(merged_weights)
    assert nothing is None and got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-6, rtol=1e-6)


def test_adapters_published_by_ranks_are_those_of_one_process(ranks):
    expected = dict(adapter_of(lora_policy()).named())
    got, nothing = ranks(2)(published_adapters)
    assert nothing == {} and got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        (2, 1, torch.float32),
        (1, 2, torch.bfloat16),
        (2, 3, torch.float32),
        before_release(2, 1, torch.bfloat16),
        before_release(1, 2, torch.float32),
        before_release(2, 3, torch.bfloat16),
    ],
)
def test_a_checkpoint_of_adapters_goes_on_with_another_number_of_ranks(ranks, tmp_path, before, after, dtype):
    options = {**OPTIONS, "dtype": dtype}

    def run(size, function, *args):
        return function(ALONE, *args, **options) if size == 1 else ranks(size)(function, *args, **options)[0]

    saved = run(before, train_and_save, [a_batch(0)], tmp_path)
    whole_state = saved.pop("tensors")
    assert stored_shapes(tmp_path).keys() == whole_state.keys()
    assert all(is_adapter(name) for name in whole_state)
    loaded, ahead = run(after, load_and_train, saved, tmp_path, [a_batch(1)])
    assert all(torch.equal(loaded[name], whole_state[name]) for name in whole_state)
    if dtype == torch.float32:
        _, expected = load_and_train(ALONE, {**saved, "tensors": whole_state}, None, [a_batch(1)], **options)
        for name, tensor in expected.items():
            torch.testing.assert_close(ahead[name], tensor, atol=1e-4, rtol=1e-2)
