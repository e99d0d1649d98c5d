"""verl's own multi-turn scripts train two steps on GSM8K: the migrated command with its YAML, its tool and interaction
files after the documented replacement; only the model, the sizes and the placement are swapped for those of a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import conformance
import pyarrow.parquet as pq
import pytest
from command_lab import NO_VALIDATION, metrics_of, rows_of
from tables import newest_first

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.data.sampler import PositionSampler
from verl_mt.extensions.compat.migrate import main
from verl_mt.extensions.supervised import sft
from verl_mt.trainer.build import build_trainer

REPO = Path(__file__).resolve().parents[2]
REVISIONS = ("v0.5.0", "v0.6.1")
EXAMPLES = "examples/sglang_multiturn"
MODEL = "actor_rollout_ref.model.path"
TINY = (
    f"{MODEL}=verl_mt://tiny", "actor_rollout_ref.model.dtype=float32",
    "actor_rollout_ref.rollout.name=local", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.n_workers_per_node=1", "trainer.placement=inline", "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=2",
    "actor_rollout_ref.rollout.response_length=192", "actor_rollout_ref.rollout.max_tokens_per_turn=48",
    "trainer.num_threads=1", "trainer.progress=off", *NO_VALIDATION,
)  # fmt: skip
"""What a machine with one core and no GPU needs instead; the algorithm and the rollout stay the script's."""
ENGINE_ONLY = "actor_rollout_ref.rollout.gpu_memory_utilization="
"""Goes with the engine: it means something for SGLang alone."""


def gsm8k(home: Path, shared_data: Path, style: str, folder: str, limit: int = 8) -> None:
    """The first problems of GSM8K, as our recipe writes verl's rows, where the script looks for them."""
    spec = importlib.util.spec_from_file_location("prepare_gsm8k", REPO / "recipes" / "gsm8k" / "prepare.py")
    assert spec is not None and spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    source, out = shared_data / "tasks" / "gsm8k_train.jsonl", home / "data" / folder / "train.parquet"
    assert prepare.main(["--source", str(source), "--style", style, "--out", str(out), "--limit", str(limit)]) == 0


def configured(revision: str, script: str, home: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Config:
    """The configuration that the migrated script has when a shell starts it in a checkout, `words` behind it.

    Args:
        home: becomes `$HOME` and holds the checkout: verl's folder of settings, after the replacement.
    """
    settings = conformance.peer("verl", revision, f"{EXAMPLES}/config")
    conformance.copy_replaced("verl", settings, home / EXAMPLES)
    capsys.readouterr()
    assert main([str(conformance.peer("verl", revision, f"{EXAMPLES}/{script}"))]) in (0, 3)
    (home / "python").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    (home / "python").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", capsys.readouterr().out], cwd=home, text=True, capture_output=True, check=True,
        env={"PATH": f"{home}:/usr/bin:/bin", "HOME": str(home)},
    )  # fmt: skip
    given = done.stdout.split("\n")[2:-1]
    flags = dict(word.split("=", 1) for word in given if word.startswith("--"))
    overrides = [word for word in given if not word.startswith(("--", ENGINE_ONLY))]
    run = f"trainer.default_local_dir={home / 'run'}"
    return compose([*overrides, *TINY, run, *words], flags["--config-name"], flags["--config-path"])


def two_steps(config: Config) -> list[dict[str, Any]]:
    """Train; every sample's row, after what holds for every run."""
    build_trainer(config).fit()
    run = Path(config.trainer.default_local_dir or "")
    lines = metrics_of(run)
    assert len(lines) == 2 and [line.get("rollout/failed", 0) for line in lines] == [0, 0]
    rows = [row for step in (1, 2) for row in rows_of(run, step)]
    assert len(rows) == 8 and all(row["stop_reason"] != "error" for row in rows)
    for record in (record for row in rows for record in row["records"]):
        assert sum(record["loss_mask"]) > 0 and record["loss_mask"] == record["sampled"]
    return rows


@pytest.fixture(scope="session")  # its two tests are not one after the other
def caller(tmp_path_factory, shared_data) -> Path:
    """The tiny model after it was shown how verl's tool is called, on the same few problems."""
    home = tmp_path_factory.mktemp("cold")
    tools = "config/tool_config/gsm8k_tool_config.yaml"
    copy = conformance.copy_replaced("verl", conformance.peer("verl", REVISIONS[0], f"{EXAMPLES}/{tools}"), home)
    gsm8k(home, shared_data, "tool", "gsm8k", limit=2)
    demos = []
    for row in pq.read_table(home / "data" / "gsm8k" / "train.parquet").to_pylist():
        words = json.dumps({"answer": row["reward_model"]["ground_truth"]})
        call = {"id": "c", "type": "function", "function": {"name": "calc_gsm8k_reward", "arguments": words}}
        demos.append({"messages": [*row["prompt"], {"role": "assistant", "content": "", "tool_calls": [call]}]})
    (home / "demos.jsonl").write_text("\n".join(map(json.dumps, demos)))
    overrides = (
        f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={copy}", "data.train_batch_size=2",
        "trainer.total_epochs=60", "actor_rollout_ref.actor.optim.lr=2e-3", "trainer.num_threads=1",
    )  # fmt: skip
    words = ["--data", str(home / "demos.jsonl"), "--out", str(home / "out"), "--no-rollouts", *overrides]
    assert sft.main(words) == 0
    return home / "out" / "hf"


def stretches(bits: list[int]) -> int:
    """How many runs of ones there are."""
    return sum(1 for before, bit in zip([0, *bits], bits, strict=False) if bit and not before)


@pytest.mark.slow
@pytest.mark.xdist_group("caller")  # which takes longer than the tests
@pytest.mark.parametrize("revision", newest_first(REVISIONS))
def test_gsm8k_with_its_tool_trains_two_steps_with_the_tiny_model(revision, tmp_path, shared_data, caller, capsys):
    gsm8k(tmp_path, shared_data, "tool", "gsm8k", limit=2)
    config = configured(revision, "run_qwen2.5-3b_gsm8k_multiturn.sh", tmp_path, capsys, f"{MODEL}={caller}")
    assert config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 5
    assert config.actor_rollout_ref.actor.kl_loss_coef == 0.001 and config.data.max_prompt_length == 1024
    rows = two_steps(config)
    called = [row for row in rows if row["num_turns"] > 1]
    assert len(called) >= 4, "the model calls the tool, and goes on with what it says"
    for row in rows:
        assert [tool["function"]["name"] for tool in row["tools"]] == ["calc_gsm8k_reward"]
    for row in called:
        roles = [message["role"] for message in row["messages"]]
        assert roles[2:5] == ["assistant", "tool", "assistant"] and "scores" in row["messages"][3]["content"]
        assert len(row["tool_rewards"]["calc_gsm8k_reward"]) == row["num_turns"]  # of each call, and of the whole
        assert [stretches(record["loss_mask"]) for record in row["records"]] == [row["num_turns"]]


@pytest.mark.slow
@pytest.mark.parametrize("revision", newest_first(REVISIONS))
def test_gsm8k_with_its_interaction_trains_two_steps_with_the_tiny_model(revision, tmp_path, shared_data, capsys):
    gsm8k(tmp_path, shared_data, "interaction", "gsm8k_verl_sgl_multi_turn_w_interaction")
    script = "run_qwen2.5-0.5b_gsm8k_multiturn_w_interaction.sh"
    config = configured(revision, script, tmp_path, capsys)
    assert config.actor_rollout_ref.rollout.multi_turn.max_user_turns == 5
    rows = two_steps(config)
    assert max(row["num_turns"] for row in rows) > 1, "it answers what the model says"
    for row in rows:
        said = [message["role"] for message in row["messages"]][2:]
        assert said == (["assistant", "user"] * row["num_turns"])[: len(said)] and len(said) >= 2 * row["num_turns"] - 1
        assert len(row["turn_scores"]) >= row["num_turns"] - 1


class EasyFirst(PositionSampler):
    """A curriculum in the form that one has here: short questions first, and told of every finished step."""

    told: list[int] = []

    def row_at(self, position: int):
        rows = [row for source in self.sources for row in source.rows]
        rows.sort(key=lambda row: len(row.prompt[1]["content"]))
        return rows[position % len(rows)]

    def update(self, groups):
        self.told.append(len(groups))


@pytest.mark.slow
@pytest.mark.parametrize("revision", newest_first(REVISIONS))
def test_the_curriculum_trains_two_steps_with_a_sampler_of_ours_in_its_place(revision, tmp_path, shared_data, capsys):
    gsm8k(tmp_path, shared_data, "tool", "gsm8k")
    EasyFirst.told.clear()
    words = [f"data.sampler={__name__}.EasyFirst"]
    config = configured(revision, "run_qwen0.5b_gsm8k_multiturn_curriculum.sh", tmp_path, capsys, *words)
    rows = two_steps(config)
    lengths = [len(row["messages"][1]["content"]) for row in rows]
    assert EasyFirst.told == [2, 2] and lengths == sorted(lengths) and len({row["row_index"] for row in rows}) == 4
