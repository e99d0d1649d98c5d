"""Rollout workers on Ray, which ask the replicas of SGLang beside two ranks, and how both are lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

import pytest
import ray_machines
from command_lab import metrics_of

from verl_mt.config.compose import compose
from verl_mt.trainer.build import build_trainer

RO = "actor_rollout_ref.rollout"
ON_RAY = [
    "trainer.placement=ray", "trainer.n_workers_per_node=2", "trainer.device=cpu", "trainer.num_threads=1",
    "trainer.save_freq=-1", "trainer.logger=[]", "trainer.export_at_end=False", "data.val_files=null",
    f"{RO}.n=4", f"{RO}.response_length=64", "data.train_max_samples=64",
]  # fmt: skip
SGLANG = [f"{RO}.name=sglang", f"{RO}.engine_timeout_s=240", f"{RO}.max_num_seqs=32"]


@pytest.fixture
def trainer_of(tmp_path, monkeypatch):
    made = []
    ray_machines.disconnect()
    monkeypatch.setenv("RAY_ADDRESS", "local")

    def make(*overrides: str):
        words = [*ON_RAY, f"trainer.default_local_dir={tmp_path / 'run'}", *overrides]
        made.append(build_trainer(compose(words)))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def watched(trainer) -> list[list]:
    """The trajectories of each step, as the trainer has them after its update."""
    steps: list[list] = []
    update = trainer.sampler.update
    trainer.sampler.update = lambda groups: (update(groups), steps.append([t for g in groups for t in g.trajectories]))
    return steps


def versions_of(trajectories) -> set[int]:
    return {int(v) for t in trajectories for r in t.records for v, s in zip(r.policy_versions, r.sampled) if s}


def assert_each_once(steps, number: int) -> None:
    for trajectories in steps:
        ids = Counter(t.trajectory_id for t in trajectories)
        assert len(ids) == number and set(ids.values()) == {1}


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_ray_places_workers_whose_requests_come_to_the_engine_of_the_trainers_process(trainer_of, tmp_path):
    trainer = trainer_of(f"{RO}.num_workers=2", "trainer.total_training_steps=2", "data.train_batch_size=2")
    steps = watched(trainer)
    pids = trainer.stream.pool.pids
    assert len({*pids, os.getpid()}) == 3
    trainer.fit()
    assert [versions_of(step) for step in steps] == [{0}, {1}]
    assert_each_once(steps, 8)
    assert all(line["rollout/worker_restarts"] == 0 for line in metrics_of(tmp_path / "run"))


@pytest.mark.sglang
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_workers_ask_the_replicas_and_a_killed_worker_and_replica_cost_no_row_and_double_none(trainer_of, tmp_path):
    limits = [f"{RO}.max_concurrent=4", "trainer.total_training_steps=4", "data.train_batch_size=4"]
    limits.append(f"{RO}.response_length=32")
    trainer = trainer_of(*SGLANG, f"{RO}.num_workers=2", *limits)
    steps, pool, engines = watched(trainer), trainer.stream.pool, trainer.engine.pids
    asked = []
    trainer.engine.generate = lambda request: asked.append(request)

    def kill(step: int, pid: int) -> None:
        while trainer.step_number < step or not 2 <= pool.progress.num_finished < 8:
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)

    killers = [threading.Thread(target=kill, args=each, daemon=True) for each in ((1, pool.pids[0]), (2, engines[0]))]
    for killer in killers:
        killer.start()
    trainer.fit()
    assert not any(killer.is_alive() for killer in killers)
    assert not asked, "workers ask the replicas themselves"
    assert_each_once(steps, 16)
    assert [versions_of(step) for step in steps] == [{0}, {1}, {2}, {3}]
    assert {name for t in steps[0] for name in t.replicas} == {"rank 0", "rank 1"}
    lines = metrics_of(tmp_path / "run")
    assert max(line["rollout/logprob_diff_max"] for line in lines) <= 1e-4
    last = lines[-1]
    assert last["rollout/worker_restarts"] == 1 and 1 <= last["rollout/groups_restarted"] <= 4
    assert last["engine/restarts"] == 1 and last["rollout/replicas"] == 2
