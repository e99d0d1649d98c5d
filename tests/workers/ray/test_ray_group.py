"""The same workers in processes of their own: same numbers, and one clear error when one is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from actor_toys import REWARDS, make_batch, tiny_policy
from ray.exceptions import OutOfMemoryError, RayTaskError
from tables import before_release

from verl_mt.config.actor import ActorConfig, ModelConfig, OptimConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.data import batch as col
from verl_mt.errors import ConfigError, DataError, EngineGoneError, WorkerError
from verl_mt.extensions.cluster.workers import ray_group
from verl_mt.extensions.cluster.workers.engine_hosts import RayHost, as_engine_error
from verl_mt.workers.setup import Placement
from verl_mt.workers.worker_group import build_worker_group

pytestmark = pytest.mark.ray
TWO = Placement("ray", n_workers_per_node=2, num_threads=1)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ActorRolloutRefConfig:
    folder = tmp_path_factory.mktemp("model")
    tiny_policy().save_pretrained(folder)
    actor = ActorConfig(use_kl_loss=True, kl_loss_coef=0.1, ppo_max_token_len=64, optim=OptimConfig(lr=1e-2))
    return ActorRolloutRefConfig(model=ModelConfig(path=str(folder)), actor=actor)


def build(config, placement="inline"):
    return build_worker_group(config, total_steps=10, train_batch_size=3, placement=placement)


@pytest.fixture(scope="module")
def groups(cluster, config):
    """(in this process, on two ranks)."""
    os.environ["VERL_MT_FORWARDED"], os.environ["PRIVATE_KEY"] = "yes", "no"
    try:
        on_ray = build(config, TWO)
    finally:
        del os.environ["VERL_MT_FORWARDED"], os.environ["PRIVATE_KEY"]
    yield build(config), on_ray
    on_ray.close()


def step(group, seed=0):
    batch = make_batch(REWARDS, seed=seed)
    group.add_ref_log_probs(batch)
    return batch, group.update(batch)


def assert_same_weights(inline, on_ray):
    weights = dict(inline.full_state())
    sent = dict(on_ray.full_state())
    assert list(sent) == list(weights)
    for name, tensor in weights.items():
        assert sent[name].dtype == tensor.dtype
        torch.testing.assert_close(sent[name], tensor, atol=1e-4, rtol=1e-3)


def test_an_update_is_the_one_of_a_single_process(groups):
    inline, on_ray = groups
    assert on_ray.num_parameters == inline.num_parameters
    copy = on_ray.policy_module
    batch, expected = step(inline)
    got_batch, got = step(on_ray)
    assert got == pytest.approx(expected, abs=1e-5, rel=1e-4)
    for name in (col.REF_LOG_PROBS, col.OLD_LOG_PROBS):
        torch.testing.assert_close(got_batch[name], batch[name], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert_same_weights(inline, on_ray)
    on_ray.refresh_policy_module()
    assert on_ray.policy_module is copy
    for name, parameter in inline.policy_module.named_parameters():
        torch.testing.assert_close(dict(copy.named_parameters())[name], parameter, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(on_ray.compute_log_probs(batch), inline.compute_log_probs(batch), atol=1e-3, rtol=1e-3)


def test_weights_go_round_in_buckets_of_whole_layers(groups):
    on_ray = groups[1]
    import ray

    def with_small_buckets(worker):
        import verl_mt.extensions.cluster.workers.rank_worker as rank

        rank._BUCKET_BYTES = 1
        return len(worker._buckets())

    counts = ray.get([w.__ray_call__.remote(with_small_buckets) for w in on_ray._workers])
    assert counts == [4, 4]  # embeddings, two layers, the last norm
    assert_same_weights(groups[0], on_ray)


def test_workers_get_what_their_libraries_read_from_the_environment_and_no_secrets(groups):
    import ray

    def read(worker):
        return os.environ.get("VERL_MT_FORWARDED"), os.environ.get("HF_HUB_OFFLINE"), os.environ.get("PRIVATE_KEY")

    seen = ray.get([w.__ray_call__.remote(read) for w in groups[1]._workers])
    assert seen == [("yes", os.environ.get("HF_HUB_OFFLINE"), None)] * 2


def test_checkpoints_go_to_and_fro_between_placements(groups, config, tmp_path):
    inline, on_ray = groups
    on_ray.load_state_dict(inline.state_dict())
    assert all(torch.equal(tensor, dict(inline.full_state())[name]) for name, tensor in on_ray.full_state())
    step(on_ray, seed=1)
    on_ray.save_shards(tmp_path)
    state = on_ray.state_dict()
    assert "tensors" not in state["actor"]
    back = build(config)
    back.load_state_dict(state, tmp_path)
    assert all(torch.equal(tensor, dict(back.full_state())[name]) for name, tensor in on_ray.full_state())
    assert back.actor.num_updates == state["actor"]["num_updates"] == inline.actor.num_updates + 1
    on_ray.load_state_dict(inline.state_dict())  # both groups are equal again for who comes next


def test_a_cluster_that_is_too_small_is_refused_before_anything_starts(cluster, config):
    for placement, wanted in (
        (
            Placement("ray", nnodes=2),
            r"trainer\.nnodes=2 .* 2 machine\(s\) with 1 CPUs each. The Ray cluster has: 4 CPUs",
        ),
        (Placement("ray", n_workers_per_node=9), r"1 machine\(s\) with 9 CPUs each"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            build(config, placement)


def test_a_rank_that_is_killed_ends_the_group_with_its_name_and_the_way_on(cluster, config):
    on_ray = build(config, TWO)
    pids = on_ray.worker_pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=rf"rank 1 \(process {pids[1]} on .*\) of 2 died while updating the policy"
    ) as one:
        step_without_ref(on_ray)
    assert "The same command goes on from the run's last checkpoint" in str(one.value)
    with pytest.raises(WorkerError, match="rank 1"):
        on_ray.state_dict()
    on_ray.close()


def test_a_rank_that_ray_killed_for_memory_is_named_and_not_the_one_whose_connection_it_closed(monkeypatch):
    said = (
        "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 769b) "
        "was 22.41GB used / 23.59GB limit (0.950171)\nOOM kill reason: Memory usage 24063172608B exceeded threshold"
    )  # as Ray 2.60 said it
    closed = RuntimeError("Read error [127.0.0.1]:60640: Connection reset by peer")
    errors = {"a": RayTaskError("update", "Traceback", closed), "b": OutOfMemoryError(said)}

    def get(ref):
        raise errors[ref]

    monkeypatch.setattr(ray_group.ray, "get", get)
    monkeypatch.setattr(
        ray_group.ray, "wait", lambda refs, num_returns, timeout: (refs[:num_returns], refs[num_returns:])
    )
    group = object.__new__(ray_group.RayWorkerGroup)
    group._names, group._patience_s, group._broken = ["rank 0", "rank 1"], 1.0, None
    group._order, group._end_processes = threading.RLock(), lambda: None
    with pytest.raises(WorkerError) as raised:
        group._wait(["a", "b"], "updating the policy")
    assert str(raised.value).startswith("rank 1 of 2 died while updating the policy; its machine ran out of memory (")
    assert "22.41GB used / 23.59GB limit" in str(raised.value) and "OOM kill reason" not in str(raised.value)
    assert "ppo_max_token_len" in str(raised.value) and "last checkpoint" in str(raised.value)
    engine = as_engine_error(errors["b"])
    assert isinstance(engine, EngineGoneError) and "22.41GB used" in str(engine) and "OOM kill" not in str(engine)


def test_a_rank_that_is_killed_while_nothing_is_asked_of_it_is_noticed(cluster, config, monkeypatch):
    import ray

    group, shut = build(config, Placement("ray", num_threads=1)), []
    monkeypatch.setattr(group, "_ours", True)
    monkeypatch.setattr(ray, "shutdown", lambda: shut.append(1))
    (pid,) = group.worker_pids
    for _ in range(3):
        group.check("waiting for the rollout")
        time.sleep(ray_group._CHECK_EVERY_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"rank 0 \(process {pid} on .*\) of 1 died while waiting for the rollout"):
        while True:
            group.check("waiting for the rollout")
            time.sleep(0.05)
    with pytest.raises(WorkerError, match="rank 0"):
        group.check("waiting for the rollout")
    # The rollout's thread still asks engines through Ray, which ends a process that does so after its shutdown.
    assert not shut
    group.close()
    group.close()
    assert len(shut) == 1


def test_a_host_that_is_ended_has_no_call_that_comes_back_later(cluster):
    async def go():
        host = RayHost("rank 0", 0, 1, (), {"num_cpus": 0})
        await host.make("asyncio.Event")
        given_up, waiting = (asyncio.ensure_future(host.call("wait")) for _ in range(2))
        while len(host._answers._pending) < 2:
            await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert len(host._answers._pending) == 2, "Ray has no answer yet"
        await host.end()
        assert not host._answers._pending
        with pytest.raises(EngineGoneError):
            await waiting
        with pytest.raises(EngineGoneError):
            await host.call("is_set")

    asyncio.run(go())


def step_without_ref(group):
    batch = make_batch(REWARDS)
    batch[col.REF_LOG_PROBS] = batch[col.ROLLOUT_LOG_PROBS]
    return group.update(batch)


def test_an_error_of_a_rank_arrives_as_what_it_is(cluster, config):
    group = build(config, Placement("ray", num_threads=1))
    batch = make_batch(REWARDS)
    with pytest.raises(DataError, match="the batch has no column ref_log_probs"):
        group.update(batch)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="sharded"),
        before_release({"fsdp_size": 1}, id="a copy each"),
        pytest.param({"ulysses_sequence_parallel_size": 2}, id="rows shared"),
    ],
)
def test_a_rank_that_hangs_is_named_by_those_who_waited(cluster, config, layout):
    """Stopped, not dead: nobody closes its connections, and it never answers. Groups of some ranks wait no longer."""
    config = replace(config, actor=replace(config.actor, **layout))
    group = build(config, Placement("ray", n_workers_per_node=2, num_threads=1, worker_timeout_s=4.0))
    pids = group.worker_pids
    os.kill(pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError, match=rf"rank 1 \(process {pids[1]} on .*\) of 2 did not answer") as raised:
            step_without_ref(group)
        assert "the others waited 4 s while updating the policy" in str(raised.value)
        assert "trainer.worker_timeout_s" in str(raised.value)
    finally:
        os.kill(pids[1], signal.SIGCONT)
        group.close()


def test_a_rank_that_hangs_is_named_where_those_who_waited_are_ended_for_it(cluster, config):
    """As NCCL's watchdog ends a process whose time is up, which answers nobody then."""
    group = build(config, Placement("ray", n_workers_per_node=2, num_threads=1, worker_timeout_s=600.0))
    pids, group._patience_s = group.worker_pids, 1.0
    os.kill(pids[1], signal.SIGSTOP)
    threading.Timer(3.0, os.kill, (pids[0], signal.SIGABRT)).start()
    try:
        with pytest.raises(WorkerError, match=rf"rank 0 .* died .*rank 1 \(process {pids[1]} on .*\) did not answer\n"):
            step_without_ref(group)
    finally:
        os.kill(pids[1], signal.SIGCONT)
        group.close()


def test_a_call_that_nobody_answers_ends_too(cluster, config, monkeypatch):
    monkeypatch.setattr(ray_group, "_CALL", 1)
    group = build(config, Placement("ray", num_threads=1, worker_timeout_s=60.0))
    (pid,) = group.worker_pids
    group._patience_s = 2.0
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError, match="no rank answered within 2 s while updating the policy"):
            step_without_ref(group)
    finally:
        os.kill(pid, signal.SIGCONT)
        group.close()
