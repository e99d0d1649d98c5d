"""What each rank receives of a batch: its own rows, and a few numbers of the others."""

from __future__ import annotations

import pytest
import torch
from actor_toys import REWARDS, make_batch, tiny_policy, worker
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_jobs import one_update, update_of_a_share
from tables import one_of_each

from verl_mt.data import batch as col
from verl_mt.workers.actor import against_sampler
from verl_mt.workers.sharding import ALONE, Ranks
from verl_mt.workers.shares import Census, Share, assemble, deal, share_of

MINI_BATCHES = {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "lr": 1e-3}
DECIDED_OVER_A_MINI_BATCH = {
    "gspo": {"policy_loss": {"loss_mode": "gspo"}},
    "clip_cov": {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": -1.0}},
    "kl_cov": {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2}},
    "real": {"policy_loss": {"loss_mode": "real"}},
    "top entropy": {"top_entropy_quantile": 0.3},
    "sequence masks": {"correction": {"off_policy_sequence_mask_delta": 0.05}},
    "truncated weights": {"correction": {"rollout_is": "sequence", "rollout_is_batch_normalize": True}},
}

KIND = {
    "gspo": "ratios of sequences",
    "clip_cov": "chosen tokens",
    "kl_cov": "chosen tokens",
    "real": "groups",
    "top entropy": "entropies",
    "sequence masks": "correction",
    "truncated weights": "correction",
}


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5), min_size=1, max_size=4),
    size=st.integers(2, 5),
    seed=st.integers(0, 9),
)
def test_every_row_has_one_owner_and_columns_come_back_whole(groups, size, seed):
    batch = make_batch(groups, seed=seed, records=2)
    shares = deal(batch, Ranks(0, size))
    assert sorted(torch.cat([share.number_b for share in shares]).tolist()) == list(range(len(batch)))
    for name in (col.INPUT_IDS, col.ADVANTAGES, col.LOSS_MASK):
        whole = assemble(batch, shares, [share.rows[name] for share in shares])
        assert torch.equal(whole[batch[col.ATTENTION_MASK]], batch[name][batch[col.ATTENTION_MASK]])
    for part, share in enumerate(shares):
        assert share.number_b.tolist() == (share.census.part_B == part).nonzero().squeeze(1).tolist()
        real = share.rows[col.ATTENTION_MASK]
        assert len(real) == 0 or bool(real.any(0).all())  # no column that all of its rows pad


def test_a_row_that_was_not_computed_is_nan_to_its_end():
    batch = make_batch(REWARDS)
    shares = deal(batch, Ranks(0, 2))
    short = min(shares, key=lambda share: share.rows.to_tensordict()[col.INPUT_IDS].shape[1])
    found = [torch.zeros(share.rows[col.INPUT_IDS].shape) for share in shares]
    found[shares.index(short)][0] = torch.nan
    whole = assemble(batch, shares, found)
    assert torch.equal(whole.isnan().all(1), whole.isnan().any(1)) and int(whole.isnan().any(1).sum()) == 1


def test_in_each_mini_batch_of_the_first_epoch_every_part_has_about_as_many_tokens():
    batch = make_batch([[1.0, 0.0] * 8] * 16)
    actor = worker(tiny_policy(), ppo_mini_batch_size=4)
    before = actor._generator.get_state()
    plan = actor.first_mini_batches(batch[col.PROMPT_INDEX])
    assert torch.equal(actor._generator.get_state(), before)  # nothing was drawn
    census = deal(batch, Ranks(0, 4), plan)[0].census
    assert [rows.tolist() for rows in actor._mini_batches(batch[col.PROMPT_INDEX])] == [rows.tolist() for rows in plan]
    for rows in plan:
        tokens = [int(census.num_tokens_B[rows][census.part_B[rows] == part].sum()) for part in range(4)]
        assert max(tokens) <= 1.05 * sum(tokens) / 4


def test_rows_that_may_be_skipped_burden_no_rank_in_the_place_of_others():
    batch = make_batch([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
    census = deal(batch, Ranks(0, 2))[0].census
    for moves in (True, False):
        own = census.moves_B == moves
        assert [int((census.part_B[own] == part).sum()) for part in (0, 1)] == [2, 2]


def test_what_a_rank_receives_falls_with_their_number():
    """Tokens of the other ranks' rows do not travel: of each row there are 58 bytes."""
    rewards = [[1.0, 0.0] * 16] * 8
    batch = make_batch(rewards)

    def tokens_received(size: int) -> int:
        return max(
            sum(share.rows[name].numel() for name in (col.INPUT_IDS, col.ADVANTAGES, col.LOSS_MASK))
            for share in deal(batch, Ranks(0, size))
        )

    assert tokens_received(8) * 8 <= 1.2 * tokens_received(1)
    census = Census.of(batch)
    known = [value for value in vars(census).values() if isinstance(value, torch.Tensor)]
    assert sum(value.nbytes for value in known) <= 58 * len(batch) and all(value.ndim == 1 for value in known)


def test_one_rank_has_the_batch_itself():
    batch = make_batch(REWARDS)
    share = share_of(batch, ALONE)
    assert share.rows is batch
    rows = torch.tensor([4, 1])
    assert torch.equal(share.together(batch[col.ADVANTAGES], rows), batch[col.ADVANTAGES][rows])
    assert torch.equal(share.back(batch[col.ADVANTAGES][rows], rows)[rows], batch[col.ADVANTAGES][rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "size", "sequence"),
    [
        *one_of_each(((loss, 2, 1) for loss in DECIDED_OVER_A_MINI_BATCH), kind=lambda case: KIND[case[0]]),
        *one_of_each(((loss, 4, 2) for loss in DECIDED_OVER_A_MINI_BATCH), kind=lambda case: case[0] == "gspo"),
    ],
)
def test_ranks_that_have_their_own_rows_alone_learn_what_one_process_learns(ranks, loss, size, sequence):
    """What a driver does: deal, let each rank train on its rows, put the columns together."""
    options = {"ppo_micro_batch_size": 2, **DECIDED_OVER_A_MINI_BATCH[loss]}
    batch = make_batch(REWARDS, records=2)
    generator = torch.Generator().manual_seed(1)
    batch[col.ROLLOUT_LOG_PROBS] = batch[col.ROLLOUT_LOG_PROBS] + 0.3 * torch.randn(
        batch[col.ROLLOUT_LOG_PROBS].shape, generator=generator
    )
    whole = batch.clone()
    expected = one_update(ALONE, whole, **options)
    shares = deal(batch, Ranks(0, size, sequence))
    told = ranks(size)(update_of_a_share, shares, sequence=sequence, **options)
    for own in told:
        assert own["gradients"].keys() == expected["gradients"][0].keys()
        for name, gradient in expected["gradients"][0].items():
            torch.testing.assert_close(own["gradients"][name], gradient, atol=5e-6, rtol=1e-4)
    filled = [own["filled"] for own in told[::sequence]]
    for name in (col.OLD_LOG_PROBS, col.CLIPPED):
        column = assemble(batch, shares, [of_part[name] for of_part in filled])
        inside = batch[col.LOSS_MASK]
        torch.testing.assert_close(column[inside], whole[name][inside], atol=1e-5, rtol=1e-5, equal_nan=True)
        batch[name] = column
    metrics = told[0]["metrics"] | against_sampler(batch, told[0]["correction"])
    assert metrics == pytest.approx(expected["metrics"], abs=1e-5, rel=1e-4)


@pytest.mark.slow
def test_mini_batches_and_epochs_end_in_the_same_weights_from_shares(ranks):
    batch = make_batch([*REWARDS, [1.0, 0.0, 0.5]])
    alone = worker(tiny_policy(), **MINI_BATCHES)
    plan = alone.first_mini_batches(batch[col.PROMPT_INDEX])
    alone.update(batch.clone())
    expected = dict(alone.module.named_parameters())
    for own in ranks(3)(update_of_a_share, deal(batch, Ranks(0, 3), plan), **MINI_BATCHES):
        for name, weight in own["weights"].items():
            torch.testing.assert_close(weight, expected[name].detach(), atol=1e-5, rtol=1e-4)


def test_a_share_says_where_it_has_rows_of_the_batch():
    share = Share(Census.of(make_batch(REWARDS)), make_batch(REWARDS)[torch.tensor([2, 5, 7])], torch.tensor([2, 5, 7]))
    assert share.own(torch.tensor([7, 0, 2])).tolist() == [2, 0]
