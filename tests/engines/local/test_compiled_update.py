"""The decoder's forward and backward pass with the compiled kernels, against transformers' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import make_model, random_ids

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.engines import build as build_engine
from verl_mt.engines.base import EngineSetup
from verl_mt.extensions.cpu_kernels.bindings import TrainingLibrary, Tree
from verl_mt.extensions.cpu_kernels.build import build
from verl_mt.extensions.cpu_kernels.update import compiled_pass
from verl_mt.modeling.log_probs import forward_log_probs
from verl_mt.modeling.passes import passes_of, use_passes

TOKEN = random_ids(40, 1)[3]
"""One of all rows. As the padding token its embedding gets no gradient, as with transformers."""
SHAPES = [
    ("Qwen3", {}),
    ("Qwen3", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True, "pad_token_id": TOKEN}),
    ("Llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 100}),
    ("Llama", {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}),
    ("Qwen2", {"hidden_size": 128, "num_key_value_heads": 4}),
    ("Mistral", {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": None}),
]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and wanted positions of groups that share a system prompt and their own prompt."""
    rows, first = [], []
    for number in range(13):
        prompt = random_ids(40, 1) + random_ids(20 + number // 4, 50 + number // 4)
        rows.append(prompt + random_ids(3 + 5 * (number % 4), 100 + number))
        first.append(len(prompt))
    rows[7] = random_ids(9, 7)  # alone
    first[7] = 1
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, tokens in zip(ids, rows):
        row[: len(tokens)] = torch.tensor(tokens)
    position, length = torch.arange(ids.shape[1]), torch.tensor([*map(len, rows)])[:, None]
    return ids, position < length, (position >= torch.tensor(first)[:, None]) & (position < length)


def log_probs_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, mask, wanted = batch()
    model.zero_grad()
    found = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=0.8).log_probs_BT
    (found * torch.linspace(-1, 2, found.numel()).view_as(found)).sum().backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def with_kernels(model: Any) -> Any:
    use_passes(model, replace(passes_of(model), packed_pass=compiled_pass(build())))
    return model


def random_weights(model: Any) -> Any:
    for parameter in model.parameters():  # norms and biases are ones and zeros else
        torch.nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "shape"), SHAPES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(SHAPES)])
@pytest.mark.parametrize("share", [True, False])
def test_gradients_are_those_of_transformers_own_pass(architecture, shape, share):
    model = random_weights(make_model(architecture, **{"initializer_range": 0.15, **shape}))
    use_passes(model, replace(passes_of(model), share_prefixes=share))
    expected, torchs = log_probs_and_gradients(model)
    found, ours = log_probs_and_gradients(with_kernels(model))
    assert not torch.equal(found, expected), "the kernels computed nothing"
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    for name, gradient in torchs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_the_number_of_threads_changes_no_bit():
    torch.manual_seed(0)
    library, before = TrainingLibrary(build()), torch.get_num_threads()
    qkv, weights, angles = torch.randn(300, 8 * 64), (torch.randn(64), torch.randn(64)), torch.randn(2, 300, 64)
    tree = Tree(np.array([0, 40, 130, 133, 290]), np.array([-1, 0, 1, 1, 0]))
    wide, grad = torch.randn(300, 512), torch.randn(300, 256)
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            q, k, of_qkv, of_x = torch.empty(300, 4, 64), torch.empty(300, 2, 64), torch.empty_like(qkv), wide.clone()
            library.rotate(qkv, weights, tuple(angles), q, k, 1e-6)
            made = library.tree_attend((q, k, qkv[:, 384:]), tree, 0.1)
            of_q, of_k = library.tree_attend_back((q, k, qkv[:, 384:]), made, tree, 0.1, grad, of_qkv[:, 384:])
            of_weights = library.rotate_back(qkv, weights, tuple(angles), (of_q, of_k), of_qkv, 1e-6)
            of_norm = library.norm_back(wide, torch.ones(512), wide, of_x, 1e-6)
            both = library.silu_multiply_back(wide, grad)
            found.append([q, k, *made, of_q, of_k, of_qkv, of_weights, of_norm, of_x, both])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a hook", "checkpointing", "bfloat16", "long rows", "autocast"])
def test_what_the_kernels_cannot_compute_is_transformers_own_pass(why, monkeypatch):
    model = make_model()
    if why == "a hook":
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    elif why == "checkpointing":
        model.gradient_checkpointing_enable()
    elif why == "long rows":
        monkeypatch.setattr("verl_mt.extensions.cpu_kernels.update.LONGEST", 60)
    elif why == "bfloat16":
        model.bfloat16()
    with torch.autocast("cpu", enabled=why == "autocast"):
        expected, torchs = log_probs_and_gradients(model)
        found, ours = log_probs_and_gradients(with_kernels(model))
    assert torch.equal(found, expected) and all(torch.equal(ours[name], torchs[name]) for name in torchs)


@pytest.mark.parametrize(
    ("kernels", "deterministic", "uses"), [("auto", False, True), ("auto", True, False), ("torch", False, False)]
)
def test_the_engines_kernels_are_the_updates_too(run_async, kernels, deterministic, uses):
    model = make_model()
    expected, _ = log_probs_and_gradients(model)
    with_kernels(model)  # an earlier engine's
    config = ActorRolloutRefConfig(rollout=RolloutConfig(kernels=kernels))
    engine = build_engine(EngineSetup(config, model, frozenset({3}), None, 64, deterministic, seed=0))
    assert torch.equal(log_probs_and_gradients(model)[0], expected) is not uses
    run_async(engine.close())
