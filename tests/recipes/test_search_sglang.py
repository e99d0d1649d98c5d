"""The search recipe on a real SGLang engine, with a real retrieval server beside it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_start

from verl_mt.config.compose import compose
from verl_mt.trainer.build import build_trainer

REPO = Path(__file__).resolve().parents[2]
RECIPE = REPO / "recipes" / "search"
sys.path.append(str(REPO / "tests" / "retrieval"))
RetrievalProcess = importlib.import_module("retrieval_process").RetrievalProcess


@pytest.mark.release
@pytest.mark.sglang
@pytest.mark.cap("V1", "V12", "C42", "C46", "C54")
def test_boxes_on_sglang_search_a_real_server_and_train_on_policy(tmp_path, monkeypatch, shared_data):
    """The boxes' passages stand among thousands of real ones, and a wrong number finds one of those."""
    data, corpus = tmp_path / "data", tmp_path / "corpus.jsonl"
    warm_start.run([sys.executable, str(RECIPE / "tiny" / "world.py"), "--out", str(data)], check=True)
    sources = [str(shared_data / "tasks" / "search_corpus.jsonl.gz"), str(data / "corpus.jsonl")]
    prepare = [sys.executable, str(RECIPE / "prepare.py"), "corpus", "--source", *sources, "--out", str(corpus)]
    warm_start.run(prepare, check=True)
    overrides = [
        f"actor_rollout_ref.model.path={RECIPE / 'tiny' / 'checkpoint'}", f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet", "data.val_max_samples=32", "data.train_batch_size=4",
        "data.train_max_samples=64",
        "actor_rollout_ref.rollout.name=sglang",
        f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={RECIPE / 'tiny' / 'tools.yaml'}",
        "trainer.total_training_steps=2", "trainer.logger=[]", f"trainer.default_local_dir={tmp_path}/run",
    ]  # fmt: skip
    warm = SimpleNamespace(**vars(subprocess) | {"Popen": warm_start.Popen})
    monkeypatch.setattr(sys.modules[RetrievalProcess.__module__], "subprocess", warm)
    with RetrievalProcess(corpus) as server:
        monkeypatch.setenv("SEARCH_URL", server.url)
        build_trainer(compose(overrides, "search_boxes", RECIPE / "config")).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["val/accuracy_greedy"] > 0.05 and lines[0]["val/tool_calls_mean"] > 0.5
    steps = [line for line in lines if "rollout/trajectories" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["rollout/trajectories"] == 32 and line["rollout/failed"] == line["rollout/aborted"] == 0
        assert line["tools/search/calls"] > 16 and line["tools/search/errors"] == 0
        assert line["tools/search/cache_hit_rate"] > 0  # eight samples of a question ask nearly the same
        assert line["rollout/logprob_diff_max"] < 1e-3 and line["actor/grad_norm"] > 0
