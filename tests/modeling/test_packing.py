"""Rows packed into one, with what they share once, give what each row gives alone."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_log_probs import VOCAB, naive, random_batch, tiny

from verl_mt.modeling import packing
from verl_mt.modeling.log_probs import forward_log_probs
from verl_mt.modeling.packing import PackedRows, find_segments
from verl_mt.modeling.passes import PLAIN, Passes, choose_passes, passes_of, use_passes

rows_of_tokens = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=9)


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, rows))
    return np.array([r + [0] * (width - len(r)) for r in rows]), np.array(list(map(len, rows)))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(rows_of_tokens, st.booleans(), st.integers(1, 6))
def test_segments_cover_each_token_of_each_row_once_and_only_equal_tokens_are_shared(rows, share, least):
    ids, lengths = padded(rows)
    before, packing.MIN_SHARED = packing.MIN_SHARED, least
    try:
        segments = find_segments(ids, lengths, share=share)
    finally:
        packing.MIN_SHARED = before
    covered = [[] for _ in rows]
    for segment in segments:
        for row in segment.rows:
            assert covered[row] == list(range(segment.start)), "parents come before their children"
            covered[row] += range(segment.start, segment.end)
            shared = ids[segment.rows[0], : segment.end]
            assert (ids[row, : segment.end] == shared).all()
        assert (len(segment.rows) - 1) * (segment.end - segment.start) >= least or len(segment.rows) == 1
    assert covered == [list(range(length)) for length in lengths]
    assert share or len(segments) == len(rows)


def test_records_of_one_trajectory_share_turns_behind_the_prompt_too():
    system, turn, other = list(range(1, 21)), [21] * 30, [22] * 5
    rows = [system + turn + [23], system + turn + other, system + other + other]
    segments = find_segments(*padded(rows), share=True)
    assert [(set(s.rows), s.start, s.end) for s in segments[:2]] == [({0, 1, 2}, 0, 20), ({0, 1}, 20, 50)]
    assert sum(s.end - s.start for s in segments) == 20 + 30 + 1 + 5 + 10


ARCHITECTURES = [
    ("Qwen3", {}),
    ("Qwen2", {}),
    ("Llama", {}),
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    ("Granite", {"logits_scaling": 4.0}),
]


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("kind", "kwargs"), ARCHITECTURES)
def test_packed_log_probs_entropies_and_gradients_equal_padded_ones(kind, kwargs, share):
    model = tiny(kind, scale=1.0, **kwargs)
    assert choose_passes(model).packed
    ids, mask, wanted = random_batch(3, num_rows=8, shared=20, prompts=3)
    coefficients = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0))
    results = []
    for passes in (PLAIN, Passes(packed=True, share_prefixes=share)):
        use_passes(model, passes)
        model.zero_grad()
        output = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=0.9, with_entropy=True)
        ((output.log_probs_BT + 0.3 * output.entropy_BT) * coefficients).sum().backward()
        slopes = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([output.log_probs_BT.detach(), output.entropy_BT.detach(), *slopes])
    for plain, packed in zip(*results, strict=True):
        torch.testing.assert_close(packed, plain, atol=1e-5 * max(1.0, float(plain.abs().max())), rtol=0)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), shared=st.sampled_from([0, 5, 20, 60]), prompts=st.integers(1, 4), share=st.booleans())
def test_whatever_is_packed_equals_full_logits_row_by_row(qwen, seed, shared, prompts, share):
    use_passes(qwen, Passes(packed=True, share_prefixes=share))
    ids, mask, wanted = random_batch(seed, shared=shared, prompts=prompts)
    with torch.no_grad():
        got = forward_log_probs(qwen, ids, mask, wanted_BT=wanted, temperature=1.0)
        expected, _ = naive(qwen, ids, mask, wanted, 1.0)
    torch.testing.assert_close(got.log_probs_BT.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def qwen():
    return tiny(scale=1.0)


@pytest.mark.parametrize(("most", "alone"), [(0, 512), (2**24, 1)])
def test_masks_and_groups_of_any_size_change_nothing(monkeypatch, most, alone):
    """No masks at all, and no two segments in one call."""
    model = tiny(scale=1.0)
    ids, mask, wanted = random_batch(5, num_rows=8, shared=40, prompts=2)
    use_passes(model, PLAIN)
    with torch.no_grad():
        plain = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0).log_probs_BT
        monkeypatch.setattr(packing, "_MAX_MASK", most)
        monkeypatch.setattr(packing, "_ALONE", alone)
        use_passes(model, Passes(packed=True, share_prefixes=True))
        packed = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0).log_probs_BT
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)


def varlen_by_hand(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, **rest):
    """What the kernel's documentation says: causal, aligned at the end of the keys."""
    max_seqlen_q, max_seqlen_k = rest.pop("max_seqlen_q"), rest.pop("max_seqlen_k")
    assert rest == {"dropout_p": 0.0, "causal": True} and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    out, share = torch.empty_like(q), q.shape[1] // k.shape[1]
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:]):
        assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d].repeat_interleave(share, 1)) * softmax_scale
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(int((d - c) - (b - a)))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", weights, v[c:d].repeat_interleave(share, 1))
    return out


@pytest.mark.parametrize("share", [False, True])
def test_flash_attentions_kernel_is_handed_every_segment_with_its_way_from_the_root(monkeypatch, share):
    model = tiny(scale=1.0)
    ids, mask, wanted = random_batch(5, num_rows=8, shared=20, prompts=2)
    with torch.no_grad():
        use_passes(model, PLAIN)
        plain = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0).log_probs_BT
        model.config._attn_implementation = "flash_attention_2"
        monkeypatch.setattr(packing, "_flash_kernel", lambda: varlen_by_hand)
        use_passes(model, Passes(packed=True, share_prefixes=share))
        assert model.config._attn_implementation == packing.FLASH_NAME
        packed = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0).log_probs_BT
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)


def test_checkpointed_activations_are_recomputed_over_packed_rows():
    model = tiny(scale=1.0)
    use_passes(model, Passes(packed=True, share_prefixes=True))
    ids, mask, wanted = random_batch(3, num_rows=6, shared=20, prompts=2)
    slopes = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        model.zero_grad()
        forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0).log_probs_BT.sum().backward()
        slopes.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)


def test_packed_rows_hold_no_padding_and_no_token_twice(qwen):
    ids, _, wanted = random_batch(2, num_rows=8, shared=40, prompts=2)
    row_N, position_N = wanted.nonzero(as_tuple=True)
    used = wanted.any(1)
    row_N = (used.cumsum(0) - 1)[row_N]
    last = [int(position_N[row_N == row].max()) for row in range(int(used.sum()))]
    packed = PackedRows(ids[used], row_N, position_N - 1, share=False)
    assert packed.input_ids_1T.numel() == sum(last)
    shared = PackedRows(ids[used], row_N, position_N - 1, share=True)
    different = {tuple(ids[used][row, : t + 1].tolist()) for row in range(len(last)) for t in range(last[row])}
    assert shared.input_ids_1T.numel() <= len(different) + packing.MIN_SHARED * len(last)


@pytest.mark.parametrize(
    ("kind", "kwargs", "reason"),
    [
        ("Mistral", {"sliding_window": 8}, "a window of 8 tokens"),
        ("Gemma2", {}, "layers of type sliding_attention"),
        ("Bloom", {"n_head": 2, "n_layer": 2}, "its attention is 'eager'"),
    ],
)
def test_a_model_that_cannot_be_packed_says_why_once_and_takes_padded_passes(caplog, kind, kwargs, reason):
    model = tiny(kind, **kwargs)
    ids, mask, wanted = random_batch(1, num_rows=4, shared=20, prompts=2)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(2):
            forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0)
    said = [r.getMessage() for r in caplog.records if "without padding" in r.getMessage()]
    assert len(said) == 1 and reason in said[0] and "use_remove_padding" in said[0]
    assert not passes_of(model).packed


def test_a_layer_that_carries_something_from_token_to_token_is_found_out(caplog):
    model = tiny()
    model.model.layers[0].register_forward_hook(lambda _, inputs, output: output + 0.1 * output.cumsum(1))
    assert not choose_passes(model).packed
    assert "a trial pass gave other hidden states" in caplog.text


def test_eager_attention_is_not_replaced_behind_the_users_back():
    model = tiny()
    model.config._attn_implementation = "eager"
    assert not choose_passes(model).packed and model.config._attn_implementation == "eager"


def test_a_packed_model_still_computes_padded_and_cached_passes_and_exports_like_any(tmp_path):
    model, other = tiny(scale=1.0), tiny(scale=1.0)
    use_passes(model, Passes(packed=True, share_prefixes=True))
    ids = torch.randint(1, VOCAB, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        assert torch.equal(*(m(input_ids=ids, attention_mask=mask).logits for m in (model, other)))
        streams = [m.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False) for m in (model, other)]
    assert torch.equal(*streams)
    model.save_pretrained(tmp_path)
    assert packing.NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_whose_kernels_take_no_mask_with_fewer_key_heads_gets_as_many(monkeypatch, dtype):
    """As on CUDA, where torch would fall back to holding all scores."""
    torch.manual_seed(0)
    ids = torch.tensor([[*range(1, 21), 1, 2, 3], [*range(1, 21), 3, 2, 1], [*range(1, 21), 2, 2, 2]])
    row_N, position_N = torch.ones_like(ids).bool()[:, 20:].nonzero(as_tuple=True)
    rows = packing.PackedRows(ids, row_N, position_N + 20, share=True)
    assert any(group.mask is not None for group in rows._groups[0])
    size = rows.input_ids_1T.shape[1]
    query, key, value = (torch.randn(1, heads, size, 8, dtype=dtype) for heads in (4, 2, 2))
    expected = rows.attend(query, key, value, None, 0.0)
    seen = []

    def kernel(q, k, v, **options):
        seen.append((q.shape[1], k.shape[1], options["attn_mask"] is not None, options["enable_gqa"]))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    monkeypatch.setattr(packing, "GQA_BY_FLASH_ALONE", {"cpu"})
    monkeypatch.setattr(packing, "scaled_dot_product_attention", kernel)
    torch.testing.assert_close(rows.attend(query, key, value, None, 0.0), expected)
    assert (4, 4, True, False) in seen
    assert ((4, 2, False, True) if dtype == torch.bfloat16 else (4, 4, False, False)) in seen


def test_the_trial_runs_where_the_model_is_going_to_with_its_first_layers_only():
    """A kernel may be there and nowhere else; the whole model may not fit."""
    model, seen = tiny("Qwen3", num_hidden_layers=4), []
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: seen.append(number))
    assert choose_passes(model, device="cpu:0") == Passes(packed=True, share_prefixes=True)
    assert set(seen) == {0, 1} and model.model.layers is layers
    seen.clear()
    assert choose_passes(model).packed and set(seen) == {0, 1, 2, 3}
