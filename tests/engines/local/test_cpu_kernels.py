"""The compiled kernels: each against torch's operator, and the engine with them against the engine without."""

from __future__ import annotations

import asyncio
import copy
import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import PROMPT, assert_exact, engine_of, make_model, random_ids, request
from torch.nn.functional import scaled_dot_product_attention

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.engines import build as build_engine
from verl_mt.engines.base import EngineSetup, InPlace
from verl_mt.engines.local.model_runner import KVCache, PackedForward, StepTokens
from verl_mt.engines.local.sampling import SamplingRows, sample, uniforms
from verl_mt.errors import CheckpointError, ConfigError, EngineGoneError
from verl_mt.extensions.cpu_kernels import choice, forward
from verl_mt.extensions.cpu_kernels.bindings import Library
from verl_mt.extensions.cpu_kernels.build import Built, KernelsError, build
from verl_mt.extensions.cpu_kernels.forward import CompiledForward, why_not
from verl_mt.extensions.cpu_kernels.step_hook import SameKernels

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def built() -> Built:
    return build()


@pytest.fixture
def compiled(built) -> Any:
    """An option of engines."""
    return partial(CompiledForward, built=built)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, times: float = 1) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=times * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEachKernelIsTorchsOperator:
    @pytest.mark.parametrize("shape", [(1, 16), (3, 7), (5, 33), (64, 128), (2, 576)])
    def test_norm(self, built, dtype, shape):
        torch.manual_seed(0)
        x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
        out = torch.empty_like(x)
        Library(built, dtype).norm(x, weight, out, 1e-6)
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        close(out, weight * normed, dtype, 4)

    @pytest.mark.parametrize("shape", [(1, 16), (3, 7), (5, 33), (64, 384)])
    def test_silu_multiply(self, built, dtype, shape):
        torch.manual_seed(0)
        both = (torch.randn(shape[0], 2 * shape[1]) * 20).to(dtype)
        both[0, 0], both[0, 1] = 200.0, -200.0
        out = torch.empty(shape, dtype=dtype)
        Library(built, dtype).silu_multiply(both, out)
        gate, up = both.split(shape[1], 1)
        close(out, torch.nn.functional.silu(gate) * up, dtype)

    @pytest.mark.parametrize("norms", [True, False])
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 32), (2, 2, 64), (1, 1, 128)])
    def test_rotary_embedding_and_cache(self, built, dtype, heads, kv_heads, dim, norms):
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

        torch.manual_seed(0)
        library, rows, positions = Library(built, dtype), np.array([4, 0, 2]), np.array([7, 0, 19])
        qkv = torch.randn(3, (heads + 2 * kv_heads) * dim).to(dtype)
        angle = torch.rand(20, dim // 2).repeat(1, 2) * 6
        cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
        parts = [Qwen3RMSNorm(dim, 1e-6).to(dtype) for _ in range(2)]
        for part in parts:
            torch.nn.init.uniform_(part.weight)
        kv = torch.zeros(5, kv_heads, 24, dim, dtype=dtype), torch.zeros(5, kv_heads, 24, dim, dtype=dtype)
        q = torch.empty(3, heads, dim)
        places = library.plan(np.zeros((5, 24), dtype=np.int64), rows, positions, 3, heads // kv_heads, dim)
        weights = tuple(part.weight if norms else None for part in parts)
        with torch.no_grad():
            library.rotate_and_write(qkv, weights, (cosine.float(), sine.float()), q, kv, places, 1e-6)
            query, key, value = qkv.view(3, -1, dim).split([heads, kv_heads, kv_heads], 1)
            if norms:
                query, key = parts[0](query), parts[1](key)
            at = torch.from_numpy(positions)
            query, key = apply_rotary_pos_emb(query, key, cosine[at], sine[at])
        close(q, query, dtype, 2)
        close(kv[0][rows, :, positions], key, dtype, 2)
        assert torch.equal(kv[1][rows, :, positions], value)
        assert sum(int(x.abs().sum((1, 3)).ne(0).sum()) for x in kv) == 6

    @pytest.mark.parametrize(
        ("group", "kv_heads", "dim"), [(1, 2, 16), (2, 2, 32), (3, 3, 64), (7, 1, 128), (16, 1, 16)]
    )
    def test_attention(self, built, dtype, group, kv_heads, dim):
        """Rows that share a beginning, rows alone, one of a single position, and pieces; in one step."""
        torch.manual_seed(0)
        rng, length = np.random.default_rng(0), 80
        ids = rng.integers(0, 10**9, (24, length))
        ids[2:13, :41] = ids[2, :41]
        ids[4:9, :60] = ids[4, :60]
        keys, values = (torch.randn(24, kv_heads, length, dim).to(dtype) for _ in range(2))
        for store in (keys, values):  # equal ids, equal keys
            store[2:13, :, :41] = store[2, :, :41].clone()
            store[4:9, :, :60] = store[4, :, :60].clone()
        single = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15])
        at = np.array([0, 79, 50, 40, 60, 61, 70, 79, 63, 45, 42, 16])
        rows = np.concatenate([single, np.full(23, 20), np.full(5, 21)])
        positions = np.concatenate([at, 30 + np.arange(23), np.arange(5)])
        library, q = Library(built, dtype), torch.randn(len(rows), kv_heads * group, dim)
        out = torch.empty(len(rows), q[0].numel(), dtype=dtype)
        places = library.plan(ids, rows, positions, len(single), group, dim)
        library.attend(q, (keys, values), out, places, 0.3)
        blocks = places.blocks[: places.num_blocks]
        assert sorted(places.order.tolist()) == list(range(len(rows))) and (blocks[:, 1] > blocks[:, 0]).all()
        if group <= 8:
            assert blocks[blocks[:, 1] - blocks[:, 0] > 1][:, 2].max() > 16
        for t, (row, position) in enumerate(zip(rows, positions)):
            key, value = (x[row, :, : position + 1].float() for x in (keys, values))
            expected = scaled_dot_product_attention(q[t].view(kv_heads, group, dim), key, value, scale=0.3)
            close(out[t], expected.flatten(), dtype)

    @pytest.mark.slow
    @pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (7, 300), (40, 1000), (3, 49_153)])
    def test_draw(self, built, dtype, rows, vocabulary):
        torch.manual_seed(0)
        logits, drawn, flips = (torch.randn(rows, vocabulary) * 3).to(dtype), 0, 0
        for turn in range(200 // rows + 1):
            options = SamplingRows(
                np.resize([1.0, 0.7, 0.0, 1.3], rows), np.full(rows, -1), np.ones(rows), np.zeros(rows),
                np.resize(np.concatenate([[0.0, 1 - 2**-53], uniforms(turn, 0)]), rows),
            )  # fmt: skip
            ids, log_probs = Library(built, dtype).draw(logits, options.temperature, options.uniform)
            expected, expected_log_probs = sample(logits, options)
            drawn, flips = drawn + rows, flips + int((ids != expected).sum())
            same = ids == expected
            np.testing.assert_allclose(log_probs[same], expected_log_probs[same], atol=1e-5)
        assert flips <= drawn // 500, f"{flips} of {drawn}"

    def test_logits_that_are_not_finite_have_a_nan_log_prob(self, built, dtype):
        logits = torch.zeros(4, 20).to(dtype)
        logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
        logits[3, :19] = -torch.inf
        ids, log_probs = Library(built, dtype).draw(logits, np.ones(4), np.full(4, 0.5))
        assert np.isnan(log_probs[:3]).all() and ids[3] == 19 and log_probs[3] == 0


def test_the_number_of_threads_changes_no_bit(built):
    torch.manual_seed(0)
    library, before = Library(built, torch.float32), torch.get_num_threads()
    ids, rows, positions = np.zeros((32, 300), dtype=np.int64), np.arange(32), np.arange(32) + 250
    q, kv = torch.randn(32, 8, 64), (torch.randn(32, 4, 300, 64), torch.randn(32, 4, 300, 64))
    x, logits, weight = torch.randn(32, 4096), torch.randn(32, 5000), torch.randn(4096)
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, normed, gated = torch.empty(32, 512), torch.empty_like(x), torch.empty(32, 2048)
            library.attend(q, kv, out, library.plan(ids, rows, positions, 32, 2, 64), 0.1)
            library.norm(x, weight, normed, 1e-6)
            library.silu_multiply(x, gated)
            drawn = library.draw(logits, np.ones(32), np.linspace(0, 0.99, 32))
            found.append([out, normed, gated, *map(torch.from_numpy, drawn)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


async def turns(model: Any, count: int, second: float = 1.0, **options: Any) -> list[Any]:
    """Two turns of conversations in groups, and what is between them."""
    async with engine_of(model, **options) as engine:
        system = random_ids(40, 1)

        async def talk(number: int) -> list[Any]:
            name = f"{options.get('seed', 0)}-{number}"
            prompt = system + random_ids(3 + number // 4 % 5 * 7, number // 4)
            if options.get("deterministic"):
                engine.open_session(name, number)
            asked = request(prompt, name, temperature=1.0, seed=number, max_new_tokens=9 + number % 9)
            first = await engine.generate(asked)
            longer = prompt + first.token_ids + random_ids(5 + number % 8, number)
            asked = request(longer, name, temperature=second, seed=1000 + number, max_new_tokens=12)
            other = await engine.generate(asked)
            engine.close_session(name)
            return [(prompt, first, 1.0), (longer, other, second)]

        tasks = [asyncio.ensure_future(talk(number)) for number in range(count)]
        return [turn for talked in await asyncio.gather(*tasks) for turn in talked]


MODELS = [
    ("Qwen3", {}),
    ("Qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
    ("Llama", {"hidden_size": 64, "intermediate_size": 100}),
    ("Qwen2", {"hidden_size": 128, "num_key_value_heads": 4}),
    ("Mistral", {"hidden_size": 64, "sliding_window": None}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "shape"), MODELS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(MODELS)])
def test_log_probs_are_those_of_a_plain_pass(compiled, run_async, architecture, shape):
    model = make_model(architecture, **{"initializer_range": 0.15, **shape})
    for parameter in model.parameters():  # norms and biases are ones and zeros else
        torch.nn.init.normal_(parameter, parameter.mean().item(), 0.15)
    for prompt, output, temperature in run_async(turns(model, 24, 0.7, forward=compiled)):
        assert_exact(model, prompt, output, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("architecture", "shape"), MODELS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(MODELS)])
def test_one_call_has_the_bits_of_the_calls_by_layers(built, architecture, shape, threads):
    """Pieces, rows that decode, and only some logits wanted, and a cache that grows."""
    model, before = make_model(architecture, **{"initializer_range": 0.15, **shape}), torch.get_num_threads()
    for parameter in model.parameters():  # biases are zeros else
        torch.nn.init.normal_(parameter, parameter.mean().item(), 0.15)
    one_call, by_layers = (CompiledForward(model, 128, built) for _ in range(2))
    assert one_call._decoder is not None
    by_layers._decoder = None
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (16, 128))
    ids[:, :9] = ids[0, :9]
    pieces = np.repeat(np.arange(3), 30), np.tile(np.arange(30), 3)
    mixed = np.array([0, 1, 2, *[3] * 40, *[4] * 7]), np.array([30, 30, 30, *range(40), *range(7)])
    steps = [
        (*pieces, 0, [29, 59, 89]),
        (*mixed, 3, [0, 1, 2, 42, 49]),
        (np.arange(4), np.array([31, 31, 31, 40]), 4, [0, 1, 2, 3]),
        (np.array([3]), np.array([41]), 1, [0]),
        (np.full(20, 5), np.arange(20), 0, []),
        (np.full(20, 5), 20 + np.arange(20), 0, [19]),
    ]
    caches = [KVCache(16, 128) for _ in range(2)]
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            for number, (rows, positions, single, wanted) in enumerate(steps):
                work = StepTokens(ids[rows, positions], rows, positions, single, np.array(wanted, dtype=np.int64))
                found = []
                for computes, cache in zip((one_call, by_layers), caches):
                    cache.reserve(int(rows.max()) + 1, 64 + 16 * number)
                    found.append(computes.compute(work, cache, ids))
                assert found[0].shape == (len(wanted), model.config.vocab_size) and torch.equal(*found)
                for layer in range(len(one_call._layers)):
                    assert all(map(torch.equal, *(cache.of_layer(layer) for cache in caches)))
    finally:
        torch.set_num_threads(before)
    assert not found[0].isnan().any()


@pytest.mark.parametrize("small", [True, False])
def test_only_the_engines_thread_has_one_thread_for_a_small_model(built, monkeypatch, small):
    monkeypatch.setattr(forward, "SMALL_WEIGHTS", 1 << 18 if small else 0)
    before, seen = torch.get_num_threads(), {}

    def count(who: str) -> None:
        seen[who] = torch.get_num_threads()

    async def go():
        async with engine_of(make_model(), forward=partial(CompiledForward, built=built)) as engine:
            await engine._command(lambda: count("engine"))
            await asyncio.to_thread(count, "later")
            count("caller")

    torch.set_num_threads(2)
    try:
        asyncio.run(go())
    finally:
        torch.set_num_threads(before)
    assert seen == {"engine": 1 if small else 2, "later": 2, "caller": 2}


@pytest.mark.parametrize("why", ["torch hides its product", "bfloat16", "another precision"])
def test_torchs_products_are_called_where_one_call_would_not_have_their_bits(built, monkeypatch, why):
    model, precision = make_model(), torch.get_float32_matmul_precision()
    if why == "torch hides its product":
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    if why == "bfloat16":
        model.bfloat16()
    computes, cache = CompiledForward(model, 64, built), KVCache(1, 64)
    cache.reserve(1, 64)
    assert (computes._decoder is not None) == (why == "another precision")
    monkeypatch.setattr(computes._library, "forward", None)  # called = an error
    zero = np.zeros(1, dtype=np.int64)
    torch.set_float32_matmul_precision("medium" if why == "another precision" else precision)
    try:
        with torch.inference_mode():
            logits = computes.compute(StepTokens(zero, zero, zero, 1, zero), cache, np.zeros((1, 64), dtype=np.int64))
            close(logits, model(torch.tensor([[0]])).logits[0], torch.bfloat16, 3)
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.slow
def test_streams_are_those_of_torchs_operators(compiled, run_async):
    model = make_model()
    ours, torchs = (run_async(turns(model, 100, **options)) for options in ({"forward": compiled}, {}))
    same = [a[1].token_ids == b[1].token_ids for a, b in zip(ours, torchs)]
    assert len(same) == 200 and sum(same) >= 199


def test_bfloat16_streams_follow_a_plain_pass(compiled, run_async):
    model = make_model(initializer_range=0.1).bfloat16()
    for prompt, output, temperature in run_async(turns(model, 8, forward=compiled)):
        ids = torch.tensor([prompt + output.token_ids])
        with torch.no_grad():
            expected = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)[len(prompt) - 1 : -1]
        found = expected.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), found, atol=0.05, rtol=0.05)


def test_filters_are_sampled_with_torchs_operators(compiled, run_async, qwen3):
    async def go(**options):
        async with engine_of(qwen3, **options) as engine:
            asked = request(PROMPT, temperature=1.0, top_k=3, top_p=0.9, seed=3, max_new_tokens=30)
            return (await engine.generate(asked)).token_ids

    assert run_async(go(forward=compiled)) == run_async(go())


def test_deterministic_runs_repeat_their_bits(compiled, run_async):
    model = make_model()
    one, two = (run_async(turns(model, 12, forward=compiled, deterministic=True)) for _ in range(2))
    assert [(t.token_ids, t.log_probs) for _, t, _ in one] == [(t.token_ids, t.log_probs) for _, t, _ in two]


def put(model: Any, name: str, new: torch.Tensor, how: str) -> None:
    part, _, name = name.rpartition(".")
    owner = model.get_submodule(part)
    if how == "another parameter":
        setattr(owner, name, torch.nn.Parameter(new.detach().clone()))
    elif how == "elsewhere":
        getattr(owner, name).data = new.detach().clone()
    else:
        getattr(owner, name).data.copy_(new)


@pytest.mark.parametrize("how", ["in place", "elsewhere", "another parameter"])
def test_new_weights_are_sampled_from(compiled, run_async, how):
    model, other = make_model(), make_model(seed=1)

    async def go():
        async with engine_of(model, forward=compiled) as engine:
            await engine.generate(request(PROMPT))
            for name, new in other.named_parameters():
                put(model, name, new, how)
            await engine.apply(InPlace(1))
            return await engine.generate(request(PROMPT))

    assert_exact(other, PROMPT, run_async(go()), 0.0)


def test_user_code_may_change_the_default_dtype_meanwhile(compiled, run_async):
    model = make_model()

    async def go():
        async with engine_of(model, forward=compiled) as engine:
            torch.set_default_dtype(torch.bfloat16)  # as transformers does while it loads a model
            try:
                return await engine.generate(request(PROMPT))
            finally:
                torch.set_default_dtype(torch.float32)

    assert_exact(model, PROMPT, run_async(go()), 0.0)


def test_a_cache_of_another_dtype_is_refused(compiled, run_async):
    model = make_model()

    async def go():
        async with engine_of(model, forward=compiled) as engine:
            await engine.generate(request(PROMPT))
            model.bfloat16()
            await engine.apply(InPlace(1))
            await engine.generate(request(PROMPT))

    with pytest.raises(EngineGoneError, match=r"cache holds torch.float32 and the model computes in torch.bfloat16"):
        run_async(go())


def with_hook(model: Any) -> Any:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    return model


def with_low_rank(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: with_hook(make_model()), "model.layers.1.mlp has a hook"),
        (lambda: with_low_rank(make_model()), "PeftModel is none of"),
        (lambda: make_model("Olmo"), "OlmoForCausalLM is none of LlamaForCausalLM"),
        (lambda: make_model().half(), "the weights are float16 on cpu, not all float32"),
        (lambda: make_model(head_dim=24), "head_dim 24 is none of"),
        (lambda: make_model(hidden_act="gelu"), "its activation is gelu"),
        (lambda: make_model("Llama", attention_bias=True, hidden_size=64), "o_proj has a bias"),
    ],
)  # fmt: skip
def test_models_that_the_kernels_cannot_compute_are_named(model, says):
    assert says in str(why_not(model()))


def engine_with(model: Any, deterministic: bool = False, **rollout: Any) -> Any:
    config = ActorRolloutRefConfig(rollout=RolloutConfig(**rollout))
    return build_engine(EngineSetup(config, model, frozenset({3}), None, 64, deterministic, seed=0))


@pytest.mark.parametrize(
    ("kernels", "deterministic", "expected"),
    [
        ("auto", False, CompiledForward),
        ("auto", True, PackedForward),
        ("torch", False, PackedForward),
        ("compiled", True, CompiledForward),
    ],
)
def test_the_key_decides(qwen3, run_async, kernels, deterministic, expected):
    engine = engine_with(qwen3, deterministic, kernels=kernels)
    assert type(engine._batcher.forward) is expected
    run_async(engine.close())


def test_a_model_that_sees_is_refused_with_compiled_kernels():
    model = with_hook(make_model())
    model.config.vision_config = object()
    with pytest.raises(ConfigError, match=r"rollout.kernels=compiled: model.layers.1.mlp has a hook"):
        engine_with(model, kernels="compiled")


def test_without_a_compiler_torch_computes_and_one_line_says_so(qwen3, run_async, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(choice, "_said", set())
    with caplog.at_level(logging.WARNING):
        engines = [engine_with(qwen3) for _ in range(2)]
    assert [type(engine._batcher.forward) for engine in engines] == [PackedForward] * 2
    (line,) = [record.getMessage() for record in caplog.records if "compiled kernels" in record.getMessage()]
    assert "no C++ compiler (c++, g++, clang++): install one" in line
    for engine in engines:
        run_async(engine.close())
    with pytest.raises(ConfigError, match=r"rollout.kernels=compiled: no C\+\+ compiler .*Set .*kernels=torch"):
        engine_with(qwen3, kernels="compiled")


def test_an_engine_whose_model_was_changed_says_so(compiled, run_async):
    model = make_model()

    async def go():
        async with engine_of(model, forward=compiled) as engine:
            await engine.generate(request(PROMPT))
            with_hook(model)
            model.model.norm.weight.data = model.model.norm.weight.data.clone()
            await engine.generate(request(PROMPT))

    with pytest.raises(EngineGoneError, match=r"changed while it was sampled from: model.layers.1.mlp has a hook"):
        run_async(go())
    with pytest.raises(KernelsError, match="has a hook"):
        CompiledForward(model, 64, build())


def test_a_deterministic_run_does_not_resume_with_other_kernels():
    then = SameKernels("a" * 32).state_dict()
    SameKernels("a" * 32).load_state_dict(copy.deepcopy(then))
    SameKernels("b" * 32).load_state_dict({})  # a checkpoint from before
    with pytest.raises(CheckpointError, match="compiled kernels aaaaaaaaaaaa, and this process has bbbbbbbbbbbb"):
        SameKernels("b" * 32).load_state_dict(then)
