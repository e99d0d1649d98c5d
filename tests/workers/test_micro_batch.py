"""Micro-batches: every row once, within limits, prompts together."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl_mt.data import batch as col
from verl_mt.workers.micro_batch import split_rows


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=12),
    max_tokens=st.integers(1, 60),
    max_rows=st.one_of(st.none(), st.integers(1, 4)),
    packed=st.booleans(),
)
def test_every_row_once_and_within_the_limits(rows, max_tokens, max_rows, packed):
    lengths = torch.tensor([length for length, _ in rows])
    mask = torch.arange(12) < lengths.unsqueeze(1)
    prompts = torch.tensor([prompt for _, prompt in rows])
    batch = TensorDict({col.ATTENTION_MASK: mask, col.PROMPT_INDEX: prompts}, batch_size=[len(rows)])
    parts = split_rows(batch, torch.arange(len(rows)), max_tokens=max_tokens, max_rows=max_rows, packed=packed)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(rows)))
    for part in parts:
        tokens = int(lengths[part].sum()) if packed else len(part) * int(lengths[part].max())
        assert len(part) == 1 or tokens <= max_tokens
        assert max_rows is None or len(part) <= max_rows


def test_rows_that_are_packed_fill_a_micro_batch_with_their_own_tokens_only():
    mask = torch.arange(100) < torch.tensor([[100], [10], [10], [10]])
    batch = TensorDict({col.ATTENTION_MASK: mask, col.PROMPT_INDEX: torch.zeros(4)}, batch_size=[4])
    sizes = [
        [len(part) for part in split_rows(batch, torch.arange(4), max_tokens=130, max_rows=None, packed=packed)]
        for packed in (False, True)
    ]
    assert sizes == [[3, 1], [4]]


def test_rows_of_a_prompt_stay_together():
    batch = TensorDict(
        {col.ATTENTION_MASK: torch.ones(6, 4), col.PROMPT_INDEX: torch.tensor([0, 1, 0, 1, 0, 1])}, batch_size=[6]
    )
    parts = split_rows(batch, torch.arange(6), max_tokens=12, max_rows=None)
    assert [batch[col.PROMPT_INDEX][p].unique().tolist() for p in parts] == [[0], [1]]
