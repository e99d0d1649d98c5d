"""Two ranks on Ray, each with a real vLLM beside it."""

from __future__ import annotations

import pytest
from live import ROLLOUT, START_S, metrics_of, rows_of, vllm_python

from verl_mt.config.compose import compose
from verl_mt.trainer.build import build_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]


def test_each_replica_samples_with_the_weights_that_the_rank_beside_it_published(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    words = [
        "trainer.placement=ray", "trainer.n_workers_per_node=2", "trainer.device=cpu", "trainer.num_threads=1",
        "trainer.save_freq=-1", "trainer.logger=[console]", "trainer.export_at_end=False", "data.val_files=null",
        "trainer.total_training_steps=3", f"trainer.default_local_dir={tmp_path / 'run'}", "data.train_batch_size=8",
        "actor_rollout_ref.actor.skip_zero_advantage=False", ROLLOUT + "name=vllm", ROLLOUT + f"python={vllm_python()}",
        ROLLOUT + f"engine_timeout_s={START_S}",
    ]  # fmt: skip
    trainer = build_trainer(compose(words))
    try:
        assert len(set(trainer.engine.pids)) == 2
        trainer.fit()
        assert trainer.weights.trainer_bytes == 0
    finally:
        trainer.close()
    steps, rows = metrics_of(tmp_path / "run"), rows_of(tmp_path / "run")
    assert [step["rollout/replicas"] for step in steps] == [2] * 3
    assert max(step["rollout/logprob_diff_max"] for step in steps) <= 1e-4
    for number, of_step in enumerate(rows):
        assert len({name for row in of_step for name in row["replicas"]}) == 2
        versions = {version for row in of_step for record in row["records"] for version in record["policy_versions"]}
        assert versions == {-1, number}
