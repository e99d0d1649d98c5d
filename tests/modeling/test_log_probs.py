"""Log-probs of given tokens equal the naive computation over full logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.modeling import head_log_probs, shared_prefix
from verl_mt.modeling import log_probs as module_under_test
from verl_mt.modeling.log_probs import forward_log_probs, position_ids
from verl_mt.modeling.passes import PLAIN, Passes, use_passes

VOCAB = 61


def tiny(kind: str = "Qwen3", dtype: torch.dtype = torch.float32, scale: float = 3.0, **kwargs):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256}
    config = getattr(transformers, f"{kind}Config")(**(sizes | heads | kwargs))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)  # 3 is far from uniform
    return model


@pytest.fixture(scope="module")
def qwen():
    return tiny()


def naive(model, ids, mask, wanted, temperature):
    """Full logits, one row at a time, without padding."""
    log_probs = torch.zeros(ids.shape, dtype=torch.float64)
    entropy = torch.zeros_like(log_probs)
    for row in range(len(ids)):
        real = mask[row].bool()
        logits = model(input_ids=ids[row][real][None]).logits[0].double() / (temperature or 1.0)
        lp = logits.log_softmax(-1)
        place = 0
        for t in range(ids.shape[1]):
            if real[t]:
                if wanted[row, t]:
                    log_probs[row, t] = lp[place - 1, ids[row, t]]
                    entropy[row, t] = -(lp[place - 1].exp() * lp[place - 1]).sum()
                place += 1
    return log_probs, entropy


def random_batch(seed: int, num_rows: int = 6, shared: int = 0, prompts: int = 3):
    """Rows of `prompts` different prompts behind `shared` common tokens, with observations between sampled tokens."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def tokens(count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=generator).tolist()

    system, questions = tokens(shared), [tokens(integer(2, 14)) for _ in range(prompts)]
    rows, masks = [], []
    for row in range(num_rows):
        head = system + questions[row % prompts]
        parts = [(tokens(integer(1, 5)), 1), (tokens(integer(0, 4)), 0), (tokens(integer(0, 30)), 1)]
        rows.append(head + [token for part, _ in parts for token in part])
        masks.append([0] * len(head) + [m for part, m in parts for _ in part])
    width = max(map(len, rows)) + 2
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])
    wanted = torch.tensor([m + [0] * (width - len(m)) for m in masks]).bool()
    return ids, mask, wanted


@pytest.fixture(scope="module")
def as_initialised():
    return {kind: tiny(kind, scale=1.0) for kind in ("Qwen3", "Llama")}


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(["Qwen3", "Llama"]),
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    shared=st.sampled_from([0, 3, 20]),
    prompts=st.integers(1, 4),
)
def test_equal_to_full_logits_row_by_row_without_padding(as_initialised, kind, seed, temperature, shared, prompts):
    model = as_initialised[kind]
    ids, mask, wanted = random_batch(seed, shared=shared, prompts=prompts)
    with torch.no_grad():
        got = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=temperature, with_entropy=True)
        log_probs, entropy = naive(model, ids, mask, wanted, temperature)
    assert got.entropy_BT is not None
    torch.testing.assert_close(got.log_probs_BT.double(), log_probs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.entropy_BT.double(), entropy, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Gemma2", {"final_logit_softcapping": 5.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 4.0}),
        ("Mistral", {"sliding_window": 8}),
        ("Bloom", {"n_head": 2, "n_layer": 2}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    ],
)
def test_other_architectures_too_with_capped_or_scaled_logits_windows_or_masks_of_their_own(kind, kwargs):
    model = tiny(kind, **kwargs)
    ids, mask, wanted = random_batch(1, num_rows=4, shared=20, prompts=2)
    with torch.no_grad():
        got = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0)
        expected, _ = naive(model, ids, mask, wanted, 1.0)
    # Weights scaled up for logits that a cap would change: float32 itself is off by 2e-5 there.
    torch.testing.assert_close(got.log_probs_BT.double(), expected, atol=5e-5, rtol=1e-5)


def test_the_probe_tells_a_plain_head_from_one_with_something_behind_it(qwen):
    assert module_under_test._has_plain_head(qwen)
    assert module_under_test._has_plain_head(tiny("Llama"))
    assert not module_under_test._has_plain_head(tiny("Gemma2", final_logit_softcapping=30.0))
    assert not module_under_test._has_plain_head(tiny("Cohere", logit_scale=0.25))


def gradients(model, ids, mask, wanted, coefficients):
    model.zero_grad()
    output = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=0.8, with_entropy=True)
    ((output.log_probs_BT + 0.3 * output.entropy_BT) * coefficients).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("passes", [Passes(False, True), Passes(True, False), Passes(True, True)])
@pytest.mark.parametrize(("shared", "prompts"), [(20, 1), (20, 3), (0, 2), (0, 6), (20, 6)])
def test_sharing_prefixes_and_packing_rows_change_no_gradient(shared, prompts, passes):
    model = tiny(dtype=torch.float64)
    ids, mask, wanted = random_batch(3, num_rows=6, shared=shared, prompts=prompts)
    coefficients = torch.randn(ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    use_passes(model, PLAIN)
    plain = gradients(model, ids, mask, wanted, coefficients)
    use_passes(model, passes)
    for a, b in zip(gradients(model, ids, mask, wanted, coefficients), plain):
        # The norms of transformers compute in float32 whatever the model's type.
        torch.testing.assert_close(a, b, atol=1e-6 * float(b.abs().max()), rtol=1e-5)


@pytest.mark.parametrize(("packed", "most"), [(True, 0.4), (False, 0.5)])
def test_a_shared_prefix_goes_through_the_model_once(packed, most):
    model = tiny()
    use_passes(model, Passes(packed, share_prefixes=True))
    ids, mask, wanted = random_batch(2, num_rows=8, shared=40, prompts=2)
    forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0)  # trial passes, once per model
    seen = []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0)
    assert sum(seen) < mask.sum() * most
    plan = shared_prefix.plan_prefixes(ids, wanted)
    assert plan is not None and plan.common >= 40


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_rows_are_run_with_rows_of_like_length(lengths):
    pieces = shared_prefix._rows_of_like_length(torch.tensor(lengths))
    assert sorted(torch.cat(pieces).tolist()) == list(range(len(lengths)))
    for piece in pieces:
        mine = [lengths[row] for row in piece.tolist()]
        assert max(mine) <= max(1.25 * min(mine), min(mine) + 8)


def test_pieces_of_the_head_change_neither_values_nor_gradients(monkeypatch):
    model = tiny(dtype=torch.float64)
    ids, mask, wanted = random_batch(4)
    coefficients = torch.randn(ids.shape, dtype=torch.float64)
    whole = gradients(model, ids, mask, wanted, coefficients)
    monkeypatch.setattr(head_log_probs, "LOGITS_AT_ONCE", 3 * VOCAB)
    monkeypatch.setattr(head_log_probs, "TILE", {"cpu": 2 * VOCAB, "cuda": 2 * VOCAB})
    for a, b in zip(whole, gradients(model, ids, mask, wanted, coefficients)):
        torch.testing.assert_close(a, b)


def test_only_wanted_positions_are_filled_and_their_neighbours_do_not_matter(qwen):
    ids, mask, wanted = random_batch(6)
    with torch.no_grad():
        first = forward_log_probs(qwen, ids, mask, wanted_BT=wanted, temperature=1.0).log_probs_BT
        changed = torch.where(mask.bool(), ids, torch.full_like(ids, VOCAB - 1))
        second = forward_log_probs(qwen, changed, mask, wanted_BT=wanted, temperature=1.0).log_probs_BT
    assert (first[~wanted] == 0).all() and (first[wanted] < 0).all()
    assert torch.equal(first, second)


def test_rows_padded_on_the_left_work_too(qwen):
    ids, mask, wanted = (x.flip(1) for x in random_batch(7))
    wanted = wanted & (mask.cumsum(1) > 1)
    with torch.no_grad():
        got = forward_log_probs(qwen, ids, mask, wanted_BT=wanted, temperature=1.0)
        expected, _ = naive(qwen, ids, mask, wanted, 1.0)
    torch.testing.assert_close(got.log_probs_BT.double(), expected, atol=5e-5, rtol=1e-5)


def test_position_ids_count_real_tokens():
    assert position_ids(torch.tensor([[0, 0, 1, 1, 1, 0]])).tolist() == [[0, 0, 0, 1, 2, 2]]


def test_nothing_wanted_gives_zeros_and_position_zero_is_refused(qwen):
    ids, mask, wanted = random_batch(8)
    output = forward_log_probs(qwen, ids, mask, wanted_BT=torch.zeros_like(wanted), temperature=1.0, with_entropy=True)
    assert output.log_probs_BT.abs().sum() == 0 and output.entropy_BT is not None
    wanted[0, 0] = True
    with pytest.raises(ValueError, match="position 0"):
        forward_log_probs(qwen, ids, mask, wanted_BT=wanted, temperature=1.0)


def test_entropy_may_stay_out_of_the_graph(qwen):
    ids, mask, wanted = random_batch(9)
    output = forward_log_probs(
        qwen, ids, mask, wanted_BT=wanted, temperature=1.0, with_entropy=True, entropy_grad=False
    )
    assert output.log_probs_BT.requires_grad and not output.entropy_BT.requires_grad
    assert 0 < output.entropy_BT[wanted].max() <= math.log(VOCAB)
