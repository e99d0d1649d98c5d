"""Killing SGLang in the middle of a rollout ends neither the run nor anything in it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from live import ROLLOUT, START_S, metrics_of, processes_of_group, rows_of

from verl_mt.config.compose import compose
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.sglang


@pytest.mark.cap("V1")
def test_a_kill_in_the_middle_of_a_rollout_does_not_end_the_run_and_no_sample_is_lost_or_doubled(tmp_path):
    steps = train_and_kill(tmp_path)
    assert [step["engine/restarts"] for step in steps] == [0, 1, 1] and steps[1]["rollout/retries"] >= 1


@pytest.mark.release  # replicas beside ranks are killed in test_live_kills.py and test_live_workers.py
@pytest.mark.ray
@pytest.mark.cap("V1")
def test_nor_does_the_kill_of_one_of_two_servers_that_ranks_send_their_weights_to(tmp_path, monkeypatch):
    """The other one takes its conversations over; it comes back while the ranks are training."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    on_ray = ("trainer.placement=ray", "trainer.n_workers_per_node=2", "trainer.device=cpu", "trainer.num_threads=1")
    steps = train_and_kill(tmp_path, ROLLOUT + "launch_servers=2", *on_ray)
    assert steps[0]["engine/restarts"] == 0 and steps[2]["engine/restarts"] == 1


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
