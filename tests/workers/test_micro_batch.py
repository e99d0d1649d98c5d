"""Micro-batches: every row once, within limits, prompts together."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
