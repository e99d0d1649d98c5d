"""What each rank receives of a batch: its own rows, and a few numbers of the others."""

from __future__ import annotations

import math

import pytest
import torch
from actor_toys import REWARDS, hand_made, make_batch, tiny_policy, worker
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_jobs import one_update, update_of_a_share
from tables import one_of_each
from tensordict import TensorDict

from verl_mt.data import batch as col
from verl_mt.workers import rank_batch as module
from verl_mt.workers.actor import against_sampler
from verl_mt.workers.rank_batch import BatchStats, RankBatch, assemble, deal, for_whole, rank_batch_of
from verl_mt.workers.sharding import ALONE, Ranks

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


@pytest.mark.slow
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
        assert share.number_b.tolist() == (share.stats.part_B == part).nonzero().squeeze(1).tolist()
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
    stats = deal(batch, Ranks(0, 4), plan)[0].stats
    assert [rows.tolist() for rows in actor._mini_batches(batch[col.PROMPT_INDEX])] == [rows.tolist() for rows in plan]
    for rows in plan:
        tokens = [int(stats.num_tokens_B[rows][stats.part_B[rows] == part].sum()) for part in range(4)]
        assert max(tokens) <= 1.05 * sum(tokens) / 4


def test_rows_that_may_be_skipped_burden_no_rank_in_the_place_of_others():
    batch = make_batch([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
    stats = deal(batch, Ranks(0, 2))[0].stats
    for moves in (True, False):
        own = stats.moves_B == moves
        assert [int((stats.part_B[own] == part).sum()) for part in (0, 1)] == [2, 2]


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
    stats = BatchStats.of(batch)
    known = [value for value in vars(stats).values() if isinstance(value, torch.Tensor)]
    assert sum(value.nbytes for value in known) <= 58 * len(batch) and all(value.ndim == 1 for value in known)


def test_one_rank_has_the_batch_itself():
    batch = make_batch(REWARDS)
    share = rank_batch_of(batch, ALONE)
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
    share = RankBatch(
        BatchStats.of(make_batch(REWARDS)), make_batch(REWARDS)[torch.tensor([2, 5, 7])], torch.tensor([2, 5, 7])
    )
    assert share.own(torch.tensor([7, 0, 2])).tolist() == [2, 0]


NAN = math.nan


def four_rows(**given):
    """Of 4, 3, 2 and 1 tokens; the last is out of the loss, the third moves nothing."""
    batch = hand_made(
        [[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]],
        [[0, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]],
        attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool(),
        prompt_index=[7, 7, 8, 8],
        trajectory_index=[2, 2, 3, 4],
        has_log_probs=[True, False, True, False],
        **given,
    )
    if col.ADVANTAGES not in given:
        batch[col.ADVANTAGES] = torch.tensor([[0.0, 1, 0, 0], [0, 0, -1, 0], [9, 0, 9, 9], [1, 1, 1, 1]])
    return batch


def numbers_of(stats):
    return {name: value.tolist() for name, value in vars(stats).items() if name != "width"}


def test_the_numbers_of_every_row():
    batch = four_rows()
    stats = BatchStats.of(batch)
    assert stats.width == BatchStats.of(batch[:3]).width == 4 and len(stats) == 4
    expected = {
        "num_tokens_B": [4, 3, 2, 1],
        "num_in_loss_B": [3, 2, 1, 0],
        "num_sampled_B": [2, 2, 0, 0],
        "moves_B": [True, True, False, False],
        "has_log_probs_B": [True, False, True, False],
        "prompt_B": [7, 7, 8, 8],
        "trajectory_B": [2, 2, 3, 4],
        "weighed_B": [2, 2, 3, 4],
        "part_B": [0, 0, 0, 0],
    }
    assert numbers_of(stats) == expected
    batch[col.EXECUTION_INDEX] = torch.tensor([5, 5, 5, 6])
    assert numbers_of(BatchStats.of(batch)) == expected | {"weighed_B": [5, 5, 5, 6]}


def test_what_a_critics_batch_does_not_say():
    """All of the loss was sampled, and no row moves the policy."""
    told = numbers_of(BatchStats.of(four_rows().exclude(col.SAMPLED, col.ADVANTAGES, col.HAS_LOG_PROBS)))
    assert told["num_sampled_B"] == [3, 2, 1, 0] and told["moves_B"] == [False] * 4
    assert told["has_log_probs_B"] == [True, True, True, False]


def test_kinds_of_rows_are_dealt_one_after_the_other_the_largest_share_to_who_has_least():
    """Tokens 8, 7, 2 of the first kind: 8 and 9. Of the second 5 and 4; of the third 3 for who has least so far."""
    tokens = torch.tensor([5, 8, 7, 4, 2, 3])
    stats = BatchStats.of(make_batch([[0.0] * 6]))
    stats = BatchStats(**{**vars(stats), "num_tokens_B": tokens})
    dealt = stats.dealt(Ranks(0, 2), torch.tensor([1, 0, 0, 1, 0, 2]))
    # First 7 and 2 for part 0 and 8 for part 1; then 5 for part 1 and 4 for part 0: 13 each; the last goes to part 0.
    assert dealt.part_B.tolist() == [1, 1, 0, 0, 0, 0]
    assert stats.part_B.tolist() == [0] * 6 and torch.equal(dealt.num_tokens_B, tokens)
    assert Ranks(0, 4, 2).num_parts == 2
    assert stats.dealt(Ranks(0, 4, 2), torch.zeros(6, dtype=torch.int64)).part_B.unique().tolist() == [0, 1]


@pytest.mark.parametrize("sequence", [1, 2])
def test_shares_of_a_batch_are_cut_to_their_longest_row(sequence):
    batch = four_rows()
    shares = deal(batch, Ranks(0, 2 * sequence, sequence), [torch.tensor([0, 1]), torch.tensor([2, 3])])
    assert [share.number_b.tolist() for share in shares] == [[0, 2], [1, 3]]
    assert [share.rows[col.LOSS_MASK].shape for share in shares] == [(2, 4), (2, 3)]
    assert [share.rows[col.PROMPT_INDEX].tolist() for share in shares] == [[7, 8], [7, 8]]
    assert shares[1].rows[col.LOSS_MASK].tolist() == [[False, True, True], [False] * 3]
    assert all(column.is_contiguous() for column in shares[1].rows.values())
    assert [share.ranks.size for share in shares] == [2 * sequence] * 2
    empty = deal(batch[:1], Ranks(0, 2))[1]
    assert len(empty.number_b) == 0 and empty.rows[col.LOSS_MASK].shape == (0, 1)


def test_rows_that_never_pass_those_without_advantage_and_the_others_are_dealt_by_themselves():
    """A long and a short row of each kind: each of two ranks gets one of them."""
    rows = [[1, 1], [1, 1], [1, 0], [1, 0], [0, 0], [0, 0]]
    moves = torch.tensor([[1.0, 0], [1, 0], [0, 0], [0, 0], [1, 1], [1, 1]])
    batch = hand_made(rows, advantages=moves, attention_mask=torch.tensor([[1, 1], [1, 0]] * 3).bool())
    for minis in ((), [torch.arange(6)], [torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5])]):
        part_B = deal(batch, Ranks(0, 2), minis)[0].stats.part_B
        if len(minis) < 2:
            assert [sorted(part_B[[k, k + 1]].tolist()) for k in (0, 2, 4)] == [[0, 1]] * 3
        else:
            assert part_B.bincount().tolist() == [3, 3]


class OfTwo(Ranks):
    """Ranks that share nothing: what this one would give is the sum."""

    def sum(self, value):
        return value.clone()


def part_of_two(rank: int, sequence: int = 1) -> RankBatch:
    batch = four_rows()
    stats = BatchStats.of(batch)
    rows = batch[torch.tensor([1, 3])]
    for name in (col.LOSS_MASK, col.ADVANTAGES):
        rows[name] = rows[name][:, :3]
    return RankBatch(stats, rows, torch.tensor([1, 3]), OfTwo(rank, 2, sequence))


def test_what_a_rank_has_of_some_rows_is_put_where_they_are_and_filled_up():
    share = part_of_two(1)
    values = torch.tensor([[1.0, 2, 3], [NAN, NAN, NAN]])
    found = share.together(values, torch.tensor([3, 0, 1]))
    torch.testing.assert_close(found, torch.tensor([[NAN] * 4, [0.0] * 4, [1.0, 2, 3, 0]]), equal_nan=True)
    assert share.together(torch.tensor([5, 6]), torch.tensor([3, 0])).tolist() == [6, 0]
    truths = share.together(share.rows[col.LOSS_MASK], torch.tensor([1]))
    assert truths.tolist() == [[False, True, True, False]] and truths.dtype == torch.bool
    second_of_a_sequence = part_of_two(1, sequence=2)
    assert second_of_a_sequence.together(torch.tensor([5, 6]), torch.tensor([3, 0])).tolist() == [0, 0]


def test_what_was_worked_out_for_some_rows_comes_back_to_who_has_them():
    share = part_of_two(1)
    values = torch.arange(12.0).reshape(3, 4)
    assert share.back(values, torch.tensor([3, 0, 2])).tolist() == [[0, 0, 0], [0, 1, 2]]
    assert share.back(torch.tensor([5, 6, 7]), torch.tensor([3, 0, 1])).tolist() == [7, 5]


def test_a_share_of_a_batch_that_every_rank_has():
    batch = four_rows()
    asked = []

    def mini_batches(prompt_B):
        asked.append(prompt_B.tolist())
        return [torch.tensor([0, 1]), torch.tensor([2, 3])]

    share = rank_batch_of(batch, Ranks(3, 4, 2), mini_batches)
    assert asked == [[7, 7, 8, 8]] and share.number_b.tolist() == [1, 3] and share.ranks == Ranks(3, 4, 2)
    assert rank_batch_of(batch, Ranks(1, 2)).number_b.tolist() == deal(batch, Ranks(0, 2))[1].number_b.tolist()


def test_a_column_of_the_whole_batch_is_made_of_what_the_ranks_find():
    batch = four_rows()
    assert torch.equal(for_whole(batch, ALONE, lambda share: share.rows[col.ADVANTAGES] + 1), batch[col.ADVANTAGES] + 1)
    found = for_whole(batch, OfTwo(0, 2), lambda share: torch.ones(share.rows[col.LOSS_MASK].shape))
    own = rank_batch_of(batch, OfTwo(0, 2)).number_b
    assert found.shape == (4, 4) and found.any(1).nonzero().squeeze(1).tolist() == own.tolist()


def test_a_column_is_assembled_of_what_parts_found():
    batch = four_rows()
    shares = deal(batch, Ranks(0, 2), [torch.tensor([0, 1]), torch.tensor([2, 3])])
    found = [torch.tensor([[1.0, 1, 1, 1], [NAN, 2, 2, 2]]), torch.tensor([[3.0, 3, 3], [NAN, 4, 4]])]
    expected = torch.tensor([[1, 1, 1, 1], [3, 3, 3, 0], [NAN, 2, 2, 2], [NAN, 4, 4, NAN]])
    torch.testing.assert_close(assemble(batch, shares, found), expected, equal_nan=True)
    whole_numbers = assemble(batch, shares, [torch.ones(2, 4).long(), torch.ones(2, 3).long()])
    assert whole_numbers.tolist() == [[1] * 4, [1, 1, 1, 0], [1] * 4, [1, 1, 1, 0]]


def test_a_column_of_the_whole_batch_is_on_its_device(monkeypatch):
    share = RankBatch.alone(four_rows())
    monkeypatch.setattr(module, "rank_batch_of", lambda batch, ranks: share)
    elsewhere = TensorDict({"x": torch.zeros(4, device="meta")}, batch_size=[4], device="meta")
    assert for_whole(elsewhere, ALONE, lambda own: own.rows[col.ADVANTAGES]).device.type == "meta"


def test_a_rank_that_has_all_rows_takes_values_as_they_are():
    share = RankBatch.alone(four_rows())
    assert share.together(torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), torch.tensor([2, 0])).tolist() == [
        [5, 6],
        [1, 2],
    ]
    batch = four_rows()
    assert torch.equal(assemble(batch, [share], [batch[col.ADVANTAGES]]), batch[col.ADVANTAGES])
