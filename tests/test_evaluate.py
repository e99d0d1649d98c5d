"""`python -m verl_mt.evaluate`: numbers of a model, and a conversation with it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import warm_start

from verl_mt import evaluate
from verl_mt.config.compose import compose
from verl_mt.config_paths import resolve_model_path
from verl_mt.data.run_files import row_to_trajectory
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import pass_at_k
from verl_mt.tiny.problems import rows
from verl_mt.trainer import inference
from verl_mt.trainer.inference import start_for_groups

pytestmark = pytest.mark.slow  # published templates, commands, many configurations

QUICK = ("trainer.num_threads=1", "actor_rollout_ref.rollout.response_length=64")
GREEDY = "actor_rollout_ref.rollout.temperature=0.001"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Eight held-out problems in a folder whose name has a space and a quote."""
    folder = tmp_path_factory.mktemp("eval") / "my model's data"
    folder.mkdir()
    file = folder / "val.jsonl"
    made = [*rows(num_rows=4, seed=5, split="val"), *rows(num_rows=4, seed=6, split="val")]
    for row in made[4:]:
        row["data_source"] = "gsm8k"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


@pytest.fixture
def run(finished) -> Path:
    return finished("plain")


def metrics_in(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.json").read_text())


def answers_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_accuracy_and_pass_at_k_are_those_of_the_written_rollouts(data, tmp_path, capsys):
    words = ["--model", "verl_mt://tiny", "--data", str(data), "--n", "4", "--out", str(tmp_path / "out"), *QUICK]
    assert evaluate.main(words) == 0
    metrics, written = metrics_in(tmp_path / "out"), answers_in(tmp_path / "out")
    assert len(written) == 8 * 4
    assert all(row_to_trajectory(row).status in ("completed", "truncated") for row in written)
    groups: dict[str, list[float]] = {}
    for row in written:
        groups.setdefault(row["group_id"], []).append(row["reward_parts"].get("first_answer", row["reward"]))
    assert metrics["val/accuracy"] == pytest.approx(fmean(s for g in groups.values() for s in g))
    for k in (1, 2, 4):
        expected = fmean(pass_at_k(4, sum(s == 1 for s in g), k) for g in groups.values())
        assert metrics[f"val/pass_at_{k}"] == pytest.approx(expected)
    assert metrics["val/pass_at_4"] > metrics["val/pass_at_1"] == pytest.approx(metrics["val/accuracy"])
    by_source = [metrics["val/verl_mt/arithmetic/accuracy"], metrics["val/gsm8k/accuracy"]]
    assert metrics["val/accuracy"] == pytest.approx(fmean(by_source))
    assert metrics["val/tool_calls_mean"] > 0
    shown = capsys.readouterr().out
    assert "8 prompts x 4 samples" in shown
    for name in ("val/accuracy", "val/pass_at_1", "val/pass_at_4"):
        low, high = metrics[f"{name}/low"], metrics[f"{name}/high"]
        assert 0 <= low < metrics[name] < high <= 1 and f"{low:.4f} to {high:.4f}" in shown
    assert "val/gsm8k/accuracy/low" not in metrics


@pytest.mark.slow
def test_a_run_is_evaluated_with_its_own_data_and_tools(run, tmp_path):
    greedy = "actor_rollout_ref.rollout.val_kwargs.temperature=0"
    for name in ("one", "two"):
        assert evaluate.main([str(run), "--out", str(tmp_path / name), greedy]) == 0
    assert metrics_in(tmp_path / "one") == metrics_in(tmp_path / "two")
    assert len(answers_in(tmp_path / "one")) == 4
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics_in(tmp_path / "one")["val/accuracy"] == line["val/accuracy_greedy"]


COUNTED = """
import os, signal
from pathlib import Path

def counted(data_source, solution_str, ground_truth, extra_info):
    scored, end = Path(os.environ["SCORED"]), os.environ["ENDED"]
    with scored.open("a") as file:
        file.write(f"{ground_truth}\\n")
    if end and len(scored.read_text().splitlines()) >= int(end.split()[1]) and not scored.with_name(end).exists():
        scored.with_name(end).touch()
        os.kill(os.getpid(), signal.Signals[end.split()[0]])
    return float(len(solution_str) % 2)
"""
"""Leaves a line for each conversation that it scores; its process ends at one of them, as `ENDED` says."""


def test_an_evaluation_that_was_ended_goes_on_where_it_was(data, tmp_path):
    out, scored, reward = tmp_path / "out", tmp_path / "scored", tmp_path / "reward.py"
    reward.write_text(COUNTED)
    words = [
        sys.executable, "-m", "verl_mt.evaluate", "--model", "verl_mt://tiny", "--data", str(data), "--n", "2",
        "--out", str(out), f"reward.path={reward}:counted", "actor_rollout_ref.rollout.max_concurrent=2", *QUICK,
    ]  # fmt: skip

    def command(*more: str, end: str = "") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "SCORED": str(scored), "ENDED": end}
        return warm_start.run([*words, *more], env=env, capture_output=True, text=True, timeout=240)

    assert command(end="SIGKILL 7").returncode == -signal.SIGKILL
    killed = len(list((out / "unfinished" / "spool").glob("*.group")))
    assert 2 <= killed <= 3 and not (out / "metrics.json").exists()

    interrupted = command(end="SIGINT 11")
    kept = len(list((out / "unfinished" / "spool").glob("*.group")))
    assert interrupted.returncode == 130 and killed < kept < 8
    assert f"{kept} finished prompt(s) are kept in {out / 'unfinished'}" in interrupted.stderr

    other = command("actor_rollout_ref.rollout.val_kwargs.temperature=0")
    assert other.returncode == 2 and "+      temperature: 0.0" in other.stderr and "give another --out" in other.stderr
    assert "Traceback" not in other.stderr

    before = len(scored.read_text().splitlines())
    assert command().returncode == 0
    assert len(scored.read_text().splitlines()) - before == 2 * (8 - kept)
    answers = answers_in(out)
    assert [a["group_id"] for a in answers] == [f"inference.{k:05d}" for k in range(8) for _ in range(2)]
    assert metrics_in(out)["val/accuracy"] == pytest.approx(fmean(a["reward"] for a in answers))
    assert not (out / "unfinished").exists()


def test_an_evaluation_does_not_go_on_with_other_weights_or_other_rows(tmp_path, capsys, monkeypatch):
    """Files that keep their names: what is finished was of what they were."""
    model, file, out = tmp_path / "model", tmp_path / "val.jsonl", tmp_path / "out"
    shutil.copytree(resolve_model_path("verl_mt://tiny"), model)
    made = rows(num_rows=2, seed=5, split="val")
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    words = ["--config", "tiny", "--model", str(model), "--data", str(file), "--out", str(out), *QUICK]

    def interrupt(*counts: Any) -> None:
        if list((out / "unfinished" / "spool").glob("*.group")):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("verl_mt.trainer.inference._progress", lambda: nullcontext(interrupt))
        assert evaluate.main(words) == 130
    assert list((out / "unfinished" / "spool").glob("*.group"))
    capsys.readouterr()
    for touched in (model / "model.safetensors", file):
        before = touched.stat()
        os.utime(touched, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        assert evaluate.main(words) == 2
        assert f"+- '{touched}: " in capsys.readouterr().err
        os.utime(touched, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert evaluate.main(words) == 0 and len(answers_in(out)) == 2


def test_bad_input_leaves_nothing_in_the_folder_of_an_evaluation(tmp_path):
    out = tmp_path / "out"
    assert evaluate.main(["--model", "no/such/model", "--data", "verl_mt.tiny.problems:rows", "--out", str(out)]) == 2
    assert not out.exists()


def fails(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("no such answer")


def test_an_evaluation_in_which_all_failed_is_no_accuracy_of_zero(data, tmp_path, capsys):
    words = ["--model", "verl_mt://tiny", "--data", str(data), "--out", str(tmp_path / "out"), *QUICK]
    assert evaluate.main([*words, f"reward.path={__name__}:fails"]) == 2
    shown = capsys.readouterr()
    assert "all failed: not one of 8 trajectories survived (8 failed)" in shown.err and "no such answer" in shown.err
    assert "accuracy" not in shown.out and "val/accuracy" not in metrics_in(tmp_path / "out")
    assert len(answers_in(tmp_path / "out")) == 8


def test_prompts_that_are_too_long_are_counted_not_forgotten(data, tmp_path, capsys):
    words = ["--model", "verl_mt://tiny", "--data", str(data), "--out", str(tmp_path), *QUICK]
    words.append("data.max_prompt_length=105")
    assert evaluate.main(words) == 0
    left_out = metrics_in(tmp_path)["val/prompts_left_out"]
    assert 0 < left_out == 8 - len(answers_in(tmp_path))
    assert f"left out: {left_out} prompt(s) longer than data.max_prompt_length=105 tokens" in capsys.readouterr().out


def test_own_model_and_own_data_inherit_nothing_of_the_default_task():
    parse = evaluate.argparse.Namespace
    args = parse(
        run=None, config=None, config_path=None, model="/some/model", data="/some/data.jsonl", n=None,
        trust=False, system=None, chat=False,
    )  # fmt: skip
    config = evaluate.config_of(args, [])
    assert config.actor_rollout_ref.rollout.tool_kwargs.tools_config_file is None
    assert (config.data.val_files, config.data.val_max_samples) == ("/some/data.jsonl", -1)
    config = evaluate.config_of(args, ["experiment=gsm8k_tool_grpo", "data.val_max_samples=3"])
    assert config.actor_rollout_ref.rollout.tool_kwargs.tools_config_file == "tools_configs/gsm8k_tool.yaml"
    assert (config.actor_rollout_ref.model.path, config.data.val_max_samples) == ("/some/model", 3)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--run", "no/such/run"], "no/such/run has no config.yaml"),
        (["--model", "verl_mt://tiny", "--data", "no/such/file.parquet"], "no file 'no/such/file.parquet'"),
        (["--model", "no/such/model", "--data", "verl_mt.tiny.problems:rows"], "no/such/model"),
        (["--model", "verl_mt://tiny", "data.val_files=null"], "Name a file with --data"),
        (["--model", "verl_mt://tiny", "--n", "0"], "--n is 0"),
        (["--run", "a", "--config", "b"], "not both"),
        (["a", "b"], "name one run, not 2: a b"),
        (["--model", "verl_mt://tiny", "--trust"], "--trust has no effect without RUN"),
        (["--model", "verl_mt://tiny", "--system", "Be brief."], "--system has no effect without --chat"),
        (["data.seed=1", "no/such/run", "--n", "2"], "no/such/run has no config.yaml"),
        (["-m", "trainer.seed=1,2"], "unknown flag -m. Evaluation takes one configuration"),
        (["--model", "verl_mt://tiny", "data.val_filez=x"], "did you mean"),
        (
            ["--model", "verl_mt://tiny", "actor_rollout_ref.rollout.multi_turn.scheduler_kwargs={a:1}"],
            "unless actor_rollout_ref.rollout.multi_turn.scheduler is set",
        ),
        (["--model", "verl_mt://tiny", "actor_rollout_ref.model.lora_alpha=64"], "lora_rank is set (it is 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words, part, capsys):
    assert evaluate.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and part in err
    assert "Traceback" not in err


def test_a_run_without_an_export_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("data: {}\n")
    assert evaluate.main(["--run", str(tmp_path)]) == 2
    assert "no hf/ export" in capsys.readouterr().err


def test_code_of_another_users_run_is_named_and_not_run_without_trust(tmp_path, capsys):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\ndef f(*a, **k): return 1.0")
    (tmp_path / "config.yaml").write_text(f"reward: {{path: {tmp_path}/evil.py, name: f}}\n")
    words = ["--run", str(tmp_path), "--model", "verl_mt://tiny", "data.val_files=verl_mt.tiny.problems:rows"]
    assert evaluate.main(words) == 2
    assert f"It names reward.path={tmp_path}/evil.py. Read it, then give --trust" in capsys.readouterr().err
    assert not (tmp_path / "owned").exists()
    evaluate.main([*words, "--trust", *QUICK, "data.val_max_samples=1"])
    assert (tmp_path / "owned").exists()


def test_a_runs_redacted_secrets_have_to_be_given_again(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("reward: {kwargs: {api_key: '***'}}\n")
    assert evaluate.main(["--run", str(tmp_path), "--model", "verl_mt://tiny", "--trust"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: reward.kwargs.api_key: ***") and "again" in err


def test_rows_without_a_reward_are_refused_before_anything_is_sampled(data, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    made = [json.loads(line) for line in data.read_text().splitlines()]
    made[1]["data_source"] = "somebody/else"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    assert evaluate.main(["--model", "verl_mt://tiny", "--data", str(file), *QUICK]) == 2
    err = capsys.readouterr().err
    assert f"{file}, row 2" in err and "'somebody/else'" in err and "reward.path" in err


def test_where_there_is_no_terminal_a_line_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(inference, "_PROGRESS_EVERY_S", -1.0)
    assert evaluate.main(["--model", "verl_mt://tiny", "data.val_max_samples=4", *QUICK]) == 0
    assert re.search(r"^\d+ of \d+ conversations$", capsys.readouterr().err, re.MULTILINE)


QUESTION = "Ben has 12 bags with 7 pens each. How many pens does Ben have?"


def chat(monkeypatch, capsys, *words: str, lines: list[str]) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    monkeypatch.setenv("COLUMNS", "160")
    assert evaluate.main(["--model", "verl_mt://tiny", "--chat", GREEDY, *QUICK, *words]) == 0
    return capsys.readouterr().out


def test_an_engine_of_an_evaluation_gets_no_layers_for_adapters(tmp_path):
    """A run's export holds them in its weights. An engine would start with layers that nothing fills."""
    (tmp_path / "own.py").write_text(
        "from verl_mt.engines.scripted import ScriptedEngine\n\n\nclass Mine(ScriptedEngine):\n"
        "    check_config = classmethod(lambda cls, config, trainer: None)\n\n    @classmethod\n"
        "    def from_setup(cls, setup):\n        assert setup.config.model.lora_rank == 0\n        return cls([])\n"
    )
    config = compose(
        [f"actor_rollout_ref.rollout.name={tmp_path / 'own.py'}:Mine", "actor_rollout_ref.model.lora_rank=8"]
    )
    with inference.Inference(config) as policy:
        assert policy.config.actor_rollout_ref.model.lora_rank == 8, "the caller's configuration stays as it is"


def test_a_conversation_goes_on_past_the_limits_of_a_training_trajectory(monkeypatch, capsys):
    out = chat(monkeypatch, capsys, lines=[QUESTION] * 4)  # more turns and tokens than one trajectory may have
    assert out.startswith("system> Answer as #### N.")
    assert out.count("you> ") == 5
    assert out.count("(finished)") == 4
    first = out.split("you> ")[1]
    assert 'calculator({"expression": "12*7"})' in first
    assert "tool> 84" in first
    assert "assistant> #### 84" in first


def test_a_conversation_ends_with_an_empty_line(monkeypatch, capsys):
    out = chat(monkeypatch, capsys, "--system", "", lines=[QUESTION, "", QUESTION])
    assert "system>" not in out
    assert out.count("you> ") == 2


def test_ctrl_c_at_the_prompt_ends_the_command(monkeypatch, capsys):
    def pressed(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", pressed)
    assert evaluate.main(["--model", "verl_mt://tiny", "--chat", *QUICK]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_talks_over_a_pipe(run):
    done = warm_start.run(
        [sys.executable, "-m", "verl_mt.evaluate", "--run", str(run), "--chat", GREEDY],
        input=f"{QUESTION}\n",
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "calculator(" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_start_is_measured_with_the_words_of_the_run_and_said_to_be_learnable_or_not(data, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [tiny, _self_]\nactor_rollout_ref: {rollout: {val_kwargs: {temperature: 1.0}}}\n")
    words = ["--config-path", str(tmp_path), "--config-name", "mine", "--data", str(data), "--n", "4", *QUICK]
    assert evaluate.main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "pass_at_4" in out and "of 8 prompts have samples of different reward" in out
    assert "a start that GRPO can learn from" in out
    assert evaluate.main([*words, "actor_rollout_ref.rollout.response_length=2"]) == 0
    assert "all wrong: 8): too hard for GRPO" in " ".join(capsys.readouterr().out.split())
    assert evaluate.main(["--config-path", str(tmp_path), "--n", "4"]) == 2
    assert "--config-path has no effect without --config" in capsys.readouterr().err


def test_a_start_that_is_always_right_is_too_easy():
    def group(*rewards: float) -> TrajectoryGroup:
        made = [Trajectory("t", "p", "p", "t", reward=reward, reward_parts={"score": reward}) for reward in rewards]
        return TrajectoryGroup("p", "p", made)

    assert "too easy" in start_for_groups([group(1.0, 1.0)] * 10)
    assert "can learn from" in start_for_groups([*[group(1.0, 1.0)] * 9, group(0.0, 1.0)])
    assert "too hard" in start_for_groups([*[group(0.0, 0.0)] * 10, group(1.0, 1.0)])
