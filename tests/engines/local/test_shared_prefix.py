"""Decoding rows that begin alike: who shares what, and the same attention as without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_models import assert_exact, request
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batching import Driver, ids

from verl_mt.engines.local import shared_prefix
from verl_mt.engines.local.model_runner import KVCache, StepAttention
from verl_mt.engines.local.shared_prefix import SharedPrefix, find_shared_prefix

BYTES = shared_prefix.WORTH_SHARING // 100
"""Of a position, so that a hundred saved positions are worth it."""


def rows_of_groups(*prompts: tuple[int, int], system: int = 40, length: int = 200) -> np.ndarray:
    """[S, length] ids: groups of (rows, prompt's length) after one system prompt; what follows differs."""
    rng = np.random.default_rng(0)
    beginning, rows = rng.integers(1, 1000, system), []
    for count, size in prompts:
        prompt = np.concatenate([beginning, rng.integers(1, 1000, size - system)])
        rows += [np.concatenate([prompt, rng.integers(1, 1000, length - size)]) for _ in range(count)]
    return np.stack(rows)


def found(table: np.ndarray, positions: int | list[int], rows: list[int] | None = None) -> SharedPrefix | None:
    rows_n = np.arange(len(table)) if rows is None else np.array(rows)
    return find_shared_prefix(table, rows_n, np.broadcast_to(np.array(positions), rows_n.shape), BYTES)


def test_the_samples_of_a_prompt_share_it_where_the_system_prompt_is_short():
    prefix = found(rows_of_groups((8, 100), (8, 110), (8, 120)), 150)
    assert prefix is not None and prefix.length == 96
    assert prefix.first.tolist() == [0, 8, 16]
    assert prefix.members.tolist() == [list(range(start, start + 8)) for start in (0, 8, 16)]


def test_rows_of_different_prompts_share_the_system_prompt():
    prefix = found(rows_of_groups(*[(1, 60)] * 30), 70)
    assert prefix is not None and prefix.length == 32
    assert prefix.members.tolist() == [list(range(30))]


def test_groups_of_unequal_size_and_rows_anywhere_in_the_cache():
    table = rows_of_groups((4, 100), (1, 100), (9, 100))
    rows = [0, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13]
    prefix = found(table, 130, rows)
    assert prefix is not None and prefix.length == 96
    assert prefix.first.tolist() == [0, 4, 5]
    assert prefix.members.flatten()[prefix.place].tolist() == list(range(len(rows)))


@pytest.mark.parametrize(
    ("table", "positions"),
    [
        (rows_of_groups((8, 100)), [12, *[150] * 7]),
        (rows_of_groups((8, 20), system=10), 150),
        (rows_of_groups((2, 150)), 160),
        (rows_of_groups((1, 150)), 160),
        (rows_of_groups(*[(1, 100)] * 8, system=0), 150),
    ],
    ids=["a row is short", "little in common", "two rows", "one row", "nothing in common"],
)
def test_where_too_little_would_be_saved_nothing_is_shared(table, positions):
    assert found(table, positions) is None


def test_no_rows_share_nothing():
    assert found(rows_of_groups((8, 100)), [], []) is None


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 9), st.integers(41, 120)), min_size=1, max_size=6),
    seed=st.integers(0, 999),
)
def test_whatever_is_shared_the_rows_of_a_class_agree_in_it(groups, seed):
    table, rng = rows_of_groups(*groups), np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(len(table)) < 0.8)
    positions = rng.integers(60, 190, len(rows))
    prefix = find_shared_prefix(table, rows, positions, BYTES)
    if prefix is None:
        return
    assert 0 < prefix.length <= positions.min()
    assert prefix.members.flatten()[prefix.place].tolist() == list(range(len(rows)))
    for first, members in zip(prefix.first, prefix.members):
        assert (table[rows[members], : prefix.length] == table[first, : prefix.length]).all()
    saved = (len(rows) - 2 * len(prefix.first)) * prefix.length
    assert saved > shared_prefix.WORTH_SHARING / BYTES


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("rows", [list(range(70)), [r for r in range(70) if r % 7]], ids=["all rows", "with holes"])
def test_the_attention_is_the_one_of_rows_that_read_their_own_copy(rows, scale, dtype, close):
    torch.manual_seed(0)
    table = rows_of_groups((20, 90), (1, 80), (49, 100))
    lengths = np.random.default_rng(0).integers(100, 190, len(table))
    lengths[:32] += 4  # the blocks differ
    rows_n = np.array(rows)
    prefix = found(table, lengths[rows_n].tolist(), rows)
    assert prefix is not None and len(prefix.first) > 1
    heads, share, dim, layer = 3, 2, 16, 0
    cache = KVCache(len(table), 200)
    cache.reserve(len(table), 200)
    by_id = torch.randn(2, 1000, heads, dim)
    for row in range(len(table)):
        # Keys and values of a position are those of its id, so that rows that begin alike agree.
        positions = torch.arange(200)
        kv = by_id[:, torch.from_numpy(table[row])].to(dtype)
        cache.write(layer, torch.full((200,), row), positions, (kv[0], kv[1]))
    query = torch.randn(1, heads * share, len(rows), dim).to(dtype)
    new = torch.randn(2, 1, heads, len(rows), dim).to(dtype)
    plain, shared = (
        StepAttention(cache, rows_n, lengths[rows_n], len(rows), torch.device("cpu"), used).attend(
            layer, query, (new[0], new[1]), scale
        )
        for used in (None, prefix)
    )
    torch.testing.assert_close(shared, plain, atol=close, rtol=0)


def test_keys_that_are_longer_than_values_are_not_shared():
    cache = KVCache(4, 64)
    assert not cache.can_share and cache.position_bytes == 0
    cache.reserve(4, 64)
    row, position = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    cache.write(0, row, position, (torch.randn(1, 2, 8), torch.randn(1, 2, 8)))
    assert cache.can_share and cache.position_bytes == 2 * 2 * 8 * 4
    cache.write(1, row, position, (torch.randn(1, 2, 8), torch.randn(1, 2, 6)))
    assert not cache.can_share


def test_a_group_that_samples_reads_its_prompt_once_and_its_log_probs_stay_exact(qwen3, monkeypatch):
    shared = []
    monkeypatch.setattr(shared_prefix, "WORTH_SHARING", 0)
    join = shared_prefix.SharedKeys.join
    monkeypatch.setattr(shared_prefix.SharedKeys, "join", lambda self, *args: shared.append(self) or join(self, *args))
    driver, prompt = Driver(qwen3), ids(60, 0)
    asks = [driver.submit(request(prompt, temperature=1.0, seed=i, max_new_tokens=5)) for i in range(8)]
    results = driver.run()
    assert {keys.length for keys in shared} == {48} and len(shared) == 4 * qwen3.config.num_hidden_layers
    for ask in asks:
        assert_exact(qwen3, prompt, results[ask.request_id], temperature=1.0)
