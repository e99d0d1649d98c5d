"""Only the most uncertain tokens have a policy loss."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from actor_toys import REWARDS, make_batch, tiny_policy
from sharded_jobs import one_update

from verl_mt.algorithms.masked import at_least_quantile
from verl_mt.data import batch as col
from verl_mt.workers.micro_batch import compute_log_probs
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.sharding import ALONE


def entropies(batch):
    rows = torch.arange(len(batch))
    policy, share = copy.deepcopy(tiny_policy()), RankBatch.alone(batch)
    return compute_log_probs(policy, share, rows, temperature=1.0, max_tokens=999, entropy=True)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_the_quantile_is_numpys(share, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    mask = torch.ones(size, dtype=torch.bool)
    mask[size // 2 + 1 :: 3] = False
    bound = np.quantile(values[mask].numpy(), share)
    assert at_least_quantile(values, mask, share).tolist() == (mask & (values >= float(bound) - 1e-6)).tolist()
    assert not at_least_quantile(values, torch.zeros_like(mask), share).any()


@pytest.mark.parametrize("quantile", [0.2, 0.6])
def test_tokens_below_the_quantile_have_no_policy_loss_and_the_others_their_own(quantile):
    batch = make_batch(REWARDS)
    sampled = batch[col.LOSS_MASK] & batch[col.SAMPLED]
    found = entropies(batch)
    kept = at_least_quantile(found, sampled, 1 - quantile)
    assert 0 < kept.sum() < sampled.sum()
    cleared = batch.clone()
    cleared[col.ADVANTAGES] = torch.where(kept, cleared[col.ADVANTAGES], 0.0)
    by_hand = one_update(ALONE, cleared, grad_clip=0.0, skip_zero_advantage=False)["gradients"][0]
    by_key = one_update(ALONE, batch, grad_clip=0.0, top_entropy_quantile=quantile)["gradients"][0]
    for name, gradient in by_hand.items():
        torch.testing.assert_close(by_key[name], gradient, rtol=1e-5, atol=1e-7)


def test_no_split_into_micro_batches_changes_which_tokens_they_are():
    batch = make_batch(REWARDS)
    whole, one_by_one = (
        one_update(ALONE, batch.clone(), grad_clip=0.0, top_entropy_quantile=0.3, ppo_micro_batch_size=size)
        for size in (None, 1)
    )
    for name, gradient in whole["gradients"][0].items():
        torch.testing.assert_close(one_by_one["gradients"][0][name], gradient, rtol=1e-4, atol=1e-6)


def test_with_one_ratio_for_a_trajectory_its_loss_is_scaled_by_the_share_of_such_tokens():
    batch = make_batch(REWARDS, records=2)
    sampled = batch[col.LOSS_MASK] & batch[col.SAMPLED]
    kept = at_least_quantile(entropies(batch), sampled, 0.7)
    scaled = batch.clone()
    owner = batch[col.TRAJECTORY_INDEX]
    for name in owner.unique():
        rows = owner == name
        scaled[col.ADVANTAGES][rows] *= kept[rows].sum() / sampled[rows].sum()
    options = {"grad_clip": 0.0, "policy_loss": {"loss_mode": "gspo"}, "clip_ratio": 0.5}
    by_hand = one_update(ALONE, scaled, **options)["gradients"][0]
    by_key = one_update(ALONE, batch, **options, top_entropy_quantile=0.3)["gradients"][0]
    for name, gradient in by_hand.items():
        torch.testing.assert_close(by_key[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_with_micro_batches_choose_the_tokens_that_one_process_does(ranks):
    batch = make_batch(REWARDS)
    options = {"grad_clip": 0.0, "top_entropy_quantile": 0.3}
    whole = one_update(ALONE, batch.clone(), **options)["gradients"][0]
    for own in ranks(2)(one_update, batch.clone(), ppo_micro_batch_size=2, **options):
        assert own["gradients"][0].keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(own["gradients"][0][name], gradient, rtol=1e-3, atol=1e-5)
