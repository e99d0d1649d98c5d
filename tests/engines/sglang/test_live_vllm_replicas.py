"""Replicas of a real vLLM on Ray: separate ones, one of which is lost in an update, and one beside each rank."""

from __future__ import annotations

import os
import signal

import pytest
from live import ROLLOUT, metrics_of, processes_of_group, rows_of, words_of

from verl_mt.config.compose import compose
from verl_mt.extensions.inspection import prompt_log
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.ppo_trainer import PPOTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture
def trainer_on(tmp_path, monkeypatch):
    """Makes a trainer on Ray; ended with the test."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    made = []

    def make(*overrides: str) -> PPOTrainer:
        words = [
            "trainer.placement=ray", "trainer.device=cpu", "trainer.num_threads=1", "trainer.save_freq=-1",
            "trainer.logger=[console]", "trainer.export_at_end=False", "data.val_files=null",
            f"trainer.default_local_dir={tmp_path / 'run'}", "actor_rollout_ref.actor.skip_zero_advantage=False",
        ]  # fmt: skip
        made.append(build_trainer(compose([*words, *words_of("vllm"), *overrides])))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def ages_of(rows: list[list[dict]]) -> set[int]:
    """Steps between the weights that sampled a token and those that it trained."""
    return {
        step - version
        for step, of_step in enumerate(rows)
        for row in of_step
        for record in row["records"]
        for version, sampled in zip(record["policy_versions"], record["sampled"])
        if sampled
    }


def test_separate_engines_get_one_broadcast_and_a_lost_one_comes_back_with_the_weights_of_now(trainer_on, tmp_path):
    """Killed when both have been told that an update begins: the broadcast breaks off, for both."""
    trainer = trainer_on(
        ROLLOUT + "nnodes=1", ROLLOUT + "n_workers_per_node=2", "trainer.max_staleness=2", "data.train_max_samples=64",
        "data.train_batch_size=4", ROLLOUT + "n=4", "trainer.total_training_steps=5",
    )  # fmt: skip
    before, publish, updates = trainer.engine.pids, trainer.workers.publish, []

    def publish_and_kill(*args):
        updates.append(len(args[1]))
        if len(updates) == 2:
            os.kill(before[0], signal.SIGKILL)
        return publish(*args)

    trainer.workers.publish = publish_and_kill
    trainer.fit()
    assert updates[0] == 2, "one pass for both"
    assert trainer.weights.trainer_bytes == 0 and not processes_of_group(before[0])
    steps, rows = metrics_of(tmp_path / "run"), rows_of(tmp_path / "run")
    assert len(steps) == 5 and steps[-1]["engine/restarts"] >= 1
    assert all(len(of_step) == 16 and len({row["trajectory_id"] for row in of_step}) == 16 for of_step in rows)
    assert min(ages_of(rows)) >= 0 and max(ages_of(rows)) <= 2
    at_0 = [step["staleness/age_0/logprob_diff"] for step in steps if "staleness/age_0/logprob_diff" in step]
    assert at_0 and max(at_0) <= 1e-3
    assert len({name for of_step in rows for row in of_step for name in row["replicas"]}) == 2
    assert prompt_log.examine(tmp_path / "run").summary().endswith(" 0 missing, 0 double")


@pytest.mark.release  # separate ones run for every commit, and each publisher
def test_each_replica_samples_with_the_weights_that_the_rank_beside_it_published(trainer_on, tmp_path):
    trainer = trainer_on("trainer.n_workers_per_node=2", "trainer.total_training_steps=3", "data.train_batch_size=8")
    assert len(set(trainer.engine.pids)) == 2
    trainer.fit()
    assert trainer.weights.trainer_bytes == 0
    steps, rows = metrics_of(tmp_path / "run"), rows_of(tmp_path / "run")
    assert [step["rollout/replicas"] for step in steps] == [2] * 3
    assert max(step["rollout/logprob_diff_max"] for step in steps) <= 1e-4
    for number, of_step in enumerate(rows):
        assert len({name for row in of_step for name in row["replicas"]}) == 2
        versions = {version for row in of_step for record in row["records"] for version in record["policy_versions"]}
        assert versions == {-1, number}
