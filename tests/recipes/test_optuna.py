"""recipes/optuna: trials of Optuna are jobs of a sweep, and the same command asks for the same trials."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hydra_plugin_folder import REPO, environment

SMALL = [
    "hydra.sweeper.n_trials=2", "trainer.total_training_steps=1", "trainer.val_before_train=False",
    "data.train_batch_size=2", "data.val_max_samples=2", "actor_rollout_ref.rollout.n=2",
    "trainer.export_at_end=False", "trainer.deterministic=True",
]  # fmt: skip


def run(folder: Path) -> tuple[str, str]:
    """(stdout, stderr) of two trials of one step each."""
    script, env = REPO / "recipes" / "optuna" / "run_tiny.sh", environment("hydra_optuna_sweeper")
    done = subprocess.run([script, *SMALL], cwd=folder, env=env, text=True, capture_output=True)
    return done.stdout, done.stderr


def jobs(folder: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (folder / "runs" / "optuna" / "jobs.jsonl").read_text().splitlines()]
    assert all(isinstance(line["objective"], float) for line in lines)
    return [(line["folder"], line["status"]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_trials_and_the_same_command_has_nothing_left_to_do(tmp_path):
    out, err = run(tmp_path)
    assert "2 finished, 0 skipped, 0 failed" in out, err[-2000:]
    assert (tmp_path / "runs" / "optuna" / "optimization_results.yaml").is_file()
    first = jobs(tmp_path)
    assert len(dict(first)) == 2
    out, err = run(tmp_path)
    assert "0 finished, 2 skipped, 0 failed" in out, err[-2000:]
    assert jobs(tmp_path)[2:] == [(folder, "skipped") for folder, _ in first]
