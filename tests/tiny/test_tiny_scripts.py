"""The scripts that make the pages' curves and tables run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny"
FEW = [
    "data.train_batch_size=4",
    "data.train_max_samples=64",
    "trainer.num_threads=1",
    "trainer.total_training_steps=1",
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_an_algorithms_run_is_made_once_and_its_table_is_read_from_its_files(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPE))
    import algorithms

    few = [word for word in FEW if "batch_size" not in word]
    argv = [*few, "data.train_batch_size=8", "--out", str(tmp_path), "--only", name, "--seeds", "0", "--problems", "4"]
    monkeypatch.setattr("sys.argv", ["algorithms.py", *argv])
    algorithms.main()
    folder = tmp_path / name / "seed_0"
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    algorithms.main()
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
    (found,) = algorithms.results(tmp_path)[name]
    assert found["curve"][-1] == (1, json.loads((folder / "result.json").read_text())["end"])
    assert (found["explained_variance"] is not None) == (name == "ppo")
    assert name in capsys.readouterr().out


def test_the_guards_runs_are_judged_by_their_first_sign(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPE))
    import collapses

    assert collapses.main(["--out", str(tmp_path), "--only", "seed 11", *FEW]) == 0
    assert collapses.main(["--out", str(tmp_path), "--only", "rate", *FEW]) == 1, "one step is too few to see anything"
    assert "none" in capsys.readouterr().out
