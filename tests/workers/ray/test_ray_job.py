"""`ray job submit`, as docs/scaling.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
REPO = Path(__file__).resolve().parents[3]


@pytest.mark.cap("C81")
def test_a_job_trains_on_the_cluster_that_it_is_submitted_to(cluster, tmp_path):
    if cluster.dashboard is None:
        pytest.skip("jobs need ray[default]")
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VERL_MT_FROM_JOB": "1", "PYTHONPATH": str(REPO)}
    words = [
        str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", cluster.dashboard,
        "--runtime-env-json", json.dumps({"env_vars": environment}), "--",
        sys.executable, "-m", "verl_mt.trainer", f"trainer.default_local_dir={tmp_path}/run",
        "trainer.placement=ray", "trainer.n_workers_per_node=2", "trainer.device=cpu", "trainer.num_threads=1",
        "data.train_batch_size=2", "data.train_max_samples=16", "data.val_files=null",
        "actor_rollout_ref.rollout.n=4", "trainer.logger=[console]", "trainer.total_training_steps=1",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "succeeded" in done.stdout and "2 Ray worker(s)" in done.stdout
    assert (tmp_path / "run" / "FINISHED").exists()
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "actor" / "__1_0.distcp").is_file()
