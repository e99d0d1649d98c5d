"""The core works without its extensions, and without Ray, SGLang, MCP and a web framework: it trains, resumes after
SIGKILL, evaluates and exports."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_mt.data.run_files import read_jsonl_tolerant

REPO = Path(__file__).resolve().parents[1]
WITHOUT = """
import importlib.machinery
NAMES = {"ray", "sglang", "vllm", "mcp", "fastapi", "starlette", "uvicorn", "tensorboard", "openai", "bm25s"}
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.split(".")[0] in NAMES else find(name, path, target)
)
"""
STEPS = 6
LOSS, PARSER = "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.rollout.multi_turn.tool_parser"
PARSERS = "hermes, qwen, react, search_r1"
MISSING = "Others come with verl_mt/extensions, which is not installed here: install the whole package verl_mt"
WORDS = [
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=6",
    "trainer.save_freq=1",
    "data.val_max_samples=100",
]


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A folder with the core alone, and a Python start-up file that hides packages."""
    folder = tmp_path_factory.mktemp("core")
    for name in ("verl_mt", "config", "tools_configs", "interaction_configs"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("extensions", "__pycache__"))
    (folder / "sitecustomize.py").write_text(WITHOUT)
    (folder / "batch_reward.py").write_text("def compute_score(completions, **kwargs):\n    return [0.0]\n")
    (folder / "missing_module.py").write_text("from verl_mt.experimental import agent_loop\n")
    return folder


def start(core: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(core)}
    command = [sys.executable, "-m", *words]
    return subprocess.Popen(
        command, cwd=core, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(core: Path, *words: str) -> str:
    process = start(core, *words)
    said, _ = process.communicate()
    assert process.returncode == 0, said[-3000:]
    return said


@pytest.mark.slow
@pytest.mark.xdist_group("core_alone")
class TestTheCoreAlone:
    def test_the_copy_is_what_runs_and_holds_no_extension(self, core):
        program = "import verl_mt; from importlib.util import find_spec as find; print(verl_mt.__file__, "
        program += "find('verl_mt.extensions'), find('ray'))"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=core, env={**os.environ, "PYTHONPATH": str(core)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.split() == [str(core / "verl_mt" / "__init__.py"), "None", "None"]

    def test_it_trains_goes_on_after_a_kill_and_rewards_rise(self, core):
        process, folder = start(core, "verl_mt.trainer", *WORDS), core / "runs" / "tiny"
        while process.poll() is None and not list(folder.glob("checkpoints/*2")):
            time.sleep(0.2)
        assert process.poll() is None, process.communicate()[0][-3000:]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert "resum" in run(core, "verl_mt.trainer", *WORDS).lower()
        lines = read_jsonl_tolerant(folder / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(STEPS + 1)) and (folder / "FINISHED").exists()
        assert lines[-1]["val/accuracy_greedy"] > lines[0]["val/accuracy_greedy"]

    def test_what_it_trained_is_evaluated_and_exported(self, core):
        assert "accuracy" in run(core, "verl_mt.evaluate", "--run", "runs/tiny", "data.val_max_samples=10")
        run(core, "verl_mt.export", "--checkpoint", "runs/tiny", "--out", "exported")
        assert (core / "exported" / "model.safetensors").is_file()

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("verl_mt.trainer", "trainer.dry_run=True"), "dry_run is done by an extension"),
            (("verl_mt.trainer", "trainer.logger=[wandb]"), "unknown tracker 'wandb'"),
            (("verl_mt.trainer", "actor_rollout_ref.rollout.name=sglang"), "'sglang'"),
            (("verl_mt.trainer", "trainer.collapse_guard=stop"), "trainer.collapse_guard (command line): unknown key"),
            (("verl_mt.trainer", "--advantage=grpo"), "unknown flag --advantage=grpo. --help lists the flags"),
            (
                ("verl_mt.trainer", "data.seed=x", "trainer.n_gpus_per_node=8"),
                "2 problems in the configuration: - trainer.n_gpus_per_node (command line): unknown key; did you mean "
                "trainer.n_workers_per_node? - data.seed=x (command line): Value 'x' of type 'str' could not be",
            ),
            (("verl_mt.trainer", f"{LOSS}=sapo"), "loss_mode: got 'sapo', expected one of 'vanilla', 'gspo', 'cispo',"),
            (("verl_mt.trainer", f"{PARSER}=glm45"), f"unknown tool parser 'glm45'. Registered: {PARSERS}. {MISSING}"),
            (
                ("verl_mt.trainer", "reward.path=batch_reward.py"),
                "reward batch_reward.py:compute_score: cannot tell how to call it from its parameters (completions, "
                "**kwargs). Expected compute_score(data_source, solution_str, ground_truth, extra_info). "
                "Other signatures need verl_mt/extensions, which is not installed here",
            ),
            (
                ("verl_mt.trainer", "reward.path=missing_module.py"),
                "at line 1: ModuleNotFoundError: No module named 'verl_mt.experimental'",
            ),
        ],
    )
    def test_what_an_extension_does_is_refused(self, core, words, says):
        process = start(core, *words)
        said, _ = process.communicate()
        assert process.returncode == 1 or process.returncode == 2, said[-2000:]
        assert says in " ".join(said.split()) and "Traceback" not in said
