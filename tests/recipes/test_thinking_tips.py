"""recipes/thinking_tips: the reference scripts of the colocated and the server mode, without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warm_python import warm_python

from verl_mt.config.checks import check
from verl_mt.config.compose import compose, hydra_main
from verl_mt.data.row_files import read_rows
from verl_mt.extensions.compat.schedulers.shipped import MathTipsMultiTurnScheduler, ThinkingModelTipsScheduler
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.drivers import DriverParts, build_driver
from verl_mt.tiny.problems import SYSTEM, generate

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "thinking_tips"


def commands(tmp_path: Path, mode: str) -> list[str]:
    """What the script would run: `python` is replaced by a recorder."""
    log, python = tmp_path / "commands", tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {shlex.quote(str(log))}\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "MODE": mode}
    words = ["bash", str(RECIPE / "run_qwen3-1.7b.sh"), "trainer.total_epochs=2"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.cap("C41", "C15")
@pytest.mark.parametrize(("mode", "servers"), [("colocate", 0), ("server", 1)])
def test_the_reference_scripts_load_and_validate_on_a_cpu(mode, servers, tmp_path):
    *prepared, trained = commands(tmp_path, mode)
    assert [line.split("--split ")[1].split()[0] for line in prepared] == ["train", "test"]
    module, _, arguments = trained.removeprefix("-m ").partition(" ")
    assert module == "verl_mt.trainer"
    configs: list = []
    hydra_main(configs.append, argv=shlex.split(arguments))
    config = configs[0]
    check(config)
    assert (config.actor_rollout_ref.rollout.launch_servers, config.trainer.total_epochs) == (servers, 2)
    driver = build_driver(config, DriverParts())
    assert type(driver.scheduler) is ThinkingModelTipsScheduler and driver.scheduler.max_turns == 3
    assert load_reward(config.reward.path) is not None


@pytest.mark.slow
@pytest.mark.cap("C41", "C10", "C11")
@pytest.mark.parametrize("name", ["math_tip_trick", "math_tip_trick_multi_turn", "tool_call_scheduler"])
def test_every_shipped_scheduler_can_be_chosen_in_either_mode(name):
    for words in ([], ["actor_rollout_ref.rollout.launch_servers=1"]):
        config = compose(
            ["experiment=thinking_tips_colocate", f"actor_rollout_ref.rollout.multi_turn.scheduler={name}", *words]
        )
        check(config)
        assert build_driver(config, DriverParts()).scheduler is not None


ON_A_LAPTOP = shlex.split(
    "actor_rollout_ref.model.path=verl_mt://tiny actor_rollout_ref.model.dtype=float32 "
    "actor_rollout_ref.model.enable_gradient_checkpointing=False actor_rollout_ref.actor.optim.lr=1e-3 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.name=local "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5 "
    "actor_rollout_ref.rollout.response_length=400 actor_rollout_ref.rollout.max_tokens_per_turn=48 "
    "actor_rollout_ref.rollout.tool_kwargs.tools_config_file=tools_configs/calculator.yaml "
    "data.train_batch_size=4 data.val_max_samples=2 trainer.total_training_steps=1 trainer.num_threads=1 "
    "trainer.device=cpu trainer.save_freq=-1"
)
"""What the recipe's script is given here."""


def write_rows(folder: Path) -> None:
    """The model writes a call that nobody runs, so the answer is the last number in it, sometimes the right one."""
    folder.mkdir(parents=True)
    for split, number in (("train", 16), ("test", 4)):
        rows = []
        for problem in itertools.islice(generate(0, "train" if split == "train" else "val"), number):
            last = re.findall(r"\d+", problem.expression)[-1]
            prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]
            truth = {"style": "rule", "ground_truth": last}
            rows.append({"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": truth})
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


@pytest.mark.slow
@pytest.mark.cap("C18", "C21", "C41")
def test_a_real_step_with_a_model_of_a_million_parameters(tmp_path):
    write_rows(tmp_path / "data")
    environment = warm_python(tmp_path) | {"DATA_DIR": str(tmp_path / "data")}
    words = ["bash", str(RECIPE / "run_qwen3-1.7b.sh"), *ON_A_LAPTOP]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "qwen3-1.7b-colocate"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["step"]]
    assert line["step"] == 1
    assert line["rollout/trajectories"] == 32 and line["rollout/failed"] == line["rollout/aborted"] == 0
    assert line["rollout/logprob_diff_max"] < 1e-3
    assert 0 < line["reward/mean"] < 1 and line["actor/grad_norm"] > 0
    rows = list(read_rows(run / "rollouts" / "step_000001.parquet"))
    assert {len(row["records"]) for row in rows} == {1, 2}
    for row in rows:
        assert len(row["records"]) == row["num_turns"]
        told = sum(m["content"] == MathTipsMultiTurnScheduler.tips_prompt for m in row["messages"])
        assert told == row["num_turns"] - 1
        for record in row["records"]:  # each turn is trained as it was sampled, behind the prompt it was sampled from
            assert record["loss_mask"] == record["sampled"] and sum(record["sampled"]) > 0
            assert [span["kind"] for span in record["turns"]] == ["prompt", "assistant"]
