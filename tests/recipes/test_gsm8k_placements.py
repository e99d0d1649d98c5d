"""The GSM8K recipe on one GPU, on eight, on two machines: composed, and run with the tiny model on SGLang and Ray."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_start
from ray_machines import machines
from warm_python import warm_python

from verl_mt.config.compose import compose, hydra_main
from verl_mt.config.schema import Config, leaves
from verl_mt.data.row_files import read_rows, rows_of_step
from verl_mt.tiny.problems import rows

pytestmark = pytest.mark.slow  # commands, servers, many configurations

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gsm8k"
STYLES, PLACEMENTS = ("tool", "interaction"), ("1gpu", "8gpus", "2nodes")
WHERE = {
    "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.ref.offload", "trainer.device",
    "trainer.placement", "trainer.nnodes", "trainer.n_workers_per_node", "trainer.experiment_name",
}  # fmt: skip
"""What a placement may change: none of it changes what is computed."""


def recorded(script: str, folder: Path, **environment: str) -> list[str]:
    """Run a script with a `python` that writes down how it was called, and with which GPU; it ends when it was called
    `NUM_CALLS` times."""
    log, python = folder / "commands", folder / "bin" / "python"
    python.parent.mkdir()
    note = f'printf "%s|%s\\n" "$CUDA_VISIBLE_DEVICES" "$*" >> {shlex.quote(str(log))}'
    wait = f"until [ $(wc -l < {shlex.quote(str(log))}) -ge ${{NUM_CALLS:-1}} ]; do sleep 0.02; done"
    python.write_text(f"#!/bin/sh\n{note}\n{wait}\n")
    python.chmod(0o755)
    path = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    words = ["bash", str(RECIPE / script)]
    done = subprocess.run(words, cwd=folder, env={**os.environ, **environment, **path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@functools.cache
def base(style: str) -> dict[str, Any]:
    return leaves_of(compose([f"experiment=gsm8k_{style}_grpo"]))


def leaves_of(config: Config) -> dict[str, Any]:
    tree = dataclasses.asdict(config)

    def value(key: str) -> Any:
        found: Any = tree
        for part in key.split("."):
            found = found[part]
        return found

    return {key: value(key) for key in leaves()}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("style", STYLES)
def test_a_placement_changes_where_a_run_runs_and_not_what_it_computes(style, placement, tmp_path):
    script = f"run_qwen2.5-3b_{style}.sh"
    *_, trained = recorded(script, tmp_path, PLACEMENT=placement, DATA_DIR="data/gsm8k")
    configs: list[Config] = []
    hydra_main(configs.append, argv=shlex.split(trained.partition("-m verl_mt.trainer ")[2]))
    config, rollout = configs[0], configs[0].actor_rollout_ref.rollout
    changed = {key for key, value in leaves_of(config).items() if value != base(style)[key]}
    assert changed <= WHERE and rollout.name == "sglang" and config.trainer.device == "cuda"
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-3B-Instruct"
    ranks = config.trainer.nnodes * config.trainer.n_workers_per_node
    gpus = {"1gpu": 1, "8gpus": 8, "2nodes": 16}[placement]
    assert ranks == gpus and not rollout.servers and not rollout.launch_servers
    assert (config.trainer.placement == "ray") is (gpus > 1)


# Two steps with the tiny model on a CPU: real SGLang, two Ray workers

TINY = (
    "actor_rollout_ref.model.path=verl_mt://tiny", "actor_rollout_ref.model.dtype=float32",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.skip_zero_advantage=False",
    "actor_rollout_ref.rollout.response_length=128", "actor_rollout_ref.rollout.engine_timeout_s=240",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "actor_rollout_ref.rollout.tool_kwargs.tools_config_file=tools_configs/calculator.yaml",
    "data.train_batch_size=4", "data.max_prompt_length=256", "data.val_max_samples=4", "trainer.device=cpu",
    "trainer.total_training_steps=2", "trainer.num_threads=1", "trainer.test_freq=-1", "trainer.logger=[console]",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Problems that the tiny model knows, through the recipe's own `prepare.py`."""
    folder = tmp_path_factory.mktemp("data")
    for split, theirs in (("train", "train"), ("test", "val")):
        problems = [row["extra_info"] for row in rows(num_rows=16, seed=0, split=theirs)]
        source = folder / f"{split}.jsonl"
        source.write_text("".join(json.dumps({k: p[k] for k in ("question", "answer")}) + "\n" for p in problems))
        words = ["--source", source, "--split", split, "--out", folder / f"{split}.parquet", "--style", "interaction"]
        command = [sys.executable, RECIPE / "prepare.py", *words, "--system", "Answer as #### N."]
        warm_start.run(list(map(str, command)), check=True, capture_output=True)
    return folder


def two_steps(placement: str, data: Path, run: Path, *overrides: str, replicas: int = 1, **more: str) -> None:
    """Run the script with the tiny model; look at what it wrote."""
    words = ["bash", str(RECIPE / "run_qwen2.5-3b_interaction.sh"), *TINY, *overrides]
    words.append(f"trainer.default_local_dir={run}")
    variables = {
        **warm_python(run.parent),
        "RAY_ADDRESS": "local",
        "PLACEMENT": placement,
        "DATA_DIR": str(data),
        **more,
    }
    done = subprocess.run(words, cwd=run.parent, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["rollout/trajectories"] == 16 and line["rollout/aborted"] == 0
        assert line["actor/num_updates"] == 1 and line["actor/grad_norm"] > 0
        assert line["rollout/logprob_diff_max"] < 1e-4 and line.get("engine/restarts", 0) == 0
        assert line["turns/mean"] > 1 and line["rollout/replicas"] == replicas
    first, second = (worst_difference_to_the_start(run, step) for step in (1, 2))
    assert first < 1e-4 and second > 1e-2, "the second step was not sampled with other weights"
    assert (run / "FINISHED").exists() and (run / "hf" / "model.safetensors").is_file()


@torch.no_grad()
def worst_difference_to_the_start(run: Path, step: int) -> float:
    """Between the log-probs of a step's sampler and those of the weights that the run began with."""
    from verl_mt.modeling.load import load_causal_lm

    module, worst = load_causal_lm("verl_mt://tiny", dtype="float32", device="cpu"), 0.0
    file = rows_of_step(run, step)
    assert file is not None
    for row in islice(read_rows(file.path), 8):
        (record,) = row["records"]
        ids, sampled = torch.tensor(record["token_ids"]), torch.tensor(record["sampled"], dtype=torch.bool)
        table = torch.log_softmax(module(ids[None]).logits[0, :-1].float(), -1)
        own = table.gather(1, ids[1:, None])[:, 0]
        difference = (own - torch.tensor(record["rollout_log_probs"])[1:]).abs()
        worst = max(worst, float(difference[sampled[1:]].max()))
    return worst


@pytest.mark.sglang
def test_two_steps_as_on_one_gpu(data, tmp_path):
    two_steps("1gpu", data, tmp_path / "run")


@pytest.mark.release
@pytest.mark.sglang
@pytest.mark.ray
def test_two_steps_as_on_eight_gpus_with_two_ranks_and_a_replica_beside_each(data, tmp_path):
    with machines(1, cpus=2) as address:
        run = tmp_path / "run"
        two_steps("8gpus", data, run, "trainer.n_workers_per_node=2", replicas=2, RAY_ADDRESS=address)
    assert len(list((tmp_path / "run" / "checkpoints" / "step_000002" / "actor").glob("__*_0.distcp"))) == 2


@pytest.mark.release
@pytest.mark.sglang
@pytest.mark.ray
def test_two_steps_as_on_two_machines_with_a_rank_and_a_replica_each(data, tmp_path):
    with machines(2) as address:
        run = tmp_path / "run"
        two_steps("2nodes", data, run, "trainer.n_workers_per_node=1", replicas=2, RAY_ADDRESS=address)
