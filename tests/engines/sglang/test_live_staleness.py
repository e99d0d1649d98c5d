"""`trainer.max_staleness` with a real engine: new weights come while conversations run, and the task is learned."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from command_lab import metrics_of, rows_of
from late_calculator import configure
from live import EACH_VLLM_IN_RELEASE, ROLLOUT, words_of
from ray_machines import machines

from verl_mt.config.compose import compose
from verl_mt.data.drawn_prompts import read_prompt_log
from verl_mt.extensions.inspection import prompt_log
from verl_mt.trainer.build import build_trainer

pytestmark = [  # mark.sglang, mark.vllm
    pytest.mark.parametrize("name", EACH_VLLM_IN_RELEASE),
    pytest.mark.timeout(600),
]

FEW = ("data.train_batch_size=4", "data.train_max_samples=64", ROLLOUT + "n=4")

BOUND = 2


@pytest.fixture
def late_calculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The override that makes some conversation meet new weights."""
    return ROLLOUT + f"tool_kwargs.tools_config_file={configure(tmp_path, monkeypatch)}"


def train(run: Path, name: str, steps: int, *overrides: str) -> list[dict]:
    words = words_of(name)
    if not any(word.startswith("trainer.max_staleness") for word in overrides):
        words.append(f"trainer.max_staleness={BOUND}")
    words += [f"trainer.total_training_steps={steps}", "data.val_files=null", "trainer.logger=[console]"]
    words += [f"trainer.default_local_dir={run}", "trainer.export_at_end=False", "trainer.num_threads=1"]
    build_trainer(compose([*words, *overrides])).fit()
    return metrics_of(run)


def require_what_was_promised(run: Path, lines: list[dict]) -> None:
    """No token is older than the bound, conversations met new weights, and each prompt was trained once, in order."""
    steps = len(lines)
    versions = [
        [
            [v for s, v in zip(record["sampled"], record["policy_versions"]) if s]
            for row in rows_of(run, step)
            for record in row["records"]
        ]
        for step in range(1, steps + 1)
    ]
    ages = [[step - v for of_record in found for v in of_record] for step, found in enumerate(versions)]
    assert min(map(min, ages)) >= 0 and max(map(max, ages)) == BOUND
    several = sum(len(set(of_record)) > 1 for found in versions for of_record in found)
    assert several, "no conversation went on with new weights"
    assert all(of_record == sorted(of_record) for found in versions for of_record in found)
    # What each version sampled is what the trainer had then: the difference at age 0 is the engines' rounding.
    at_0 = [line["staleness/age_0/logprob_diff"] for line in lines if "staleness/age_0/logprob_diff" in line]
    assert at_0 and max(at_0) <= 1e-3, at_0
    batch = len(read_prompt_log(run).prompts) // steps
    assert [p.trained_in for p in read_prompt_log(run).prompts.values()] == [
        [1 + k // batch] for k in range(batch * steps)
    ]
    assert prompt_log.main([str(run)]) == 0


def test_no_token_is_older_than_the_bound_and_each_prompt_is_trained_once(tmp_path, late_calculator, name):
    require_what_was_promised(tmp_path / "run", train(tmp_path / "run", name, 6, late_calculator, *FEW))


@pytest.mark.release
def test_the_default_task_is_learned_while_the_engine_samples(tmp_path, late_calculator, name):
    lines = train(tmp_path / "run", name, 24, late_calculator)
    require_what_was_promised(tmp_path / "run", lines)
    rewards = [line["reward/mean"] for line in lines]
    assert fmean(rewards[-8:]) > fmean(rewards[:8]) + 0.05, rewards


@pytest.mark.parametrize(
    ("bound", "on_update"),
    [
        (BOUND, "finish_turn"),
        pytest.param(BOUND, "restart", marks=pytest.mark.release),
        pytest.param(0, "continue", marks=pytest.mark.release),
    ],
)
def test_a_step_trains_what_finishes_first_whatever_becomes_of_running_turns(tmp_path, name, bound, on_update):
    run, steps = tmp_path / "run", 4
    words = (f"trainer.max_staleness={bound}", "data.over_sample=1.5", ROLLOUT + f"on_update={on_update}")
    train(run, name, steps, *words, *FEW, "trainer.save_freq=-1")
    rows = [(step, row) for step in range(1, steps + 1) for row in rows_of(run, step)]
    versions = [
        {record["policy_versions"][k] for k in range(turn["start"], turn["end"])}
        for _, row in rows
        for record in row["records"]
        for turn in record["turns"]
        if turn["kind"] == "assistant"
    ]
    assert all(len(of_turn) == 1 for of_turn in versions), "no turn is by two versions"
    of_rows = [
        (row["trained_version"], {v for r in row["records"] for v in r["policy_versions"] if v >= 0}) for _, row in rows
    ]
    assert all(0 <= trained - v <= bound for trained, found in of_rows for v in found)
    if on_update == "restart" or not bound:
        assert all(len(found) == 1 for _, found in of_rows), "no conversation is by two versions"
    prompts = read_prompt_log(run).prompts.values()
    assert any(p.starts > 1 for p in prompts) == (bound == 0)
    assert prompt_log.main([str(run)]) == 0


@pytest.mark.release  # bounds with replicas on one machine above, two machines in test_live_kills.py
@pytest.mark.ray
def test_and_on_two_machines_with_a_rank_and_a_replica_each(tmp_path, monkeypatch, late_calculator, name):
    with machines(2) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        words = ("trainer.placement=ray", "trainer.nnodes=2", "trainer.n_workers_per_node=1", "trainer.device=cpu")
        lines = train(tmp_path / "run", name, 6, late_calculator, *words, *FEW)
    require_what_was_promised(tmp_path / "run", lines)
    assert {line["rollout/replicas"] for line in lines} == {2}
