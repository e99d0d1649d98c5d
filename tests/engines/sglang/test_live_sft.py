"""Supervised training whose accuracy is measured by replicas beside the ranks, with a real SGLang on a real Ray."""

from __future__ import annotations

import json

import pytest
from live import ROLLOUT, START_S, processes_of_group

from verl_mt.diagnostics.step_metrics import tokens_by_replica
from verl_mt.extensions.supervised import sft
from verl_mt.extensions.supervised import training as supervised
from verl_mt.tiny.problems import SYSTEM, generate

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(900)]


def conversations(count: int) -> str:
    """Demonstrations of the default task that answer at once."""
    rows = []
    for problem, _ in zip(generate(5, "warm_start"), range(count)):
        said = {"system": SYSTEM, "user": problem.question, "assistant": f"#### {problem.answer}"}
        rows.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said.items()]}) + "\n")
    return "".join(rows)


@pytest.mark.release  # one engine in tests/test_sft.py, replicas beside ranks in test_live_replicas.py
def test_the_replicas_beside_the_ranks_measure_the_policy_of_each_step(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    measured, pids = [], []
    measure = supervised.Sampled.measure

    def seen(sampled, *args):
        metrics, passes = measure(sampled, *args)
        measured.append([t for groups in passes.values() for group in groups for t in group.trajectories])
        pids.extend(sampled.runner.context.engine.pids)
        return metrics, passes

    monkeypatch.setattr(supervised.Sampled, "measure", seen)
    (tmp_path / "rows.jsonl").write_text(conversations(8))
    words = ["--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), "-cn", "tiny"]
    words += ["trainer.placement=ray", "trainer.n_workers_per_node=2", "trainer.device=cpu", "trainer.num_threads=1"]
    words += ["actor_rollout_ref.actor.optim.lr=1e-3", "data.train_batch_size=4", "data.val_max_samples=24"]
    words += [ROLLOUT + "name=sglang", ROLLOUT + f"engine_timeout_s={START_S}", "trainer.test_freq=1"]
    assert sft.main(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(0 <= line["val/accuracy"] <= 1 for line in lines) and lines[0]["val/accuracy"] > 0.2
    for step, trajectories in enumerate(measured):
        assert sorted(tokens_by_replica(trajectories)) == ["rank 0", "rank 1"]
        # The weights that each token was sampled with are those of this step.
        assert {v for t in trajectories for r in t.records for v in r.policy_versions} == {-1, step}
    assert len(set(pids)) == 2 and not any(processes_of_group(pid) for pid in pids)
