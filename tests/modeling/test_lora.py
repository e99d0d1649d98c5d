"""Low-rank adapters: what is trained, what merging gives, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_toys import adapted, small_model

from verl_mt.config.actor import ModelConfig
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.modeling.load import export_hf, load_causal_lm
from verl_mt.modeling.lora import (
    adapter_of,
    adapters_off,
    add_adapters,
    describe,
    is_adapter,
    lora_of,
    require_same,
    without_adapters,
)
from verl_mt.modeling.weights import named_weights

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@pytest.fixture(scope="module")
def base():
    return small_model()


def with_adapters(model, seed=0, **config):
    return add_adapters(copy.deepcopy(model), ModelConfig(**{"lora_rank": 4, **config}), seed=seed)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_adapters_are_trained_and_the_policy_starts_as_its_base_to_the_bit(base, dtype):
    plain = copy.deepcopy(base).to(dtype)
    model = with_adapters(plain)
    assert type(model) is type(plain)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name) and parameter.dtype == dtype
    assert sum(map(is_adapter, dict(model.named_parameters()))) == 2 * 2 * len(LINEAR)
    assert torch.equal(logits(model), logits(plain))


def test_the_start_depends_on_the_seed_alone_and_nothing_else_that_is_random_on_it(base):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = with_adapters(base, seed=1)
    assert torch.equal(torch.rand(3), expected)
    other, again = with_adapters(base, seed=2), with_adapters(base, seed=1)
    name = "model.layers.1.mlp.down_proj.lora_A.default.weight"
    a, b, c = (dict(m.named_parameters())[name] for m in (first, other, again))
    assert torch.equal(a, c) and not torch.equal(a, b)
    assert a.shape == (4, 24) and 0.8 * 24**-0.5 < a.detach().abs().max().item() <= 24**-0.5


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    rank=st.integers(1, 9),
    scale=st.sampled_from([0.25, 1, 2, 4]),
    targets=st.sets(st.sampled_from(LINEAR), min_size=1).map(tuple),
    architecture=st.sampled_from(["Qwen3", "Qwen2", "Llama"]),
    tied=st.booleans(),
)
def test_merged_weights_under_the_bases_names_compute_what_the_adapters_compute(
    rank, scale, targets, architecture, tied
):
    """Qwen2 has biases, which adapters leave alone."""
    plain = small_model(architecture, tie_word_embeddings=tied)
    model = adapted(copy.deepcopy(plain), rank=rank, alpha=max(1, int(scale * rank)), targets=targets)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent, original = dict(named_weights(model)), dict(named_weights(plain))
    assert {n: (t.shape, t.dtype) for n, t in sent.items()} == {n: (t.shape, t.dtype) for n, t in original.items()}
    changed = {name for name in sent if not torch.equal(sent[name], original[name])}
    assert changed == {n for n in original if n.endswith(".weight") and n.split(".")[-2] in targets}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    receiver = small_model(architecture, tie_word_embeddings=tied, seed=3)
    receiver.load_state_dict(sent, strict=False)
    torch.testing.assert_close(logits(receiver), logits(model), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(model), logits(plain), atol=1e-2)


def test_the_sum_is_rounded_once(base):
    model = adapted(copy.deepcopy(base).to(torch.bfloat16), rank=3, alpha=5)
    layer = model.model.layers[0].mlp.up_proj
    a, b = (part["default"].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
    exact = layer.base_layer.weight.detach().float() + 5 / 3 * (b @ a)
    sent = dict(named_weights(model))["model.layers.0.mlp.up_proj.weight"]
    assert sent.dtype == torch.bfloat16
    assert float((sent.float() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())
    assert (sent == exact.to(torch.bfloat16)).float().mean() > 0.99


def test_experts_that_transformers_keeps_fused_are_sent_as_in_the_checkpoint():
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2}
    plain = small_model("Mixtral", **sizes)
    model = adapted(copy.deepcopy(plain), targets=("q_proj", "o_proj"))
    sent, original = dict(named_weights(model)), dict(named_weights(plain))
    assert sent.keys() == original.keys() and any(".experts.2." in name for name in sent)
    changed = {name.split(".")[-2] for name in sent if not torch.equal(sent[name], original[name])}
    assert changed == {"q_proj", "o_proj"}


def test_tensors_without_adapter_are_not_copied(base):
    model = adapted(copy.deepcopy(base), targets=("q_proj",))
    own = {tensor.data_ptr() for tensor in model.parameters()}
    copied = {name for name, tensor in named_weights(model) if tensor.data_ptr() not in own}
    assert copied == {f"model.layers.{k}.self_attn.q_proj.weight" for k in (0, 1)}
    plain = without_adapters(model)
    assert sum(p.data_ptr() not in own for p in plain.parameters()) == 2


def test_switched_off_adapters_leave_the_base_and_come_back_with_their_gradients(base):
    model = adapted(copy.deepcopy(base))
    on = logits(model)
    with pytest.raises(KeyError), adapters_off(model):
        assert torch.equal(logits(model), logits(base))
        raise KeyError
    assert torch.equal(logits(model), on) and not torch.equal(on, logits(base))
    assert all(p.requires_grad == is_adapter(n) for n, p in model.named_parameters())


def test_a_model_without_adapters_passes_through(base):
    assert without_adapters(base) is base and lora_of(base) is None and adapter_of(base) is None
    assert add_adapters(base, ModelConfig(), seed=0) is base and all(p.requires_grad for p in base.parameters())
    with adapters_off(base):
        pass


def test_an_export_is_a_plain_model_and_the_adapter_beside_it_is_one_for_peft(base, tmp_path):
    import peft

    model = adapted(copy.deepcopy(base), targets=("q_proj", "down_proj"))
    expected = logits(model)
    folder = export_hf(model, None, tmp_path / "hf", adapter=adapter_of(model))
    loaded = load_causal_lm(str(folder))
    assert loaded.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(model), expected) and lora_of(model) is not None
    by_peft = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / "adapter")
    torch.testing.assert_close(logits(by_peft), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "asked, targets",
    [
        (["all-linear"], LINEAR),
        (["v_proj", "q_proj", "v_proj"], ("q_proj", "v_proj")),
        (["self_attn.q_proj"], ("q_proj",)),
        (["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"], ("up_proj",)),
        (["layers.1.mlp.up_proj"], ("model.layers.1.mlp.up_proj",)),
    ],
)
def test_targets_are_told_in_the_shortest_way(base, asked, targets):
    model = with_adapters(base, lora_target_modules=asked)
    assert lora_of(model).targets == targets
    names = {name.partition(".lora_")[0] for name in dict(model.named_parameters()) if is_adapter(name)}
    assert all(any(name == t or name.endswith(f".{t}") for t in targets) for name in names)


@pytest.mark.parametrize("asked, named", [(["q_proj", "qkv"], "'qkv'"), (["lm_head"], "'lm_head'"), ([], "an empty")])
def test_a_target_that_the_model_has_not_is_refused_with_those_that_it_has(base, asked, named):
    with pytest.raises(
        ConfigError, match=rf"lora_target_modules: .*{named}.* no linear layer of Qwen3ForCausalLM"
    ) as e:
        with_adapters(base, lora_target_modules=asked)
    assert all(name in str(e.value) for name in LINEAR) and "'q_proj'" not in str(e.value)


def test_without_peft_there_is_one_clear_error(base, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'lora_rank needs the library peft: pip install "verl_mt\[lora\]"'):
        with_adapters(base)


def test_adapters_of_another_kind_are_refused_with_both(base):
    lora = lora_of(with_adapters(base))
    require_same(describe(lora), lora)
    require_same(None, None)
    for other, text in (
        (dataclasses.replace(lora, rank=8), "lora_rank=8 lora_alpha=16 .* says lora_rank=4 lora_alpha=16"),
        (dataclasses.replace(lora, alpha=1), "lora_alpha=1 .* says .* lora_alpha=16"),
        (dataclasses.replace(lora, targets=("q_proj",)), r"modules=\[q_proj\], but .* says .*\[down_proj, gate_proj"),
        (None, r"lora_rank=0 \(all weights are trained\), but .* says lora_rank=4"),
    ):
        with pytest.raises(CheckpointError, match=text):
            require_same(describe(other), lora)
    with pytest.raises(CheckpointError, match=r"written with lora_rank=4 .* says lora_rank=0"):
        require_same(describe(lora), None)


def test_adapters_for_another_base_are_refused(base):
    """A path may change; what it leads to may not."""
    lora = lora_of(with_adapters(base, path="here"))
    require_same(describe(lora), lora_of(with_adapters(base, path="there")))
    with pytest.raises(CheckpointError, match=r"belong to other weights than those of .*path=there: .* with here"):
        require_same(describe(lora), lora_of(with_adapters(small_model(seed=1), path="there")))
