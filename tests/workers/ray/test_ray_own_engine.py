"""The engine of docs/your_own_engine.md beside two ranks: a run with the page's own files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import warm_start
from code_blocks import REPO, blocks_of

from verl_mt.data.row_files import read_rows

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def run(tmp_path_factory, cluster_of_session) -> Path:
    """The run directory of two steps, started in a folder with the page's files, by the page's own words."""
    folder = tmp_path_factory.mktemp("page")
    blocks = blocks_of(REPO / "docs" / "your_own_engine.md")
    for block in blocks:
        if block.title is not None:
            (folder / block.title).write_text(block.text)
    (words,) = [block.text for block in blocks if "MyReplicas" in block.text and block.language == "bash"]
    command = words.replace("\\\n", " ").split()[1:]
    # The entropy has a gradient whatever the rewards are: each step has other weights.
    command += [
        "data.train_batch_size=4",
        "data.train_max_samples=64",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ]
    command += ["actor_rollout_ref.actor.skip_zero_advantage=False", "trainer.total_training_steps=2"]
    command += ["trainer.num_threads=1", "trainer.save_freq=-1", "data.val_files=null", "trainer.export_at_end=False"]
    command += [f"trainer.default_local_dir={folder / 'run'}", "trainer.logger=[console]"]
    environment = {**os.environ, "RAY_ADDRESS": cluster_of_session.address}  # and its token, where it has one
    done = warm_start.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    return folder / "run"


def test_both_replicas_sample_with_the_weights_of_each_update(run):
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    assert len(files) == 2
    for number, file in enumerate(files):
        worst: dict[str, float] = {}
        for row in read_rows(file):
            (name,) = set(row["replicas"])
            for record in row["records"]:
                for sampled, by_engine, by_trainer in zip(
                    record["sampled"], record["rollout_log_probs"], record["old_log_probs"]
                ):
                    if sampled:
                        worst[name] = max(worst.get(name, 0.0), abs(by_engine - by_trainer))
        assert set(worst) == {"rank 0", "rank 1"} and max(worst.values()) < 1e-4, (number, worst)


def test_the_weights_changed_and_did_not_pass_the_trainer(run):
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "weights/trainer_bytes" in step]
    assert len(steps) == 2 and {step["weights/trainer_bytes"] for step in steps} == {0}
    assert all(step["actor/grad_norm"] > 0 for step in steps)
