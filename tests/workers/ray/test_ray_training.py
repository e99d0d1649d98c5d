"""Whole runs over Ray workers: the numbers of one process, a killed worker, another number of ranks."""

from __future__ import annotations

import json
import os
import signal

import pytest

from verl_mt.config.compose import compose
from verl_mt.errors import WorkerError
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.ray
STEPS = 3
SMALL = [
    "data.train_batch_size=4", "data.val_max_samples=4", "actor_rollout_ref.rollout.n=4", "trainer.logger=[]",
    f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", "trainer.val_before_train=False",
    "trainer.num_threads=1", "trainer.save_freq=1",
]  # fmt: skip


def trainer_for(folder, *overrides):
    return build_trainer(compose([*SMALL, f"trainer.default_local_dir={folder}", *overrides]))


def ray_trainer(folder, ranks):
    return trainer_for(folder, "trainer.placement=ray", f"trainer.n_workers_per_node={ranks}", "trainer.device=cpu")


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_loses_a_worker_stops_and_goes_on_with_fewer(cluster, tmp_path):
    trainer = ray_trainer(tmp_path / "run", 2)
    original, pids = trainer.workers.update, trainer.workers.worker_pids

    def update(batch):
        if trainer.step_number == 1:
            os.kill(pids[0], signal.SIGKILL)
        return original(batch)

    trainer.workers.update = update
    with pytest.raises(WorkerError, match=r"rank 0 \(process \d+ on .*\) of 2 died while updating the policy"):
        trainer.fit()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    resumed = ray_trainer(tmp_path / "run", 1)
    assert resumed.step_number == 1
    resumed.fit()

    straight = trainer_for(tmp_path / "inline")
    straight.fit()
    on_ray, inline = metrics(tmp_path / "run"), metrics(tmp_path / "inline")
    assert [line["step"] for line in on_ray] == [line["step"] for line in inline] == [1, 2, 3]
    for one, other in zip(on_ray, inline):
        assert one["rollout/logprob_diff_max"] < 1e-4
        for name in ("reward/mean", "actor/num_updates", "actor/lr"):
            assert one[name] == other[name]
    for name in ("actor/grad_norm", "actor/entropy"):
        assert on_ray[0][name] == pytest.approx(inline[0][name], rel=1e-3)
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
