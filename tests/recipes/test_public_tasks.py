"""recipes/public_tasks: demonstrations, intervals, and one run through the command."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "public_tasks"


def script(name: str) -> ModuleType:
    """A file of the recipe, as a module."""
    spec = importlib.util.spec_from_file_location(f"public_tasks_{name}", RECIPE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("question", "expression"),
    [
        ("State the final answer to the following arithmetic problem: 4 - 1 - 7 =", "4-1-7"),
        ("Solve the following multiplication: 18 * 43. Give only the result as your final answer.", "18*43"),
    ],
)
def test_a_demonstration_calls_the_calculator_with_the_questions_expression(question, expression):
    call, result, answer = script("demonstrations").conversation(question, "9", "S")["messages"][2:]
    assert call["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": expression}}
    assert (result["content"], answer["content"]) == ("9", "#### 9")
    with pytest.raises(ValueError, match="no expression in 'Spell sun'"):
        script("demonstrations").conversation("Spell sun", "nus", "S")


def test_intervals_are_those_of_the_textbook():
    measure = script("measure")
    low, high = measure.wilson(0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)
    mean, half = measure.mean_interval([0.1, 0.2, 0.3])
    assert (round(mean, 6), round(half, 3)) == (0.2, 0.248)
    assert measure.mean_interval([0.5]) == (0.5, math.inf)
    new = {"new": 60, "start_new": 0.05, "end_new": 0.3, "cpu_s": 7.2}
    rows = [{"family": "a", "seed": seed, "start": 0.1, "end": end, **new} for seed, end in ((1, 0.4), (2, 0.6))]
    written = measure.table(rows, 100)
    assert "| **a** | mean | 0.100 | 0.500, gain +0.400 ± 1.271 |" in written
    assert "| a | 2 | 0.100 (0.055 to 0.174) | 0.600 (0.502 to 0.691) | 60, 0.050, 0.300 | 7 |" in written


def test_questions_of_training_are_left_out_of_the_score_of_new_ones():
    measure = script("measure")
    start, end = [("a", 0.0), ("b", 1.0), ("b", 0.0)], [("a", 1.0), ("b", 1.0), ("b", 0.5)]
    found = measure.summary(start, end, {"a"})
    assert (found["start"], found["start_new"]) == (pytest.approx(1 / 3), 0.5)
    assert (found["end"], found["end_new"], found["new"]) == (pytest.approx(2.5 / 3), 0.75, 2)
    found = measure.summary(start, end, {"a", "b"})
    assert (found["end_new"], found["new"]) == (None, 0)


@pytest.mark.slow
def test_the_command_measures_before_and_after(tmp_path, capsys):
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    words = ["--model", "verl_mt://tiny", "--seeds", "1", "--steps", "1", "--held-out", "8", "--out", str(tmp_path)]
    words += ["--family", "{task: products, max_digits: 1}", "data.train_batch_size=2"]
    words += ["actor_rollout_ref.rollout.response_length=8", "actor_rollout_ref.rollout.n=2"]
    assert script("measure").main(words) == 0
    measured = json.loads((tmp_path / "measured_verl_mt.json").read_text())
    (row,) = measured["runs"]
    assert (row["family"], row["seed"], measured["held_out"]) == ("products", 1, 8)
    assert 0 <= row["start"] <= 1 and 0 <= row["end"] <= 1 and 0 <= row["new"] <= 8
    assert "| **products** | mean |" in capsys.readouterr().out
    # The same command reads what it found. Other overrides train.
    assert script("measure").main(words) == 0
    assert json.loads((tmp_path / "measured_verl_mt.json").read_text()) == measured
    assert not (tmp_path / "products_seed_1-2").exists()
    assert script("measure").main([*words, "data.train_batch_size=3"]) == 0
    assert (tmp_path / "products_seed_1-2").exists()


@pytest.mark.release
def test_the_script_of_smollm2_trains_two_families(tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    small = {"MODEL": "verl_mt://tiny", "OUT": str(tmp_path), "STEPS": "1", "HELD_OUT": "4"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = [str(RECIPE / "run_smollm2.sh"), "data.train_batch_size=2", "--seeds", "2"]
    done = subprocess.run(words, env={**os.environ, **small, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "measured_verl_mt.json").read_text())
    assert [(row["family"], row["seed"]) for row in measured["runs"]] == [("chain_sum", 2), ("products", 2)]
    assert "train_batch_size: 2\n" in (tmp_path / "products_seed_2" / "config.yaml").read_text()
