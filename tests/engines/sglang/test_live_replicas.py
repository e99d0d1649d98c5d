"""Replicas beside the ranks of a worker group: two nodes of a Ray cluster, on this machine, with a real engine."""

from __future__ import annotations

import runpy
import secrets
import socket
from collections import Counter, defaultdict
from itertools import takewhile
from pathlib import Path

import pytest
from engine_models import request
from live import EACH_VLLM_IN_RELEASE, ROLLOUT, metrics_of, processes_of_group, rows_of, words_of
from ray_machines import disconnect

from verl_mt.config.compose import compose
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.ppo_trainer import PPOTrainer
from verl_mt.workers.weight_sync import weight_update_for

_BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "replicas.py"
moved_bytes = runpy.run_path(str(_BENCHMARK), run_name="replicas")["read_and_written"]
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]  # mark.sglang, mark.vllm
FEW = [
    "data.train_max_samples=64", "data.train_batch_size=4", ROLLOUT + "n=4", ROLLOUT + "response_length=64",
    "actor_rollout_ref.actor.skip_zero_advantage=False",
]  # fmt: skip
"""Groups without a signal have the trainer's log-probs too, whichever replica sampled them."""


@pytest.fixture(scope="module")
def two_nodes():
    from ray.cluster_utils import Cluster

    disconnect()
    node = {"num_cpus": 3, "object_store_memory": 200 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    yield cluster
    disconnect()
    cluster.shutdown()


@pytest.fixture
def trainer_on(two_nodes, tmp_path, monkeypatch):
    """Makes a trainer on 2 x 2 ranks with four replicas of the engine `name`; ended with the test."""
    made = []
    monkeypatch.setenv("RAY_ADDRESS", two_nodes.address)

    def make(name: str, *overrides: str):
        words = ["trainer.placement=ray", "trainer.nnodes=2", "trainer.n_workers_per_node=2", "trainer.device=cpu"]
        words += ["trainer.num_threads=1", "trainer.save_freq=-1", "trainer.logger=[console]", "data.val_files=null"]
        words += [*words_of(name), "data.train_batch_size=8"]
        words += [f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.export_at_end=False"]
        made.append(build_trainer(compose([*words, *overrides])))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def differences_by_replica(rows: list[dict]) -> dict[str, float]:
    """Largest difference between a replica's log-probs and the trainer's, from what a step wrote."""
    worst: dict[str, float] = {}
    for row in rows:
        (name,) = set(row["replicas"])
        for record in row["records"]:
            for sampled, by_engine, by_trainer in zip(
                record["sampled"], record["rollout_log_probs"], record["old_log_probs"] or []
            ):
                if sampled and by_trainer is not None:
                    worst[name] = max(worst.get(name, 0.0), abs(by_engine - by_trainer))
    return worst


def first_turns(rows: list[dict]) -> tuple[float, float]:
    """Prompt tokens that first turns found in caches, and how many they could have found.

    At a replica, of n samples of a prompt of P tokens all but the first can find P - 1 (SGLang always computes the last
    one); the first can find what all prompts of the step begin with, if another prompt was there before.
    """
    found, prompts = 0.0, defaultdict(Counter)
    for row in rows:
        (record, *_), size = row["records"], int(row["counters"]["input_tokens/1"])
        prompts[row["replicas"][0]][tuple(record["token_ids"][:size])] += 1
        found += row["counters"].get("cached_tokens/1", 0)  # absent where it is none
    columns = zip(*(prompt for of_one in prompts.values() for prompt in of_one))
    common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
    of_groups = sum((n - 1) * (len(prompt) - 1) for of_one in prompts.values() for prompt, n in of_one.items())
    return found, of_groups + sum((len(of_one) - 1) * common for of_one in prompts.values())


@pytest.mark.sglang
@pytest.mark.release
def test_each_of_four_replicas_samples_with_the_weights_of_each_of_five_updates(trainer_on, tmp_path):
    trainer = trainer_on(
        "sglang", "trainer.total_training_steps=6", "actor_rollout_ref.actor.skip_zero_advantage=False"
    )
    pids = trainer.engine.pids
    assert len(set(pids)) == 4
    size = sum(p.nbytes for p in trainer.workers.policy_module.parameters())
    passed = passing_here(trainer)
    trainer.fit()
    assert len(passed) >= 5 and max(map(max, passed)) < size / 4
    assert trainer.weights.trainer_bytes == 0
    steps, rows = metrics_of(tmp_path / "run"), rows_of(tmp_path / "run")
    assert [step["rollout/replicas"] for step in steps] == [4] * 6
    assert min(step["rollout/replica_tokens_min_share"] for step in steps) > 0.1
    assert max(step["rollout/logprob_diff_max"] for step in steps) <= 1e-4
    for step, of_step in zip(steps[1:], rows[1:]):
        found, possible = first_turns(of_step)
        assert found >= 0.9 * possible > 0 and step["rollout/first_turn_hit_rate"] >= 0.9
    for number, of_step in enumerate(rows):
        found = differences_by_replica(of_step)
        assert sorted(found) == ["rank 0", "rank 1", "rank 2", "rank 3"]
        assert max(found.values()) <= 1e-4
        assert all(len(row["replicas"]) == row["num_turns"] for row in of_step)
        versions = {
            v for row in of_step for r in row["records"] for v, s in zip(r["policy_versions"], r["sampled"]) if s
        }
        assert versions == {number}
    trainer.close()
    assert not any(processes_of_group(pid) for pid in pids)


def passing_here(trainer: PPOTrainer) -> list[tuple[int, float]]:
    """Of each update from now on: bytes that this process reads and writes (files, pipes and connections), and how many
    more bytes of the object store, which is shared memory, Ray says are in use."""
    import ray

    passed, push = [], trainer.weights.push

    def counted(version: int) -> None:
        before, store = moved_bytes(), ray.available_resources()["object_store_memory"]
        push(version)
        passed.append((moved_bytes() - before, store - ray.available_resources()["object_store_memory"]))

    trainer.weights.push = counted
    return passed


@pytest.mark.parametrize("name", EACH_VLLM_IN_RELEASE)
def test_engines_on_devices_of_their_own_sample_with_the_weights_of_each_update(trainer_on, tmp_path, name):
    trainer = trainer_on(
        name, *FEW, "trainer.nnodes=1", ROLLOUT + "nnodes=1", ROLLOUT + "n_workers_per_node=2",
        "trainer.total_training_steps=2",
    )  # fmt: skip
    assert len(trainer.stream.pool.pids) == 1, "on Ray there is a rollout worker by default"
    trainer.fit()
    assert trainer.weights.trainer_bytes == 0
    steps, rows = metrics_of(tmp_path / "run"), rows_of(tmp_path / "run")
    assert [(step["rollout/replicas"], step["engine/restarts"]) for step in steps] == [(2, 0)] * 2
    for of_step in rows:
        found = differences_by_replica(of_step)
        assert sorted(found) == ["engine 0", "engine 1"] and max(found.values()) <= 1e-4


@pytest.mark.sglang
def test_servers_get_one_broadcast_from_the_first_rank_and_are_left_as_they_were(
    trainer_on, lab, run, tmp_path, monkeypatch
):
    """Two servers of somebody else's, two ranks: nothing of the weights passes the trainer."""
    monkeypatch.setattr(secrets, "token_urlsafe", lambda number: "one-key-of-two-servers")
    monkeypatch.setenv("SGLANG_API_KEY", "one-key-of-two-servers")
    theirs = lab.engine("launch_servers=2")
    try:
        run(theirs.start())
        urls = ",".join(replica.serving.url for replica in theirs._replicas)
        words = ["trainer.nnodes=1", ROLLOUT + f"servers=[{urls}]", "trainer.total_training_steps=2"]
        trainer = trainer_on("sglang", *FEW, *words)
        passed = passing_here(trainer)
        trainer.fit()
        assert passed and max(map(max, passed)) < sum(p.nbytes for p in lab.module.parameters()) / 4
        steps, rows = metrics_of(tmp_path / "run"), rows_of(tmp_path / "run")
        assert [(step["rollout/replicas"], step["weights/trainer_bytes"]) for step in steps] == [(2, 0)] * 2
        for of_step in rows:
            found = differences_by_replica(of_step)
            assert len(found) == 2 and max(found.values()) <= 1e-4
        # They serve on, in nobody's pause, and take their next weights from whoever comes then.
        run(theirs.apply(weight_update_for(theirs.capabilities, lab.module, 1)))
        assert run(theirs.generate(request(lab.prompts[0].ids))).token_ids
    finally:
        run(theirs.close())


@pytest.mark.sglang
@pytest.mark.release  # an engine beside each rank, engines of their own and servers run for every commit
def test_one_engine_over_the_devices_of_two_ranks_takes_their_weights(trainer_on, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    words = ("trainer.nnodes=1", ROLLOUT + "tensor_model_parallel_size=2", "trainer.total_training_steps=2")
    trainer = trainer_on("sglang", *words)
    assert len(trainer.engine.pids) == 1
    trainer.fit()
    steps = metrics_of(tmp_path / "run")
    assert [(step["rollout/replicas"], step["engine/restarts"]) for step in steps] == [(1, 0)] * 2
    assert max(step["rollout/logprob_diff_max"] for step in steps) <= 1e-4


@pytest.mark.sglang
def test_what_a_connection_carries_is_counted_whatever_call_carries_it():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with here, there:
        before = moved_bytes()
        here.sendall(bytes(50_000))
        left = 50_000
        while left:
            left -= len(there.recv(left))
        assert moved_bytes() - before >= 100_000
