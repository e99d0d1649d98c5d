"""The GSM8K recipe: rows from the original files, configs and scripts that compose, and a real run of a few steps."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from warm_python import warm_python

from verl_mt.config.compose import compose, hydra_main
from verl_mt.data.dataset import load_rows
from verl_mt.data.row_files import read_rows
from verl_mt.data.trajectory import StopReason
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.trainer.inference import Inference

pytestmark = pytest.mark.slow  # commands, servers, many configurations

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k"
EXPERIMENTS = ("gsm8k_tool_grpo", "gsm8k_interaction_grpo", "gsm8k_tiny")
"""Without those that add a placement: test_gsm8k_placements.py."""
SCRIPTS = sorted(RECIPE.glob("run_*.sh"))

_spec = importlib.util.spec_from_file_location("gsm8k_prepare", RECIPE / "prepare.py")
assert _spec is not None and _spec.loader is not None
prepare = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prepare)


@pytest.fixture
def problems(shared_data) -> Path:
    return shared_data / "tasks" / "gsm8k_train.jsonl"


def rows_of(source: Path, out: Path, *flags: str):
    """Prepare and load 64 rows."""
    assert prepare.main(["--source", str(source), "--out", str(out), "--limit", "64", *flags]) == 0
    return load_rows(str(out), split="train")[0].rows


@pytest.mark.cap("V10")
def test_original_problems_become_rows_of_verls_schema(problems, tmp_path):
    rows = rows_of(problems, tmp_path / "sub" / "train.parquet")
    originals = [json.loads(line) for line in problems.read_text().splitlines()[:64]]
    assert len(rows) == 64
    reward = load_reward()
    for index, (row, original) in enumerate(zip(rows, originals, strict=True)):
        assert set(row.raw) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert [m["role"] for m in row.prompt] == ["system", "user"]
        assert row.prompt[1]["content"] == original["question"]
        assert row.data_source == "openai/gsm8k"
        reward.check(row)
        truth = row.ground_truth
        assert float(truth) == float(original["answer"].split("####")[1].replace(",", ""))
        assert row.extra_info["index"] == index and row.extra_info["answer"] == original["answer"]
        assert row.need_tools_kwargs
        assert row.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
        assert row.interaction_kwargs == {"name": "gsm8k", "query": original["question"], "ground_truth": truth}


def test_the_interaction_style_asks_for_no_tool(problems, tmp_path):
    rows = rows_of(problems, tmp_path / "rows.parquet", "--style", "interaction", "--system", "Be brief.")
    assert not any(row.need_tools_kwargs or row.tools_kwargs for row in rows)
    assert {row.prompt[0]["content"] for row in rows} == {"Be brief."}


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (['{"question": "a", "answer": "x\\n#### 1"}', '{"question": "b"}'], "line 2: no text column answer"),
        (['{"query": "a", "answer": "#### 1"}'], "line 1: no text column question; it has ['answer', 'query']"),
        (['{"question": "a", "answer": "it is 7"}'], "line 1: no '#### <number>' in the answer 'it is 7'"),
        (['{"question": "a", "answer": "#### 1"}', '{"question": "a", "ans'], "line 2: not JSON"),
        (["[1, 2]"], "line 1: expected an object"),
        ([], "no problems in it"),
    ],
)
def test_a_source_that_is_not_gsm8k_is_refused_with_its_line(tmp_path, capsys, lines, part):
    source = tmp_path / "problems.jsonl"
    source.write_text("\n".join(lines))
    assert prepare.main(["--source", str(source), "--out", str(tmp_path / "out.parquet")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and str(source) in err and part in err
    assert not (tmp_path / "out.parquet").exists()


def test_a_source_that_is_absent_is_named(tmp_path, capsys, monkeypatch):
    assert prepare.main(["--source", "no/such.jsonl", "--out", str(tmp_path / "out.parquet")]) == 2
    assert "no/such.jsonl does not exist" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare.main(["--out", str(tmp_path / "out.parquet")]) == 2
    assert "'openai/gsm8k' is not a file" in (err := capsys.readouterr().err) and "pip install datasets" in err


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes(experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose([f"experiment={experiment}"])
    rollout = config.actor_rollout_ref.rollout
    assert bool(rollout.tool_kwargs.tools_config_file) or bool(rollout.interaction_config_file)
    assert config.actor_rollout_ref.actor.use_kl_loss
    assert "gsm8k" in str(config.data.train_files)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.stem)
def test_a_script_gives_commands_that_work(script, tmp_path):
    """`python` is replaced by a recorder; what was recorded is parsed by the programs that would have run."""
    log, python = tmp_path / "commands", tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {shlex.quote(str(log))}\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    words = ["bash", str(script), "trainer.total_epochs=2"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *prepared, trained = log.read_text().splitlines()
    assert len(prepared) == 2 and all(line.startswith(str(RECIPE / "prepare.py")) for line in prepared)
    assert [line.split("--split ")[1].split()[0] for line in prepared] == ["train", "test"]
    module, _, arguments = trained.removeprefix("-m ").partition(" ")
    assert module == "verl_mt.trainer"
    configs = []
    hydra_main(configs.append, argv=shlex.split(arguments))
    outs = [line.split("--out ")[1] for line in prepared]
    assert [configs[0].data.train_files, configs[0].data.val_files] == outs
    assert configs[0].trainer.total_epochs == 2


@pytest.mark.cap("V2", "V10")
def test_the_checking_tool_works_on_a_real_row(problems, tmp_path):
    """One row, the shipped tools YAML, a scripted model that submits a wrong answer, then the right one."""
    row = rows_of(problems, tmp_path / "train.parquet")[0]
    overrides = [
        "actor_rollout_ref.model.path=verl_mt://tiny", "actor_rollout_ref.model.dtype=float32",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False", "actor_rollout_ref.rollout.name=local",
        f"data.val_files={tmp_path}/train.parquet", "data.val_max_samples=1", "trainer.num_threads=1",
    ]  # fmt: skip
    truth = row.ground_truth
    said = [call("0"), call(truth), f"It is {truth}.\n#### {truth}"]
    with Inference(compose(["experiment=gsm8k_tool_grpo", *overrides])) as policy:
        chat, runner = policy.chat, policy.runner

        def turn(request):
            text = said[int(request.request_id.rpartition("/")[2]) - 1]
            return [*chat.encode_text(text, neutral=False), min(chat.end_token_ids)], None, "stop"

        real = runner.context.engine
        runner.context = replace(runner.context, engine=ScriptedEngine(turn))
        policy.stream.start(RolloutPlan(policy.prompts(), 1, "test"))
        trajectory = policy.stream.collect("test")[0].trajectories[0]
        policy.stream.call(real.close())
    assert trajectory.stop_reason == StopReason.FINISHED and trajectory.reward == 1.0
    answers = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert len(answers) == 2 and "0" in answers[0] and "1" in answers[1]
    assert trajectory.tool_rewards == {"calc_gsm8k_reward": [-0.05, 0.0, 1.0]}
    assert trajectory.counters["tools/calc_gsm8k_reward/calls"] == 2


def call(answer: str) -> str:
    arguments = {"name": "calc_gsm8k_reward", "arguments": {"answer": answer}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


@pytest.mark.slow
@pytest.mark.cap("V10", "V11")
def test_real_rows_become_updated_weights(shared_data, tmp_path):
    from transformers import AutoModelForCausalLM

    from verl_mt.config_paths import resolve_model_path

    tasks = shared_data / "tasks"
    sources = {"GSM8K_TRAIN": str(tasks / "gsm8k_train.jsonl"), "GSM8K_TEST": str(tasks / "gsm8k_test.jsonl")}
    environment = warm_python(tmp_path) | sources
    small = ["trainer.total_training_steps=1", "data.val_max_samples=2", "data.train_batch_size=4"]
    small += ["data.train_max_samples=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    words = ["bash", str(RECIPE / "run_tiny.sh"), "trainer.num_threads=1", *small]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "gsm8k-tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert all("val/openai/gsm8k/accuracy" in line for line in lines)
    line = lines[1]
    assert line["rollout/trajectories"] == 32
    assert line["rollout/failed"] == line["rollout/aborted"] == 0
    assert line["actor/grad_norm"] > 0 and line["actor/num_updates"] == 1
    assert line["rollout/logprob_diff_max"] < 1e-3
    assert line["turns/mean"] > 1  # the simulated user asked again
    assert line["group/zero_variance"] < 1

    questions = {json.loads(text)["question"] for text in (tasks / "gsm8k_train.jsonl").read_text().splitlines()}
    for row in read_rows(run / "rollouts" / "step_000001.parquet"):
        assert row["data_source"] == "openai/gsm8k"
        assert row["messages"][1]["content"] in questions
    before = AutoModelForCausalLM.from_pretrained(resolve_model_path("verl_mt://tiny")).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run / "hf").state_dict()
    assert before.keys() == after.keys()
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert all(distance > 0 for distance in moved.values())
    assert max(moved.values()) < 0.01
