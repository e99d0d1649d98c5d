"""What only a GPU can show: the same numbers there as on the CPU, with flash attention where it is installed."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from test_log_probs import random_batch, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel

from verl_mt.extensions.fast_update import attention
from verl_mt.extensions.fast_update import head as fused_head
from verl_mt.extensions.fast_update.layers import compile_layers
from verl_mt.extensions.fast_update.tune import use_fused_kernel
from verl_mt.modeling import head_log_probs as head
from verl_mt.modeling.log_probs import forward_log_probs
from verl_mt.modeling.packing import PackedRows
from verl_mt.modeling.passes import PLAIN, Passes, choose_passes, use_passes
from verl_mt.workers.optimizer import build_adamw, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WAYS = [PLAIN, Passes(False, True), Passes(True, False), Passes(True, True)]


def run(model, passes, device, *, seed=3):
    """Log-probs, entropies and gradients, on the CPU."""
    use_passes(model, passes)
    model.zero_grad()
    ids, mask, wanted = (x.to(device) for x in random_batch(seed, num_rows=8, shared=40, prompts=2))
    output = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=0.9, with_entropy=True)
    (output.log_probs_BT.sum() + 0.3 * output.entropy_BT.sum()).backward()
    slopes = [p.grad.float().cpu() for p in model.parameters()]
    return [output.log_probs_BT.detach().float().cpu(), output.entropy_BT.detach().float().cpu(), *slopes]


@pytest.mark.parametrize("passes", WAYS)
def test_log_probs_entropies_and_gradients_are_those_of_the_cpu(passes):
    model = tiny(scale=1.0)
    expected = run(model, PLAIN, "cpu")
    for got, wanted in zip(run(copy.deepcopy(model).cuda(), passes, "cuda"), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4 * max(1.0, float(wanted.abs().max())), rtol=1e-3)


def test_a_model_in_cpu_memory_is_tried_on_the_gpu_and_goes_back():
    model = tiny(num_hidden_layers=4)
    assert choose_passes(model, device="cuda") == Passes(packed=True, share_prefixes=True)
    assert {p.device.type for p in model.parameters()} == {"cpu"} and len(model.model.layers) == 4


@pytest.mark.parametrize("known", [False, True])
def test_tiles_of_logits_on_the_gpu_equal_all_of_them(monkeypatch, known):
    monkeypatch.setattr(head, "TILE", {"cpu": 999, "cuda": 999})
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 301, bias=False).cuda()
    hidden = torch.randn(40, 16, device="cuda", requires_grad=True)
    targets, slope = torch.randint(301, (40,), device="cuda"), torch.randn(40, device="cuda")
    results = []
    for most in (2**24, 999):
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", most)
        log_probs, _ = head.head_log_probs(layer, hidden, targets, expected=(lambda: slope) if known else None)
        results.append([log_probs.detach(), *torch.autograd.grad((log_probs * slope).sum(), [hidden, layer.weight])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("share", [False, True])
def test_flash_attention_over_packed_rows_equals_sdpa_over_padded_ones(share):
    model = tiny(scale=1.0, dtype=torch.bfloat16).cuda()
    expected = run(copy.deepcopy(model), PLAIN, "cuda")
    model.config._attn_implementation = "flash_attention_2"
    assert choose_passes(model).packed
    for got, wanted in zip(run(model, Passes(True, share), "cuda"), expected, strict=True):
        assert float((got - wanted).norm() / wanted.norm().clamp(min=1e-6)) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_steps_like_one_on_the_device(dtype):
    weights = []
    for offload in (False, True):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(64).to("cuda", dtype))
        optimizer = build_adamw([parameter], offload=offload, lr=1e-2)
        for _ in range(5):
            parameter.grad = torch.randn(64).to("cuda", dtype)
            optimizer.step()
        assert state_of(optimizer, parameter)["exp_avg"].device.type == ("cpu" if offload else "cuda")
        weights.append(parameter.detach())
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [False, True])
def test_packed_rows_do_without_the_kernel_that_holds_all_scores(share, dtype):
    """Forward and backward, with fewer key heads than query heads."""
    prompt = list(range(1, 101))
    ids = torch.tensor([[*prompt, *[row + 1] * 60] for row in range(4)], device="cuda")
    row_N, position_N = (torch.arange(ids.shape[1], device="cuda") > 100).expand_as(ids).nonzero(as_tuple=True)
    rows = PackedRows(ids, row_N, position_N, share=share)
    size = rows.input_ids_1T.shape[1]
    assert any(group.mask is not None for group in rows._groups[0]) == share
    query, key, value = (
        torch.randn(1, heads, size, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        rows.attend(query, key, value, None, 0.0).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value))


@pytest.mark.parametrize("share", [False, True])
def test_varlen_attention_over_packed_rows_equals_sdpa_over_padded_ones(share):
    model = tiny(scale=1.0, dtype=torch.bfloat16).cuda()
    expected = run(copy.deepcopy(model), PLAIN, "cuda")
    use_passes(model, Passes(True, share))
    attention.attend_in_one_call(model, torch.device("cuda"))
    for got, wanted in zip(run(model, Passes(True, share), "cuda"), expected, strict=True):
        assert float((got - wanted).norm() / wanted.norm().clamp(min=1e-6)) < 0.05


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_head_has_the_numbers_of_the_plain_one(monkeypatch, dtype, known):
    monkeypatch.setattr(fused_head, "TILE", {"cuda": 2**12})
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 301, bias=False).to("cuda", dtype)
    hidden = torch.randn(40, 64, device="cuda", dtype=dtype, requires_grad=True)
    targets, slope = torch.randint(301, (40,), device="cuda"), torch.randn(40, device="cuda")
    results = []
    for log_probs_of in (head.head_log_probs, fused_head.fused_head_log_probs):
        log_probs, _ = log_probs_of(layer, hidden, targets, expected=(lambda: slope) if known else None)
        results.append([log_probs.detach(), *torch.autograd.grad((log_probs * slope).sum(), [hidden, layer.weight])])
    for a, b in zip(*results, strict=True):
        assert float((a - b).float().norm() / b.float().norm()) < (1e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_optimizer_steps_like_the_plain_one(dtype):
    weights = []
    for fused in (False, True):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(64).to("cuda", dtype))
        optimizer = build_adamw([parameter], lr=1e-2)
        if fused:
            use_fused_kernel(optimizer)
        for _ in range(5):
            parameter.grad = torch.randn(64).to("cuda", dtype)
            optimizer.step()
        weights.append(state_of(optimizer, parameter).get("master", parameter.detach()))
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-6)


def test_compiled_layers_have_the_gradients_of_the_plain_ones():
    model = tiny(scale=1.0).cuda()
    expected = run(copy.deepcopy(model), Passes(True, True), "cuda")
    use_passes(model, Passes(True, True))
    compile_layers(model)
    for got, wanted in zip(run(model, Passes(True, True), "cuda"), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4 * max(1.0, float(wanted.abs().max())), rtol=1e-3)
