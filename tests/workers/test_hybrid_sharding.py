"""Policies of which several groups of ranks each have the whole (`fsdp_size`), and whose weights leave the device
during rollouts (`param_offload`)."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_toys import REWARDS, fill_advantages, make_batch, tiny_policy, worker
from sharded_jobs import one_update, patience_of_groups, two_updates
from tables import before_release
from torch import nn

from verl_mt.errors import EngineGoneError
from verl_mt.workers.sharding import ALONE, _patient
from verl_mt.workers.trainable import HostWeights
from verl_mt.workers.weight_sync import LiveWeights, WeightSync
from verl_mt.workers.worker_group import InlineWorkerGroup


def a_batch(seed: int = 0):
    batch = make_batch([*REWARDS, [1.0, 1.0]], seed=seed, records=2)
    fill_advantages(batch)
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "sequence", "offload"),
    [
        (2, 1, True),
        (1, 1, False),
        (2, 2, True),
        before_release(2, 1, False),
        before_release(1, 1, True),
        before_release(2, 2, False),
    ],
)
def test_two_updates_over_four_ranks_are_those_of_one_process(ranks, shard, sequence, offload):
    batches = [a_batch(seed) for seed in range(2)]
    options = {"lr": 1e-3, "ppo_max_token_len": 40, "param_offload": offload}
    expected, _ = two_updates(ALONE, [batch.clone() for batch in batches], **options)
    start = dict(tiny_policy().named_parameters())
    assert all((start[name] - weights).abs().max() > 1e-3 for name, weights in expected.items())
    for weights, waiting in ranks(4)(two_updates, batches, shard=shard, sequence=sequence, **options):
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0.0)
        assert all(bytes_ == 0 for bytes_ in waiting) == offload


@pytest.mark.slow
def test_a_group_holds_all_and_each_of_its_ranks_a_part(ranks):
    whole_bytes, whole_state = one_update(ALONE, a_batch())["bytes"]
    for shard, share in ((2, 0.55), (4, 0.3)):
        for got in ranks(4)(one_update, a_batch(), shard=shard):
            assert got["bytes"][0] < share * whole_bytes and got["bytes"][1] < share * whole_state


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "sequence"), [(2, 1), (None, 2), (2, 2)])
def test_groups_of_some_ranks_wait_as_long_as_all(ranks, shard, sequence):
    for limit, of_groups in ranks(4)(patience_of_groups, shard=shard, sequence=sequence):
        assert of_groups and set(of_groups) == {limit}


def test_groups_of_a_mesh_get_the_time_limit_of_the_group_of_all_ranks():
    limit = timedelta(seconds=1234)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        groups = [dist.new_group([0], timeout=timedelta(seconds=5)) for _ in range(2)]
        mesh = SimpleNamespace(device_type="cpu", get_all_groups=lambda: groups)
        assert _patient(mesh) is mesh
        assert [group._get_backend(torch.device("cpu")).options._timeout for group in groups] == [limit, limit]
    finally:
        dist.destroy_process_group()


def test_weights_that_are_in_use_stay_whoever_puts_them_away():
    """An engine that comes back is given the weights in a thread of its own, here in the middle of a forward pass."""
    actor = worker(tiny_policy(), param_offload=True)
    group, given = InlineWorkerGroup(actor), []

    def comes_back(*_):
        if not given:
            thread = threading.Thread(target=lambda: given.extend(LiveWeights(group)))
            thread.start()
            thread.join()

    actor.module.model.layers[0].register_forward_hook(comes_back)
    metrics = group.update(a_batch())
    expected = InlineWorkerGroup(worker(tiny_policy())).update(a_batch())
    assert given and metrics == expected
    group.offload()
    assert all(p.untyped_storage().nbytes() == 0 for p in actor.module.parameters())


def test_weights_that_cannot_be_brought_are_nobodys(monkeypatch):
    group = InlineWorkerGroup(worker(tiny_policy(), param_offload=True))
    group.offload()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(HostWeights, "onload", lambda self: (_ for _ in ()).throw(MemoryError()))
        group.state_dict()
    group.update(a_batch())
    group.offload()
    assert all(p.untyped_storage().nbytes() == 0 for p in group.actor.module.parameters())


def test_weights_are_offloaded_where_their_reader_gives_up():
    actor = worker(tiny_policy(), param_offload=True)
    weights = iter(LiveWeights(InlineWorkerGroup(actor)))
    next(weights)
    assert any(p.untyped_storage().nbytes() for p in actor.module.parameters())
    weights.close()
    assert all(p.untyped_storage().nbytes() == 0 for p in actor.module.parameters())


def test_a_checkpoint_of_weights_that_go_away_holds_copies():
    actor = worker(tiny_policy(), param_offload=True)
    group = InlineWorkerGroup(actor)
    before = {name: p.detach().clone() for name, p in actor.module.named_parameters()}
    state = group.state_dict()
    group.offload()
    assert all(torch.equal(state["actor"]["tensors"][f"module.{name}"], p) for name, p in before.items())


@pytest.mark.parametrize(("offloads", "frees"), [(True, True), (True, False), (False, True)])
def test_an_engine_makes_room_for_weights_that_come_between_two_steps(offloads, frees):
    engine = SimpleNamespace(capabilities=SimpleNamespace(frees_memory=frees), release_memory=lambda: "released")
    called = []
    sync = WeightSync(engine, SimpleNamespace(offloads=offloads, check=print), lambda work, _: called.append(work))
    assert sync.free_engine_memory() == (offloads and frees)
    assert called == (["released"] if offloads and frees else [])


def test_an_engine_that_is_gone_keeps_nothing_from_being_saved():
    def gone(work, _):
        raise EngineGoneError("killed")

    engine = SimpleNamespace(capabilities=SimpleNamespace(frees_memory=True), release_memory=lambda: None)
    assert WeightSync(engine, SimpleNamespace(offloads=True, check=print), gone).free_engine_memory(), "push tells"


def test_tied_weights_go_and_come_once():
    actor = worker(tiny_policy(), param_offload=True)
    before = {name: p.detach().clone() for name, p in actor.module.named_parameters()}
    actor.offload()
    actor.offload()
    assert all(p.untyped_storage().nbytes() == 0 for p in actor.module.parameters())
    actor.onload()
    actor.onload()
    assert all(torch.equal(p, before[name]) for name, p in actor.module.named_parameters())
    assert len(HostWeights(actor.module)._storages) == len(before)


def test_memory_of_a_file_that_was_opened_stays(tmp_path):
    """`from_pretrained` may map a file instead of reading it; such memory cannot be let go."""
    policy = tiny_policy()
    policy.save_pretrained(tmp_path)
    mapped = type(policy).from_pretrained(tmp_path)
    assert not all(p.untyped_storage().resizable() for p in mapped.parameters())
    host = HostWeights(mapped)
    host.offload()
    host.onload()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(mapped.parameters(), policy.parameters(), strict=True))


def test_the_cuda_cache_stays_where_nothing_left_a_gpu(monkeypatch):
    """Weights in CPU memory leave no GPU, and memory of another owner stays."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    mapped = nn.Linear(2, 1, bias=False)
    mapped.weight.data = torch.from_numpy(np.ones((1, 2), np.float32))
    for module, left in ((nn.Linear(2, 1, bias=False), 0), (mapped, 8)):
        host = HostWeights(module)
        host.offload()
        assert module.weight.untyped_storage().nbytes() == left and calls == []
        host.onload()
        assert module.weight.untyped_storage().nbytes() == 8
