"""Killing an engine in the middle of a step ends neither the run nor anything in it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from live import EACH_VLLM_IN_RELEASE, ROLLOUT, START_S, metrics_of, processes_of_group, rows_of, words_of
from test_live_kills import SMALL, Killer, assert_each_step_once

from verl_mt.config.compose import compose
from verl_mt.trainer.build import build_trainer


@pytest.mark.sglang
@pytest.mark.cap("V1")
def test_a_kill_in_the_middle_of_a_rollout_does_not_end_the_run_and_no_sample_is_lost_or_doubled(tmp_path):
    steps = train_and_kill(tmp_path)
    assert [step["engine/restarts"] for step in steps] == [0, 1, 1] and steps[1]["rollout/retries"] >= 1


@pytest.mark.sglang
@pytest.mark.release  # replicas beside ranks are killed in test_live_kills.py and test_live_workers.py
@pytest.mark.ray
@pytest.mark.cap("V1")
def test_nor_does_the_kill_of_one_of_two_servers_that_ranks_send_their_weights_to(tmp_path, monkeypatch):
    """The other one takes its conversations over; it comes back while the ranks are training."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    on_ray = ("trainer.placement=ray", "trainer.n_workers_per_node=2", "trainer.device=cpu", "trainer.num_threads=1")
    steps = train_and_kill(tmp_path, ROLLOUT + "launch_servers=2", *on_ray)
    assert steps[0]["engine/restarts"] == 0 and steps[2]["engine/restarts"] == 1


@pytest.mark.release  # mark.sglang, mark.vllm; kills of both engines in a step run for every commit
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", EACH_VLLM_IN_RELEASE)
def test_separate_engines_without_ray_are_killed_in_rollout_update_and_publish(tmp_path, name):
    """One of two each time. The other one takes its conversations over."""
    words = [*SMALL, *words_of(name), ROLLOUT + "launch_servers=2", "trainer.total_training_steps=5"]
    trainer = build_trainer(compose([*words, "trainer.save_freq=-1", f"trainer.default_local_dir={tmp_path / 'run'}"]))
    lives: list[int] = []

    def kill():
        lives.append(trainer.engine.pids[len(lives) % 2])
        os.kill(lives[-1], signal.SIGKILL)

    plan = {1: "rollout", 2: "update", 3: "publish"}
    phases = {
        "rollout": (trainer.engine, "generate"),
        "update": (trainer.workers, "update"),
        "publish": (trainer.engine._publishing, "publish"),
    }
    killer = Killer(trainer, plan, kill, phases=phases)
    trainer.fit()
    assert killer.killed == list(plan.items()) and not any(map(processes_of_group, lives))
    assert_each_step_once(tmp_path / "run", 5)
    assert metrics_of(tmp_path / "run")[-1]["engine/restarts"] == 3


def train_and_kill(tmp_path, *overrides) -> list[dict]:
    """Three steps; an engine is killed in the rollout of the second. The metrics of each step."""
    config = compose(
        [
            ROLLOUT + "name=sglang",
            ROLLOUT + f"engine_timeout_s={START_S}",
            # Few at a time, so that the rollout lasts long enough to be hit.
            ROLLOUT + "max_concurrent=8",
            "data.train_batch_size=4",
            "data.train_max_samples=64",
            "data.val_files=null",
            "trainer.total_training_steps=3",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "trainer.logger=[console]",
            *overrides,
        ]
    )
    trainer = build_trainer(config)
    pids = trainer.engine.pids
    progress = trainer.stream.progress

    def kill_in_step_two():
        while trainer.step_number < 1 or not 8 <= progress.num_finished < progress.num_trajectories - 8:
            time.sleep(0.002)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_in_step_two, daemon=True)
    killer.start()
    trainer.fit()
    killer.join(1.0)
    assert not killer.is_alive() and pids[0] not in trainer.engine.pids
    assert not any(processes_of_group(group) for group in (*pids, *trainer.engine.pids))

    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1]["rollout/aborted"] == 0
    assert max(line["rollout/logprob_diff_max"] for line in lines) <= 1e-4
    for step, rows in enumerate(rows_of(tmp_path / "run"), start=1):
        ids = [(row["prompt_id"], row["trajectory_id"]) for row in rows]
        assert len(ids) == len(set(ids)) == 4 * 8
        assert sorted(i for _, i in ids) == sorted(f"{p}.{n:02d}" for p in {p for p, _ in ids} for n in range(8))
        assert all(row["step"] == step for row in rows)
    assert step == 3
    return lines
