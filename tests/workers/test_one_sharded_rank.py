"""A policy sharded over one rank, where FSDP2, DTensors and checkpoints are what they are over many; on a GPU by NCCL.

In this process group of one the same bodies run on the CPU by gloo, so that what a GPU runs has been run before.
"""

from __future__ import annotations

import copy
import socket

import pytest
import torch
import torch.distributed as dist
from actor_toys import REWARDS, make_batch, tiny_policy, worker

from verl_mt.config.actor import ActorConfig, RefConfig
from verl_mt.data import batch as col
from verl_mt.modeling.passes import Passes, use_passes
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.sharded_checkpoint import load_shards, save_shards
from verl_mt.workers.sharding import Ranks, ShardedPolicy, model_of, whole

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
DEVICES = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA])


@pytest.fixture(scope="module")
def alone():
    """A process group of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    yield Ranks(0, 1)
    dist.destroy_process_group()


def spread(ranks, device, dtype, **options):
    model = copy.deepcopy(tiny_policy()).to(dtype)
    use_passes(model, Passes(packed=True, share_prefixes=True))
    return ShardedPolicy(model, ranks, device_type=device, **options)


def sharded(ranks, device, *, dtype=torch.float32, **options):
    return worker(spread(ranks, device, dtype), grad_clip=0.5, **options)


def plain(dtype=torch.float32, **options):
    return worker(copy.deepcopy(tiny_policy()).to(dtype), grad_clip=0.5, **options)


def weights(actor):
    return {n: whole(p.detach()).float().cpu() for n, p in model_of(actor.module).named_parameters()}


def close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=tolerance, rtol=0.0, msg=name)


@DEVICES
def test_updates_are_those_of_a_plain_module(alone, device):
    ours, theirs = sharded(alone, device, lr=1e-3), plain(lr=1e-3)
    for seed in range(3):
        batch = make_batch(REWARDS, seed=seed)
        found, expected = ours.update(batch.clone()), theirs.update(batch.clone())
        assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)
    close(weights(ours), weights(theirs), 1e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("device", [CUDA])
def test_a_reference_policy_in_cpu_memory_gives_the_log_probs_of_a_plain_one(alone, device):
    policy = spread(alone, device, torch.float32, offload=True).requires_grad_(False)
    assert {p.device.type for p in policy.parameters()} == {"cpu"}
    ref = RefWorker(policy, RefConfig(offload=True), actor=ActorConfig(), temperature=1.0, device=device)
    batch = make_batch(REWARDS)
    torch.testing.assert_close(ref.compute_log_probs(batch), plain().compute_log_probs(batch), atol=1e-4, rtol=1e-4)


@DEVICES
def test_bfloat16_gradients_are_float32(alone, device):
    actor, seen = sharded(alone, device, dtype=torch.bfloat16, ppo_micro_batch_size=1), []
    actor.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.dtype for p in actor.module.parameters() if p.grad is not None)
    )
    actor.update(make_batch(REWARDS))
    assert seen and set(seen) == {torch.float32}


@DEVICES
def test_shards_go_to_disk_and_come_back(alone, device, tmp_path):
    actor = sharded(alone, device)
    actor.update(make_batch(REWARDS))
    save_shards(actor.tensors(), tmp_path)
    other = sharded(alone, device)
    other.load_progress(actor.progress())
    load_shards(other.tensors(), tmp_path)
    for (name, ours), theirs in zip(actor.tensors().items(), other.tensors().values(), strict=True):
        assert torch.equal(whole(ours).cpu(), whole(theirs).cpu()), name


@DEVICES
def test_weights_leave_the_device_and_come_back(alone, device):
    actor = sharded(alone, device, param_offload=True)
    before = weights(actor)
    held = torch.cuda.memory_allocated() if device == "cuda" else None
    actor.offload()
    if held is not None:
        size = sum(tensor.nbytes for tensor in before.values())
        assert torch.cuda.memory_allocated() <= held - 0.9 * size
    actor.onload()
    close(weights(actor), before, 0.0)
    batch = make_batch(REWARDS)
    assert torch.isfinite(actor.compute_log_probs(batch)[batch[col.LOSS_MASK]]).all()
