"""The stage that runs a recipe and verl's own command on the same rows: all of it that needs no GPU and no verl."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm_start
import yaml
from tables import one_of_each

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config, leaves
from verl_mt.extensions.compat.migrate import migrate
from verl_mt.plugins import load_object

REPO = Path(__file__).resolve().parents[2]
sys.path += [str(REPO / "tests" / "retrieval")]
_spec = importlib.util.spec_from_file_location("beside_verl", REPO / "recipes" / "beside_verl.py")
assert _spec is not None and _spec.loader is not None
beside = importlib.util.module_from_spec(_spec)
sys.modules["beside_verl"] = beside
_spec.loader.exec_module(beside)

STAGES = [(task, model, gpus) for task in beside.TASKS for model in beside.MODELS for gpus in (1, 8)]

EXPLAINED = {
    "actor_rollout_ref.actor.shuffle": "of mini-batches, and a step has one",
    "actor_rollout_ref.rollout.mode": "verl's way of sampling, of which there is one here",
    "actor_rollout_ref.rollout.multi_turn.enable": "there is a tools file",
    "actor_rollout_ref.rollout.multi_turn.tool_argument_types": "what a tool does with a wrong call",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_tokens": "verl's sync mode does not cut what a tool says",
    "actor_rollout_ref.rollout.multi_turn.tool_response_keep": "the same",
    "actor_rollout_ref.rollout.tool_kwargs.tools_config_file": "one tool, named for each library",
    "actor_rollout_ref.rollout.val_kwargs.greedy_too": "a second validation, which the recipe does without",
    "actor_rollout_ref.ref.log_prob_max_token_len": "null = the actor's, which is the same number",
    "reward.path": "null = by the row's data_source, which is exact match for these",
    "trainer.total_epochs": "total_training_steps is set",
    "trainer.project_name": "a name",
    "trainer.experiment_name": "a name",
    "trainer.default_local_dir": "a place",
    "trainer.logger": "where numbers are written",
    "trainer.max_actor_ckpt_to_keep": "none is written",
    "trainer.device": "auto finds the GPUs",
}
"""Key -> why the two commands may differ in it."""


def stage(folder: Path, task: str = "gsm8k", model: str = "0.5b", gpus: int = 1, **more: Any):
    return beside.Stage(
        task, model, gpus, 30, folder / "train.parquet", folder / "test.parquet", folder / "out", **more
    )


def composed(words: list[str]) -> Config:
    return compose(words[words.index("verl_mt.trainer") + 1 :])


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model", "gpus"), one_of_each(STAGES, lambda stage: (stage[0], stage[2])))
def test_both_commands_ask_for_the_same(tmp_path, task, model, gpus):
    made = stage(tmp_path, task, model, gpus)
    ours, read = composed(made.ours()), migrate(shlex.join(["python3", *made.verl()[1:]]))
    assert not read.refused and not read.changed
    theirs = compose(read.overrides)
    differing = {key for key in leaves() if value_of(ours, key) != value_of(theirs, key)}
    assert differing <= EXPLAINED.keys()
    assert ours.actor_rollout_ref.model.path == f"Qwen/Qwen2.5-{model.upper()}-Instruct"
    assert ours.trainer.nnodes * ours.trainer.n_workers_per_node == gpus
    same = ("data.train_files", "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n", "trainer.test_freq")
    assert all(value_of(ours, key) == value_of(theirs, key) is not None for key in same)


@pytest.mark.slow
def test_every_explained_difference_is_one(tmp_path):
    found = set()
    for task in beside.TASKS:
        made = stage(tmp_path, task, gpus=8)
        ours, theirs = composed(made.ours()), compose(migrate(shlex.join(["python3", *made.verl()[1:]])).overrides)
        found |= {key for key in leaves() if value_of(ours, key) != value_of(theirs, key)}
    assert found == EXPLAINED.keys()


@pytest.mark.parametrize("task", beside.TASKS)
def test_both_tools_files_describe_one_tool(tmp_path, task):
    ours, theirs = (
        yaml.safe_load(stage(tmp_path, task).tools_file(side).read_text())["tools"][0] for side in beside.SIDES
    )
    assert ours["tool_schema"] == theirs["tool_schema"]
    assert theirs["class_name"] == ours["class_name"].replace("verl_mt", "verl")
    load_object(ours["class_name"], what="the tool")


@pytest.mark.parametrize("task", beside.TASKS)
def test_verls_tools_are_those_that_its_own_example_names(shared_data, tmp_path, task):
    examples = shared_data.parent / "peers/verl/v0.6.1/examples/sglang_multiturn/config/tool_config"
    published = yaml.safe_load((examples / f"{task}_tool_config.yaml").read_text())["tools"][0]
    ours = yaml.safe_load(stage(tmp_path, task).tools_file("verl").read_text())["tools"][0]
    assert ours["class_name"] == published["class_name"]
    name, arguments = (
        [tool["tool_schema"]["function"][part] for tool in (published, ours)] for part in ("name", "parameters")
    )
    assert name[0] == name[1] and arguments[0]["required"] == arguments[1]["required"]
    assert set(published["config"]) & set(ours["config"])


@pytest.mark.parametrize("task", beside.TASKS)
def test_verl_knows_every_key_of_its_command(shared_data, tmp_path, task):
    """Hydra would end the command otherwise; the configuration is verl's own, of the version that is named."""
    folder = shared_data.parent / "peers" / "verl" / f"v{beside.VERL}" / "verl" / "trainer" / "config"
    known = yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text())
    for word in stage(tmp_path, task).verl()[3:]:
        section: Any = known
        for part in word.partition("=")[0].split("."):
            assert part in section, word
            section = section[part]


def test_numbers_of_a_run_of_ours():
    one = {"rollout/trajectories": 8, "prompt/tokens_mean": 100.0, "response/tokens_mean": 50.0}
    times = {"time/rollout_s": 3.0, "time/weights_s": 1.0, "time/ref_s": 0.5, "time/update_s": 2.0, "time/step_s": 6.0}
    slow = {name: 10 * value for name, value in times.items()}
    metrics = {0: {"val/accuracy": 0.1}, 1: one | slow, 2: one | times, 3: one | times | {"val/accuracy": 0.4}}
    found = beside.summary("ours", metrics, 2, 41.5)
    assert found["accuracy_before"] == 0.1 and found["accuracy_after"] == 0.4 and found["steps"] == 3
    assert found["tokens_per_second_per_gpu"] == pytest.approx(8 * 150 / 6 / 2)  # without the first, slow step
    assert found["seconds"] == {"rollout, weights": 4.0, "reference": 0.5, "update": 2.0, "step": 6.0}
    assert found["peak_memory_gb"] == 41.5 and found["missing"] == []


def test_numbers_of_a_run_of_verl(tmp_path):
    name = "val-core/openai/gsm8k/reward/mean@1"
    times = {"timing_s/gen": 3.0, "timing_s/old_log_prob": 0.5, "timing_s/ref": 0.5, "timing_s/update_actor": 2.0}
    step = times | {"timing_s/step": 6.0, "perf/total_num_tokens": 1200}
    lines = [{"step": 0, "data": {name: 0.1}}, {"step": 1, "data": step}, {"step": 2, "data": step | {name: 0.5}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = beside.summary("verl", beside.metrics_of_verl(tmp_path), 8, None)
    assert found["accuracy_before"] == 0.1 and found["accuracy_after"] == 0.5
    assert found["tokens_per_second_per_gpu"] == 1200 / 6 / 8
    assert found["seconds"] == {"rollout, weights": 3.0, "reference": 0.5, "update": 2.5, "step": 6.0}
    assert found["missing"] == ["peak_memory_gb"]


def test_accuracy_of_verl_is_its_rewards_own_where_it_tells_one():
    numbers = {"val-core/a/acc/mean@1": 0.2, "val-core/b/acc/mean@1": 0.4, "val-core/a/reward/mean@1": 9.0}
    assert beside._accuracy_of_verl(numbers) == pytest.approx(0.3)
    assert beside._accuracy_of_verl({"val-aux/a/acc/mean@1": 1.0}) is None


def test_what_a_log_does_not_say_is_null_and_named():
    found = beside.summary("verl", {1: {"timing_s/step": 2.0}}, 1, None)
    assert found["tokens_per_second_per_gpu"] is None and found["seconds"]["update"] is None
    assert {"accuracy_before", "accuracy_after", "tokens_per_second_per_gpu", "update"} <= set(found["missing"])


def files(folder: Path) -> list[str]:
    for name in ("train", "val"):
        (folder / f"{name}.parquet").write_bytes(name.encode())
    return ["--train", str(folder / "train.parquet"), "--val", str(folder / "val.parquet")]


def test_without_verl_it_says_how_to_get_it_and_ours_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(beside.Stage, "ours", lambda self: [sys.executable, "-c", "print('trained')"])
    words = ["--task", "gsm8k", "--out", str(tmp_path / "both.json"), *files(tmp_path)]
    assert beside.main(words) == 1
    assert "pip install 'verl==0.6.1'" in capsys.readouterr().err
    found = json.loads((tmp_path / "both.json").read_text())
    assert found["ours"]["steps"] == 0 and "verl" not in found and len(found["rows"]["train"]) == 64
    assert beside.main([*words, "--only", "ours"]) == 0


def test_a_command_that_fails_ends_with_its_last_lines(tmp_path, monkeypatch, capsys):
    program = "print('the reason'); raise SystemExit(3)"
    monkeypatch.setattr(beside.Stage, "ours", lambda self: [sys.executable, "-c", program])
    words = ["--task", "gsm8k", "--only", "ours", "--out", str(tmp_path / "x.json"), *files(tmp_path)]
    assert beside.main(words) == 1
    said = capsys.readouterr().err
    assert "ours ended with status 3" in said and said.rstrip().endswith("the reason") and "ours.log" in said
    assert "ours" not in json.loads((tmp_path / "x.json").read_text())


def test_results_of_other_rows_are_not_mixed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(beside.Stage, "ours", lambda self: [sys.executable, "-c", ""])
    words = ["--task", "gsm8k", "--only", "ours", "--out", str(tmp_path / "x.json"), *files(tmp_path)]
    assert beside.main(words) == 0
    (tmp_path / "train.parquet").write_bytes(b"other rows")
    assert beside.main(words) == 2
    assert "other rows" in capsys.readouterr().err


def test_both_commands_are_shown_without_being_run(tmp_path, capsys):
    words = ["--task", "search", "--gpus", "8", "--print", "--out", str(tmp_path / "x.json"), *files(tmp_path)]
    assert beside.main(words) == 0
    ours, theirs = capsys.readouterr().out.split("\n\n")
    assert "verl_mt.trainer" in ours and "verl.trainer.main_ppo" in theirs and not (tmp_path / "x.json").exists()


@pytest.fixture(scope="module")
def tiny_qwen(tmp_path_factory, shared_data) -> Path:
    """Qwen2.5's architecture and tokenizer, and two small layers."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "qwen"
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "qwen2.5")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SMALL = [
    "actor_rollout_ref.rollout.name=local", "actor_rollout_ref.rollout.response_length=24", "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2", "data.val_max_samples=2",
    "trainer.device=cpu", "trainer.num_threads=1", "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
]  # fmt: skip
ROWS = {
    "gsm8k": ("gsm8k_train.jsonl", []),
    "search": ("search_qa.jsonl", ["questions"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gsm8k", pytest.param("search", marks=pytest.mark.release)])
def test_a_step_of_the_real_architecture_and_tokenizer(shared_data, tiny_qwen, tmp_path, monkeypatch, capsys, task):
    """The command as a person gives it, `--only ours`, on a CPU."""

    def run(words: list[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        return (warm_start if words[0] == sys.executable else subprocess).run(words, **kwargs)

    monkeypatch.setattr(beside, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run}))
    monkeypatch.chdir(tmp_path)
    source, kind = ROWS[task]
    for name in ("train", "val"):
        words = [*kind, "--source", str(shared_data / "tasks" / source), "--style", "tool", "--limit", "8"]
        made = [
            sys.executable,
            str(REPO / "recipes" / task / "prepare.py"),
            *words,
            "--out",
            f"{tmp_path}/{name}.parquet",
        ]
        warm_start.run(made, check=True, capture_output=True)
    out = tmp_path / "result.json"
    words = [
        "--task", task, "--model", str(tiny_qwen), "--steps", "1", "--only", "ours", "--out", str(out), "--train",
        f"{tmp_path}/train.parquet", "--val", f"{tmp_path}/val.parquet", *SMALL,
    ]  # fmt: skip
    assert beside.main(words) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert found["task"] == task and found["gpus"] == 1 and found["ours"]["steps"] == 1
    ours = found["ours"]
    assert ours["accuracy_before"] is not None and ours["accuracy_after"] is not None
    assert ours["tokens_per_second_per_gpu"] > 0 and ours["version"]
    assert ours["seconds"]["step"] >= ours["seconds"]["update"] > 0
    assert ours["missing"] == ["peak_memory_gb"]
    assert (tmp_path / "result" / "ours" / "metrics.jsonl").is_file()
