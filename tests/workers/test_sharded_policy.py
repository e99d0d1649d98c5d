"""What a policy over ranks asks of torch, by parts that note it. Tests with processes compare the results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import nn

from verl_mt.errors import ConfigError
from verl_mt.modeling import shared_prefix
from verl_mt.modeling.exact import remember_exact, take_exact
from verl_mt.modeling.log_probs import LogProbs
from verl_mt.modeling.passes import PLAIN, Passes, passes_of, use_passes
from verl_mt.modeling.sequence_parallel import SequenceGroup
from verl_mt.workers import sharding
from verl_mt.workers.sharding import (
    ALONE,
    Ranks,
    ShardedCritic,
    ShardedPolicy,
    dummy_pass,
    expect_backward,
    hidden_states,
    model_of,
    packs,
    ranks_of,
    score,
    whole,
)


class Layer(nn.Linear):
    """What is gathered at once."""


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layers = nn.Sequential(Layer(1, 1, bias=False, dtype=dtype), Layer(1, 1, bias=False, dtype=dtype))
        self.head = nn.Linear(1, 1, bias=False, dtype=dtype)


# The constructor


@pytest.fixture
def built(monkeypatch):
    """(policy, what `fully_shard` was told, what was dealt out, whose sequences are shared)."""

    def build(model, ranks, *, kind=ShardedPolicy, ndim=1, **options):
        told, dealt, shared, meshes = [], [], [], []

        def fully_shard(module, *, mesh, offload_policy, mp_policy):
            told.append([type(module).__name__, mesh.ndim, type(offload_policy).__name__, mp_policy.reduce_dtype])
            return SimpleNamespace(
                set_gradient_divide_factor=told[-1].append, set_force_sum_reduction_for_comms=told[-1].append
            )

        monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", fully_shard)
        monkeypatch.setattr(sharding, "_mesh", lambda *args: meshes.append(args) or SimpleNamespace(ndim=ndim))
        monkeypatch.setattr(sharding, "_share_sequences", lambda *args: shared.append(args))
        monkeypatch.setattr(sharding, "_deal_out", lambda *args: dealt.append(args))
        policy = kind(model, ranks, **options)
        return policy, told, dealt, shared, meshes

    return build


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
@pytest.mark.parametrize(
    ("device", "offload", "policy"),
    [("cuda", True, "CPUOffloadPolicy"), ("cuda", False, "OffloadPolicy"), ("cpu", True, "OffloadPolicy")],
)
def test_layers_are_sharded_one_by_one_and_gradients_added_up_and_not_averaged(
    built, dtype, wide, device, offload, policy
):
    model, ranks = Model(dtype), Ranks(1, 2)
    remember_exact(model.head.weight, torch.tensor([[7.0]]))
    made, told, dealt, shared, meshes = built(model, ranks, device_type=device, offload=offload, shard=1)
    assert told == [[name, 1, policy, wide, 1.0, True] for name in ("Layer", "Layer", "ShardedPolicy")]
    assert shared_prefix._probed[model] is False, "all ranks run their layers equally often"
    assert made.model is model and ranks_of(made) is ranks and model_of(made) is model and not packs(made)
    ((of, weights, exact, by),) = dealt
    assert of is model and by is ranks and not shared and meshes == [(device, 2, 1)]
    assert [w.data_ptr() for w in weights] == [p.data_ptr() for p in model.parameters()]
    assert not any(w.requires_grad for w in weights) and exact == [None, None, torch.tensor([[7.0]])]


def test_ranks_of_one_sequence_are_told_so_before_layers_are_sharded(built):
    model, ranks = Model(), Ranks(1, 2, 2)
    *_, shared, _ = built(model, ranks, device_type="cpu")
    assert shared == [(model, ranks, "cpu")]


def test_a_model_that_names_no_layers_is_sharded_whole(built):
    _, told, *_ = built(nn.Linear(1, 1), Ranks(0, 2), device_type="cpu")
    assert [name for name, *_ in told] == ["ShardedPolicy"]


@pytest.mark.parametrize(("ndim", "asked"), [(1, []), (2, [True, False])])
def test_gradients_are_added_up_over_groups_behind_the_last_pass_only(built, ndim, asked):
    policy, *_ = built(Model(), Ranks(0, 2), device_type="cpu", ndim=ndim)
    told = []
    policy.set_requires_all_reduce = told.append
    for last in (True, False):
        expect_backward(policy, last=last)
    expect_backward(nn.Linear(1, 1), last=True)
    assert told == asked


def test_a_pass_gives_log_probs_or_hidden_states(built, monkeypatch):
    policy, *_ = built(Model(), Ranks(0, 2), device_type="cpu")
    monkeypatch.setattr(sharding, "forward_log_probs", lambda *args, **options: LogProbs((args, options), "entropy"))
    monkeypatch.setattr(sharding, "hidden_before", lambda *args, **options: ("hidden", args, options))
    assert policy("ids", x=1) == (((policy.model, "ids"), {"x": 1}), "entropy")
    assert policy("ids", hidden=True, x=1) == ("hidden", (policy.model, "ids"), {"x": 1})
    critic, *_ = built(nn.Linear(1, 1), Ranks(0, 2), kind=ShardedCritic, device_type="cpu")
    assert torch.equal(critic(torch.ones(1)), critic.model(torch.ones(1)))


# Groups of ranks


@pytest.fixture
def meshes(monkeypatch):
    made = []

    def init(device_type, shape, **options):
        made.append((device_type, shape, options))
        return SimpleNamespace(get_group=lambda name: (name, shape))

    monkeypatch.setattr(torch.distributed.device_mesh, "init_device_mesh", init)
    monkeypatch.setattr(sharding, "_patient", lambda mesh: made.append("patient") or mesh)
    return made


@pytest.mark.parametrize("shard", [None, 6, 8])
def test_without_groups_a_policy_is_spread_over_all_ranks(meshes, shard):
    sharding._mesh.__wrapped__("cuda", 6, shard)
    assert meshes == [("cuda", (6,), {})]


def test_groups_that_have_the_whole_policy_each(meshes):
    sharding._mesh.__wrapped__("cpu", 6, 2)
    assert meshes == [("cpu", (3, 2), {"mesh_dim_names": ("replicate", "shard")}), "patient"]


def test_the_group_of_ranks_that_share_sequences(meshes):
    assert sharding._sequence_group.__wrapped__("cpu", 6, 2) == ("sequence", (3, 2))
    assert meshes == [("cpu", (3, 2), {"mesh_dim_names": ("rows", "sequence")}), "patient"]


def test_groups_wait_as_long_as_the_group_of_all_ranks(monkeypatch):
    asked, told = [], []
    backend = SimpleNamespace(options=SimpleNamespace(_timeout="long"))
    everyone = SimpleNamespace(_get_backend=lambda device: asked.append(device) or backend)
    monkeypatch.setattr(sharding, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=everyone)))
    monkeypatch.setattr("torch.distributed.distributed_c10d._set_pg_timeout", lambda *args: told.append(args))
    mesh = SimpleNamespace(device_type="cpu", get_all_groups=lambda: ["a", "b"])
    assert sharding._patient(mesh) is mesh
    assert told == [("long", "a"), ("long", "b")] and asked == [torch.device("cpu")]


def a_model(passes: Passes, heads: int = 2):
    model = nn.Linear(1, 1)
    sizes = SimpleNamespace(num_attention_heads=heads)
    model.config = SimpleNamespace(get_text_config=lambda: sizes, _attn_implementation="eager")
    model.base_model = model.model = SimpleNamespace(config=model.config)
    use_passes(model, passes)
    return model


def test_ranks_share_packed_rows_only_and_each_has_a_head(monkeypatch):
    asked = []
    monkeypatch.setattr(sharding, "_sequence_group", lambda *args: asked.append(args) or "group")
    packed, ranks = Passes(packed=True, share_prefixes=True), Ranks(3, 4, 2)
    model = a_model(packed)
    sharding._share_sequences(model, ranks, "cpu")
    assert asked == [("cpu", 4, 2)]
    assert passes_of(model) == Passes(packed=True, share_prefixes=True, sequence=SequenceGroup("group", 1, 2))
    with pytest.raises(ConfigError, match="attention has 1 heads"):
        sharding._share_sequences(a_model(packed, heads=1), ranks, "cpu")
    with pytest.raises(ConfigError, match="cannot be packed"):
        sharding._share_sequences(a_model(PLAIN), ranks, "cpu")


class Shard:
    """A parameter, or a tensor that was dealt out: this rank has the first number."""

    def __init__(self, local):
        self.local = local

    def to_local(self):
        return self.local


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_and_exact_values_of_rank_0_are_dealt_out_one_by_one(monkeypatch, rank):
    broadcast, asked, dealt = [], [], []

    def deal(value, parameter):
        dealt.append((value.dtype, [*value.shape]))
        return Shard(value[:1].clone())

    monkeypatch.setattr(sharding, "_dealt", deal)
    monkeypatch.setattr(
        sharding, "dist", SimpleNamespace(broadcast=lambda buffer, src: broadcast.append((buffer, src)))
    )
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: asked.append(value) or [[True, False], [False, True]])
    parameters = [Shard(torch.zeros(1, dtype=torch.bfloat16)), Shard(torch.zeros(1, dtype=torch.bfloat16))]
    model = SimpleNamespace(parameters=lambda: parameters, buffers=lambda: ["buffer"])
    weights = [torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([3.0, 4.0]).bfloat16()]
    exact = [torch.tensor([1.001, 2.001]) if rank == 0 else None, None]
    sharding._deal_out(model, weights, exact, Ranks(rank, 2))
    assert [p.local.item() for p in parameters] == [1.0, 3.0]
    assert asked == [[rank == 0, False]] and broadcast == [("buffer", 0)]
    assert dealt == [(torch.bfloat16, [2]), (torch.float32, [2]), (torch.bfloat16, [2])]
    first = take_exact(parameters[0])
    assert isinstance(first, Shard) and take_exact(parameters[1]) is None
    if rank == 0:
        assert first.local.item() == pytest.approx(1.001)
    assert [w.numel() for w in weights] == [0, 0] and exact == [None, None], "let go at once"


# Passes


class Sharded(ShardedPolicy):
    def __init__(self, calls):
        nn.Module.__init__(self)
        self.model, self.ranks, self.calls = nn.Linear(1, 1), Ranks(0, 2), calls
        self.own = None

    def forward(self, *args, hidden=False, **options):
        self.calls.append((args, options))
        values = self.model.weight * 2
        return (values, self.own) if hidden else (values, values + 1)

    def reshard(self):
        self.calls.append("reshard")


@pytest.mark.parametrize("trains", [True, False])
def test_layers_are_given_back_where_no_backward_pass_will(trains):
    calls = []
    policy = Sharded(calls)
    with torch.set_grad_enabled(trains):
        output = score(policy, "ids", media=[SimpleNamespace(inputs=())], x=1)
    assert calls == [(("ids",), {"x": 1})] + ([] if trains else ["reshard"])
    assert torch.equal(output.log_probs_BT, policy.model.weight * 2)
    assert torch.equal(output.entropy_BT, policy.model.weight * 2 + 1)


def test_images_are_trained_on_one_rank(monkeypatch):
    seen = [SimpleNamespace(inputs=()), SimpleNamespace(inputs=("image",))]
    with pytest.raises(ConfigError, match="images and videos are trained on one rank"):
        score(Sharded([]), "ids", media=seen)
    monkeypatch.setattr(sharding, "forward_log_probs", lambda *args, **options: (args, options))
    module = nn.Linear(1, 1)
    assert score(module, "ids", media=seen) == ((module, "ids"), {"media": seen})
    assert isinstance(score(Sharded([]), "ids", media=None), LogProbs)


@pytest.mark.parametrize("shared", [True, False])
def test_hidden_states_are_everyones(monkeypatch, shared):
    calls, refused = [], []
    policy = Sharded(calls)
    if shared:
        policy.own = SimpleNamespace(everyone=lambda states: ("all of", states))
    monkeypatch.setattr(sharding, "forbid_whole_rows", refused.append)
    found = hidden_states(policy, "ids", x=1)
    assert calls == [(("ids",), {"x": 1}), "reshard"] and refused == ([] if shared else [policy.model])
    assert torch.equal(found[1] if shared else found, policy.model.weight * 2) and (found[0] == "all of") == shared
    monkeypatch.setattr(sharding, "hidden_before", lambda *args, **options: ((args, options), None))
    module = nn.Linear(1, 1)
    assert hidden_states(module, "ids", x=1) == ((module, "ids"), {"x": 1})


@pytest.mark.parametrize("trains", [True, False])
def test_a_dummy_takes_part_and_adds_0(trains):
    calls = []
    policy = Sharded(calls)
    with torch.set_grad_enabled(trains):
        dummy_pass(policy, torch.device("cpu"))
    (ids, real), options = calls[0]
    assert ids.tolist() == real.tolist() == [[1, 1]] and ids.dtype == torch.int64
    assert options["wanted_BT"].tolist() == [[False, True]] and options["temperature"] == 1.0
    assert (policy.model.weight.grad is not None) == trains
    if trains:
        assert policy.model.weight.grad.item() == 0.0


def test_what_is_not_sharded_is_whole():
    tensor = torch.ones(1)
    assert whole(tensor) is tensor
    assert whole(SimpleNamespace(full_tensor=lambda: "all")) == "all"
    module = nn.Linear(1, 1)
    assert ranks_of(module) is ALONE and model_of(module) is module
    use_passes(module, PLAIN)
    assert not packs(module)
