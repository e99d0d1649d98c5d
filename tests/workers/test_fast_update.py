"""Options for faster updates: each gives the numbers of the plain computation, and does what it is for."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from actor_toys import REWARDS, VOCAB, make_batch, tiny_policy, worker
from torch.utils._python_dispatch import TorchDispatchMode

from verl_mt.config.actor import ActorConfig, ModelConfig
from verl_mt.config.checks import reject_unused_keys
from verl_mt.config.compose import compose
from verl_mt.config.extended import section_of
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.errors import ConfigError
from verl_mt.extensions.fast_update import attention, head, layers, tune
from verl_mt.extensions.fast_update.config import ACTOR, MODEL, ActorKeys
from verl_mt.extensions.fast_update.recompute import recompute_elementwise
from verl_mt.modeling import head_log_probs as plain
from verl_mt.modeling.log_probs import forward_log_probs
from verl_mt.modeling.passes import Passes, passes_of, use_passes
from verl_mt.workers.optimizer import build_adamw, state_of
from verl_mt.workers.setup import Placement, WorkerSetup, load_workers

CPU = torch.device("cpu")


def policy(layers: int = 2):
    model = copy.deepcopy(tiny_policy(layers))
    use_passes(model, Passes(packed=True, share_prefixes=True))
    return model


def a_pass(model, rows: int, tokens: int, dtype=torch.float32):
    """Log-probs of random rows with a common beginning, and gradients by name."""
    generator = torch.Generator().manual_seed(rows * tokens)
    ids = torch.randint(1, VOCAB, (rows, tokens), generator=generator)
    ids[:, :18] = torch.arange(18) + 1
    wanted = torch.zeros_like(ids).bool()
    wanted[:, 20:] = True
    model.zero_grad()
    found = forward_log_probs(model, ids, torch.ones_like(ids), wanted_BT=wanted, temperature=1.0).log_probs_BT
    found.sum().backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(got, expected, tolerance=1e-5):
    assert (got[0] - expected[0]).abs().max() <= tolerance * expected[0].abs().max()
    for name, slope in expected[1].items():
        assert (got[1][name] - slope).abs().max() <= tolerance * slope.abs().max(), name


# --- the head


def head_results(log_probs, dtype, entropy, guess, tokens=150, vocabulary=333):
    """Log-probs, entropies and the gradients of a weighted sum of both."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, vocabulary, dtype=dtype)
    hidden = torch.randn(tokens, 16, dtype=dtype, requires_grad=True)
    targets, weights = torch.randint(vocabulary, (tokens,)), torch.randn(tokens, dtype=plain.wide_dtype(dtype))
    found, entropies = log_probs(
        layer, hidden, targets, temperature=0.7, with_entropy=entropy != "none", entropy_grad=entropy == "in the loss",
        expected={"none": None, "right": lambda: weights, "wrong": lambda: weights + 1}[guess],
    )  # fmt: skip
    loss = (found * weights).sum() + ((entropies * weights).sum() if entropy == "in the loss" else 0)
    slopes = torch.autograd.grad(loss, [hidden, layer.weight, layer.bias])
    return [found.detach(), *([] if entropies is None else [entropies.detach()]), *slopes]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(head, "TILE", {"cpu": 2**14})
    monkeypatch.setattr(plain, "LOGITS_AT_ONCE", 2**12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", ["none", "metric", "in the loss"])
@pytest.mark.parametrize("guess", ["none", "right", "wrong"])
def test_the_fused_head_has_the_values_and_gradients_of_the_plain_one(small_tiles, monkeypatch, dtype, entropy, guess):
    monkeypatch.setattr(head, "_compiled", lambda function: function)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    got, expected = (head_results(f, dtype, entropy, guess) for f in (head.fused_head_log_probs, plain.head_log_probs))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.release
def test_compiled_the_head_has_the_same_numbers_and_copies_no_logits(small_tiles):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-6)):
        ways = head.fused_head_log_probs, plain.head_log_probs
        for a, b in zip(*(head_results(way, dtype, "none", "right") for way in ways), strict=True):
            assert (a - b).abs().max() <= tolerance * b.abs().max()
    tokens, vocabulary = 2**14 // 333, 333
    logits, targets = torch.randn(tokens, vocabulary).bfloat16(), torch.arange(tokens)
    lse, _ = head._compiled(head._sums)(logits, targets, 0.7, False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        head._compiled(head._sums)(logits, targets, 0.7, False)
        head._compiled(head._write_slope)(logits, targets, lse, lse, None, None, 0.7)
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert 4 * tokens <= max(sizes) < logits.nbytes / 4


def test_a_head_that_does_more_than_multiply_is_left_to_the_plain_way():
    hidden = torch.randn(5, 7)
    found, _ = head.fused_head_log_probs(torch.nn.Identity(), hidden, torch.arange(5))
    assert torch.equal(found, hidden.log_softmax(-1)[torch.arange(5), torch.arange(5)])


# --- entropies


def test_without_the_metric_an_update_has_the_same_bits_and_entropies_where_they_are_asked_for():
    keys = ActorConfig(entropy_metric=False)  # type: ignore[call-arg]
    results = []
    for tuned in (False, True):
        actor = worker(policy(), lr=1e-2, top_entropy_quantile=0.5)
        if tuned:
            tune.tune_model(actor.module, keys, CPU)
            assert pickle.loads(pickle.dumps(passes_of(actor.module).head)).func is head.without_metric
        results.append((actor.update(make_batch(REWARDS)), [p.detach().clone() for p in actor.module.parameters()]))
    (before, weights), (after, same) = results
    assert before.keys() - after.keys() == {"actor/entropy"} and all(map(torch.equal, weights, same))
    bonus = worker(policy(), entropy_coeff=0.1)
    tune.tune_model(bonus.module, keys, CPU)
    assert bonus.update(make_batch(REWARDS))["actor/entropy"] > 0


# --- compiled layers


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients_and_compile_once_for_all_shapes():
    torch._dynamo.reset()
    model, shapes = policy(layers=3), [(4, 40), (3, 61), (6, 33), (1, 70)]
    expected = [a_pass(model, *shape) for shape in shapes]
    layers.compile_layers(model, backend="aot_eager")
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    graphs = []
    for shape, numbers in zip(shapes, expected, strict=True):
        assert_same(a_pass(model, *shape), numbers)
        graphs.append(counted["unique_graphs"])
    assert graphs[0] > 0 and graphs == graphs[:1] * 4
    # Whole rows, as an engine runs them, pass as before.
    model(input_ids=torch.ones(2, 9, dtype=torch.int64))
    assert counted["unique_graphs"] == graphs[0]
    other = copy.deepcopy(model)
    assert all(layer.forward.__self__ is layer for layer in other.model.layers)
    model.gradient_checkpointing_enable()
    model.train()
    assert_same(a_pass(model, *shapes[0]), expected[0])


@pytest.mark.release
def test_layers_compiled_to_machine_code_have_the_same_gradients():
    torch._dynamo.reset()
    model = policy()
    expected = [a_pass(model, *shape) for shape in ((4, 40), (3, 61))]
    layers.require_compiler(CPU, "key")
    layers.compile_layers(model)
    for shape, numbers in zip(((4, 40), (3, 61)), expected, strict=True):
        assert_same(a_pass(model, *shape), numbers)


def test_where_nothing_can_be_compiled_the_key_is_named(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no compiler\nmore of it")

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: fails)
    with pytest.raises(ConfigError, match=r"some.key=True: torch.compile does not work on cpu here: .*no compiler"):
        layers.require_compiler(CPU, "some.key")
    mixed = policy()
    mixed.model.layers[1] = torch.nn.Identity()
    with pytest.raises(ConfigError, match="Qwen3Model has no list of layers of one class"):
        layers.compile_layers(mixed)


# --- what is recomputed


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.name() in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_elementwise_recomputation_repeats_no_product_and_keeps_less_than_all():
    ids = torch.randint(1, VOCAB, (4, 100), generator=torch.Generator().manual_seed(0))

    def bytes_kept(model):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        kept = sum(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
        return kept, hidden

    model, found = policy(layers=4), {}
    a_pass(model, 6, 60)  # the first one tries what the model can do
    ways = {"all": lambda: None, "layers": model.gradient_checkpointing_enable}
    for name, switch in (ways | {"elementwise": lambda: recompute_elementwise(model)}).items():
        switch()
        model.train(name != "all")
        with Products() as products:
            numbers = a_pass(model, 6, 60)
        found[name] = (numbers, products.number, bytes_kept(model)[0])
    assert_same(found["layers"][0], found["all"][0], 1e-6)
    assert_same(found["elementwise"][0], found["all"][0], 1e-6)
    assert found["elementwise"][1] == found["all"][1] < found["layers"][1]
    assert found["layers"][2] < found["elementwise"][2] < found["all"][2]


# --- attention


@pytest.mark.parametrize("share", [False, True])
def test_varlen_attention_is_called_once_a_layer_with_every_segment(monkeypatch, share):
    def reference(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        """In float64, as the documentation of `torch.nn.attention.varlen` says."""
        calls.append(len(cu_q) - 1)
        assert window_size == (-1, 0) and cu_q.dtype == cu_k.dtype == torch.int32
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert enable_gqa == (q.shape[1] != k.shape[1])
        pieces, group = [], q.shape[1] // k.shape[1]
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
            keys, values = (x[c:d].double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), keys) * scale
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(int((d - c) - (b - a)))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            pieces.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(pieces).to(q.dtype)

    calls: list[int] = []
    monkeypatch.setattr(attention, "varlen_attn", reference)
    model = policy()
    use_passes(model, Passes(packed=True, share_prefixes=share))
    expected = a_pass(model, 5, 40)
    attention.attend_in_one_call(model, torch.device("cuda"))
    assert model.config._attn_implementation == attention.NAME
    assert_same(a_pass(model, 5, 40), expected, 2e-5)
    assert calls == [6 if share else 5] * 2  # layers
    whole = torch.arange(1, 10)[None]
    assert torch.isfinite(model(input_ids=whole).logits).all() and len(calls) == 2


def test_varlen_attention_is_refused_without_cuda():
    with pytest.raises(ConfigError, match=r"varlen_attention=True needs trainer.device=cuda. Found cpu"):
        attention.attend_in_one_call(policy(), CPU)


# --- the optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adamw_steps_like_the_plain_one(dtype):
    results = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(size, 8, generator=generator).to(dtype)) for size in (5, 300)]
        optimizer = build_adamw(parameters, lr=1e-2, weight_decay=0.1)
        if fused:
            tune.use_fused_kernel(optimizer)
        for _ in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            optimizer.step()
        states = [state_of(optimizer, parameter) for parameter in parameters]
        assert all(state["step"].item() == 4 for state in states)
        results.append([state.get("master", p.detach()) for state, p in zip(states, parameters)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


# --- the keys


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        reject_unused_keys(compose([*words]))
    return str(refused.value)


@pytest.mark.slow
def test_what_does_not_go_together_is_refused_before_anything_loads():
    text = refusal(f"{ACTOR}.fused_adamw=True", f"{ACTOR}.optimizer_offload=True")
    assert f"{ACTOR}.optimizer_offload=True does not go with {ACTOR}.fused_adamw=True" in text
    text = refusal(
        f"{ACTOR}.compile_layers=True", f"{MODEL}.recompute=elementwise", f"{MODEL}.enable_gradient_checkpointing=True"
    )
    assert f"does not go with {MODEL}.recompute=elementwise" in text
    assert "found actor_rollout_ref.model.dtype=float32" in refusal(f"{ACTOR}.varlen_attention=True")
    assert "has no effect unless" in refusal(f"{MODEL}.recompute=elementwise")
    assert "has no effect unless" in refusal(f"{ACTOR}.entropy_metric=False", f"{ACTOR}.entropy_coeff=0.1")
    assert not section_of(compose([]), ActorKeys).fused_head


def test_a_model_that_cannot_be_packed_is_named():
    model = policy()
    use_passes(model, Passes(packed=False, share_prefixes=False))
    with pytest.raises(ConfigError, match=r"compile_layers=True needs packed rows, and Qwen3ForCausalLM"):
        tune.tune_model(model, ActorConfig(compile_layers=True), CPU)  # type: ignore[call-arg]


def test_workers_are_tuned_alike_and_the_defaults_change_nothing(tmp_path):
    tiny_policy().save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), enable_gradient_checkpointing=True, recompute="elementwise")  # type: ignore[call-arg]
    actor = ActorConfig(use_kl_loss=True, fused_adamw=True, entropy_metric=False)  # type: ignore[call-arg]
    setup = WorkerSetup(ActorRolloutRefConfig(model=model, actor=actor), 4, 4, "cpu", 0, Placement())
    tuned, reference, _ = load_workers(setup)
    assert reference is not None
    for module in (tuned.module, reference.module):
        assert passes_of(module).head.func is head.without_metric
    assert tuned.optimizer.param_groups[0]["fused"] is True
    layer = tuned.module.model.layers[0]
    assert "context_fn" in layer._gradient_checkpointing_func.keywords
    usual, _, _ = load_workers(replace(setup, config=ActorRolloutRefConfig(model=ModelConfig(path=str(tmp_path)))))
    assert passes_of(usual.module).head is plain.head_log_probs and not usual.optimizer.param_groups[0]["fused"]
