"""Every example runs; a new file in examples/ is a new test."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import warm_start
from command_lab import SMALL, fit
from tables import before_release

from verl_mt.trainer.tracking import is_timing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICK_START = EXAMPLES / "09_own_task.py"
OWN_LOOP = EXAMPLES / "own_loop.py"
# Fewer steps than the example's own default, where it takes a number.
ARGUMENTS = {
    "02_train_tiny.py": ["1"],
    "08_your_own_agent.py": ["1"],
    "01_one_conversation.py": ["--checker"],
    "own_loop.py": [*SMALL, "trainer.total_training_steps=1"],
}
SAYS = {
    "01_one_conversation.py": "of them trained",
    "02_train_tiny.py": "step 1: reward",
    "03_your_own_tool.py": "my tool was asked for",
    "04_scheduler.py": "2 record(s)",
    "05_multi_agent.py": "trajectories of one episode",
    "06_python_tool.py": "PermissionError",
    "07_image_tool.py": "are a picture of 12 x 18 patches",
    "08_your_own_agent.py": "step 1/1",
    "own_loop.py": "step 1: reward",
}
TRAINS = {"02_train_tiny.py", "08_your_own_agent.py"}
SMALLER = """
import runpy, sys
from verl_mt.trainer import build
as_written = build.build_trainer
def build_trainer(config):
    config.data.train_max_samples, config.data.val_max_samples, config.trainer.num_threads = 16, 4, 1
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n = 2, 4
    return as_written(config)
build.build_trainer = build_trainer
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs an example as it is, with an eighth of its conversations."""


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted({*EXAMPLES.glob("*.py")} - {QUICK_START}), ids=lambda path: path.name)
def test_every_example_runs(example, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(example), *ARGUMENTS.get(example.name, [])]
    command = [sys.executable, *(["-c", SMALLER] if example.name in TRAINS else []), *command]
    result = warm_start.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert SAYS.get(example.name, "") in result.stdout
    assert "trajectory failed" not in result.stderr + result.stdout
    if example.name.startswith("03"):
        assert result.stdout.count("(reward 1.0)") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, before_release(20)])
def test_the_quick_start_learns_its_task_and_stands_on_the_first_page(steps, tmp_path):
    """The ninth example is what README.md shows, in at most 20 lines, and its accuracy rises, in fewer steps too."""
    text = QUICK_START.read_text()
    code = text[text.index("import random") :]
    assert f"```python\n{code}```" in (EXAMPLES.parent / "README.md").read_text()
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
    assert code.count("total_training_steps=20,") == 1
    code = code.replace("total_training_steps=20,", f"total_training_steps={steps},")
    program = (
        f"{code}\nfirst, *_, last = run.curve('val/accuracy').values()\nassert last > first + 0.3, (first, last)\n"
    )
    done = warm_start.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{steps} steps, reward/mean" in done.stdout


@pytest.mark.slow
def test_the_own_loop_has_the_metrics_and_weights_of_the_trainer(tmp_path):
    """Bit for bit, on the default task, in at most 40 lines; the trainer validates besides."""
    assert len(OWN_LOOP.read_text().splitlines()) <= 40
    changes = ("actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.skip_zero_advantage=False")
    lines = fit(tmp_path / "trainer", "trainer.deterministic=True", *changes)
    own = runpy.run_path(str(OWN_LOOP))["train"]
    found = own(*SMALL, *changes, "trainer.logger=[]", f"trainer.default_local_dir={tmp_path / 'own'}")
    trained = [line for line in lines if line["step"]]
    # Of a validation, and of step hooks: the collapse guard and the critical path.
    beside = ("val/", "collapse/", "step", "rollout/prefix_cache_hit_rate_turn_")
    kept = [{k: v for k, v in line.items() if not k.startswith(beside)} for line in trained]
    assert [{k: v for k, v in line.items() if not is_timing(k)} for line in found] == kept and len(kept) == 3
    assert len({line["actor/grad_norm"] for line in kept}) == 3
    weights = [(tmp_path / name / "hf" / "model.safetensors").read_bytes() for name in ("trainer", "own")]
    assert weights[0] == weights[1]
