"""recipes/optuna: trials of Optuna are jobs of a sweep, and the same command goes on after SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install hydra-optuna-sweeper")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REPO = Path(__file__).resolve().parents[2]
SMALL = [
    "trainer.total_training_steps=1", "trainer.val_before_train=False", "data.train_batch_size=2",
    "data.val_max_samples=2", "actor_rollout_ref.rollout.n=2", "trainer.export_at_end=False",
    "trainer.deterministic=True",
]  # fmt: skip


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [str(REPO / "recipes" / "optuna" / "run_tiny.sh"), *SMALL, *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": path, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def jobs(folder: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (folder / "runs" / "optuna" / "jobs.jsonl").read_text().splitlines()]
    assert all(isinstance(line["objective"], float) for line in lines)
    return [(line["folder"], line["status"]) for line in lines]


def test_four_trials_killed_in_the_middle_are_each_done_once(tmp_path):
    four = "hydra.sweeper.n_trials=4"
    with start(tmp_path, four) as sweep:
        while len(list(tmp_path.glob("runs/optuna/*/config.yaml"))) < 2:
            assert sweep.poll() is None
            time.sleep(0.1)
        sweep.send_signal(signal.SIGKILL)
    assert len(jobs(tmp_path)) == 1
    out, err = start(tmp_path, four).communicate()
    assert "3 finished, 1 skipped, 0 failed" in out, err[-2000:]
    finished = [folder for folder, status in jobs(tmp_path) if status == "finished"]
    assert len(finished) == len(set(finished)) == 4
    assert (tmp_path / "runs" / "optuna" / "optimization_results.yaml").is_file()


@pytest.mark.skipif(int(version("sqlalchemy").split(".")[0]) > 1, reason="Optuna 2 stores with SQLAlchemy 1")
def test_a_stored_study_gets_further_trials(tmp_path):
    for number in (1, 2):
        words = ["hydra.sweeper.n_trials=1", f"hydra.sweeper.sampler.seed={number}"]
        out, err = start(tmp_path, *words, STORAGE="sqlite:///optuna.db").communicate()
        assert "1 finished, 0 skipped, 0 failed" in out, err[-2000:]
        assert len(jobs(tmp_path)) == number
