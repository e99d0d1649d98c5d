"""Micro-batches: every row once, within limits, prompts together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from actor_toys import hand_made
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.modeling.log_probs import LogProbs
from verl_mt.workers import micro_batch
from verl_mt.workers.micro_batch import compute_log_probs, micro_batches, split_rows
from verl_mt.workers.rank_batch import BatchStats, RankBatch
from verl_mt.workers.sharding import Ranks


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=12),
    max_tokens=st.integers(1, 60),
    max_rows=st.one_of(st.none(), st.integers(1, 4)),
    packed=st.booleans(),
)
def test_every_row_once_and_within_the_limits(rows, max_tokens, max_rows, packed):
    lengths = torch.tensor([length for length, _ in rows])
    prompts = torch.tensor([prompt for _, prompt in rows])
    limits = {"max_tokens": max_tokens, "max_rows": max_rows, "packed": packed}
    parts = split_rows(lengths, prompts, torch.arange(len(rows)), **limits)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(rows)))
    for part in parts:
        tokens = int(lengths[part].sum()) if packed else len(part) * int(lengths[part].max())
        assert len(part) == 1 or tokens <= max_tokens
        assert max_rows is None or len(part) <= max_rows


def test_rows_that_are_packed_fill_a_micro_batch_with_their_own_tokens_only():
    lengths, prompts = torch.tensor([100, 10, 10, 10]), torch.zeros(4)
    sizes = [
        [len(p) for p in split_rows(lengths, prompts, torch.arange(4), max_tokens=130, max_rows=None, packed=packed)]
        for packed in (False, True)
    ]
    assert sizes == [[3, 1], [4]]


def test_rows_of_a_prompt_stay_together():
    prompts = torch.tensor([0, 1, 0, 1, 0, 1])
    parts = split_rows(torch.full((6,), 4), prompts, torch.arange(6), max_tokens=12, max_rows=None)
    assert [prompts[p].unique().tolist() for p in parts] == [[0], [1]]


def test_micro_batches_in_numbers():
    """Prompts by their longest row, then by number; rows of a prompt by length, then by number."""
    lengths, prompts = torch.tensor([5, 2, 9, 3, 3, 4]), torch.tensor([1, 1, 0, 3, 3, 2])
    rows = torch.arange(6)

    def parts(max_tokens, max_rows=None, packed=False, rows=rows):
        limits = {"max_tokens": max_tokens, "max_rows": max_rows, "packed": packed}
        return [part.tolist() for part in split_rows(lengths, prompts, rows, **limits)]

    assert parts(999) == [[3, 4, 5, 1, 0, 2]]
    assert parts(999, 2) == [[3, 4], [5, 1], [0, 2]]
    assert parts(12) == [[3, 4, 5], [1, 0], [2]], "three rows of four tokens are twelve"
    assert parts(11) == [[3, 4], [5, 1], [0], [2]]
    assert parts(12, packed=True) == [[3, 4, 5, 1], [0], [2]]
    assert parts(11, packed=True) == [[3, 4, 5], [1, 0], [2]]
    assert parts(8, rows=torch.tensor([2, 0])) == [[0], [2]], "a longer row is alone"
    assert parts(8, rows=torch.tensor([], dtype=torch.int64)) == []
    none = split_rows(torch.tensor([1, 0]), torch.tensor([0, 1]), torch.arange(2), max_tokens=9, max_rows=None)
    assert [part.tolist() for part in none] == [[1, 0]], "a row without tokens is the shortest"


@pytest.mark.parametrize(
    ("rank", "sequence", "expected"),
    [(0, 1, [[1], [0]]), (1, 1, [[0], None]), (2, 1, [None, None]), (0, 3, [[0, 1], [2]]), (2, 3, [[0, 1], [2]])],
)
def test_every_rank_has_as_many_micro_batches_and_dummies_at_the_end(rank, sequence, expected):
    """The first rank has two rows of four tokens, the second one, the third none. Ranks of one sequence have all rows,
    and take three times the tokens."""
    batch = hand_made([[1, 1, 1, 1]] * 3 + [[1, 0, 0, 0]])
    stats = BatchStats.of(batch)
    stats = replace(stats, part_B=torch.tensor([0, 0, 1, 0]) if sequence == 1 else torch.zeros(4, dtype=torch.int64))
    owned = torch.tensor([[0, 1, 3], [2], []][rank] if sequence == 1 else [0, 1, 2, 3], dtype=torch.int64)
    share = RankBatch(stats, batch[owned], owned, Ranks(rank, 3, sequence))
    found = micro_batches(share, torch.tensor([1, 0, 2]), max_tokens=4 if sequence == 1 else 3, max_rows=None)
    expected = [[0], [1]] if (rank, sequence) == (0, 1) else expected
    assert [None if part is None else part.tolist() for part in found] == expected
    one_by_one = micro_batches(share, torch.tensor([1, 0, 2]), max_tokens=999, max_rows=1)
    assert len(one_by_one) == (2 if sequence == 1 else 3)


def test_rows_out_of_the_loss_do_not_pass_and_rows_not_asked_for_are_unknown(monkeypatch):
    passed = []

    def score(module, ids, real, *, wanted_BT, temperature, with_entropy, media):
        passed.append((ids.tolist(), temperature, with_entropy, media))
        return LogProbs(-ids.float(), 2 * ids.float())

    monkeypatch.setattr(micro_batch, "packs", lambda module: False)
    monkeypatch.setattr(micro_batch, "score", score)
    batch = hand_made([[0, 1], [0, 0], [0, 1], [1, 1]], input_ids=torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]))
    rows, options = torch.tensor([0, 1, 3]), {"temperature": 0.5, "max_tokens": 99, "max_rows": 1}
    for entropy, factor in ((False, -1), (True, 2)):
        found = compute_log_probs(torch.nn.Module(), RankBatch.alone(batch), rows, entropy=entropy, **options)
        expected = torch.tensor([[1.0, 2], [0, 0], [math.nan, math.nan], [7, 8]]) * factor
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert passed == [([[1, 2]], 0.5, entropy, None), ([[7, 8]], 0.5, entropy, None)]
        passed.clear()


def test_a_rank_without_rows_takes_part_in_passes_for_log_probs(monkeypatch):
    dummies = []
    monkeypatch.setattr(micro_batch, "packs", lambda module: False)
    monkeypatch.setattr(micro_batch, "micro_batches", lambda *args, **limits: [None, None])
    monkeypatch.setattr(micro_batch, "dummy_pass", lambda *args: dummies.append(args))
    batch, module = hand_made([[0, 1]]), torch.nn.Module()
    found = compute_log_probs(module, RankBatch.alone(batch), torch.tensor([0]), temperature=1.0, max_tokens=9)
    assert found.isnan().all() and dummies == [(module, torch.device("cpu"))] * 2
