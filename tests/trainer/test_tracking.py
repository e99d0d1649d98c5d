"""Numbers reach trackers under names that they take, and a resumed run goes on in the same curves."""

from __future__ import annotations

import posixpath
import re
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.trainer.tracking import build_trackers, mlflow_name


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("val/openai/gsm8k/accuracy", "val/openai/gsm8k/accuracy"),
        ("val/pass@8", "val/pass_at_8"),
        ("val//data/a+b.jsonl/accuracy", "val/data/a_b.jsonl/accuracy"),
        ("val/../accuracy", "val/__/accuracy"),
        ("tools/my tool: 1/calls", "tools/my tool: 1/calls"),
        ("/", "_"),
    ],
)
def test_a_metric_gets_a_name_that_mlflow_takes(name, taken):
    assert mlflow_name(name) == taken


@given(st.text(max_size=30))
def test_every_text_becomes_a_name_that_mlflow_takes(name):
    taken = mlflow_name(name)
    # MLflow's own two rules: these characters, and a path that normalises to itself.
    assert re.fullmatch(r"[/\w.\- :]+", taken)
    assert posixpath.normpath(taken) == taken and not taken.startswith(("..", "/")) and taken != "."


def test_a_resumed_run_goes_on_in_its_mlflow_run(tmp_path, monkeypatch):
    calls = []
    fake = SimpleNamespace(
        set_experiment=lambda project: None,
        start_run=lambda **keys: calls.append(keys) or SimpleNamespace(info=SimpleNamespace(run_id="given-by-server")),
        log_dict=lambda config, name: calls.append(name),
        log_metrics=lambda metrics, step: calls.append((step, metrics)),
        end_run=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for resume_step in (None, 1):
        (tracker,) = build_trackers(["mlflow"], tmp_path, project="p", name="n", config={}, resume_step=resume_step)
        tracker.log(2, {"val/pass@8": 0.5})
        tracker.close()
    logged = (2, {"val/pass_at_8": 0.5})
    assert calls == [
        {"run_id": None, "run_name": "n"},
        "config.yaml",
        logged,
        {"run_id": "given-by-server", "run_name": "n"},
        logged,
    ]
