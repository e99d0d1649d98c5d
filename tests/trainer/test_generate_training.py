"""Whole runs whose conversations are driven by generate functions, on the model that ships."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from command_lab import NO_VALIDATION, VARIED, fit, metrics_of, rows_of, small_trainer

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_multi_agent.py"
QUICK = ("trainer.total_training_steps=2", "trainer.progress=off", "actor_rollout_ref.rollout.response_length=96")


@pytest.mark.cap("C72", "C74", "C77")
def test_several_agents_train_with_one_sample_per_prompt(tmp_path):
    lines = fit(
        tmp_path / "run",
        *QUICK,
        *NO_VALIDATION,
        f"custom_generate_function_path='{EXAMPLE}:generate'",
        "actor_rollout_ref.rollout.custom_generate_kwargs={num_parallel:3}",
        "actor_rollout_ref.rollout.n=1",
        "data.apply_chat_template=False",
        "actor_rollout_ref.rollout.max_model_len=1024",
    )
    assert len(lines) == 2 and all(math.isfinite(line["actor/pg_loss"]) for line in lines if "actor/pg_loss" in line)
    rows = rows_of(tmp_path / "run", 1)
    groups = {row["group_id"]: [r for r in rows if r["group_id"] == row["group_id"]] for row in rows}
    assert {name.split("/")[1] for name in groups} <= {"solver", "rewriter", "selector"}
    assert sum(name.endswith("/solver") for name in groups) == 4, "a group of solvers for each of four prompts"
    trained = [r for r in rows if any(a for record in r["records"] for a in record["advantages"] or [])]
    for row in trained:
        rewards = [r["reward"] for r in groups[row["group_id"]]]
        mean = sum(rewards) / len(rewards)
        advantage = next(a for record in row["records"] for a in record["advantages"] if a)
        assert (advantage > 0) == (row["reward"] > mean), "advantages are within a role of a prompt"
    assert trained, "something was learned from"


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.workers.policy_module.parameters()])


@pytest.mark.cap("C42", "C43", "C61")
def test_a_generate_function_gives_the_tool_loops_run_bit_for_bit(tmp_path):
    """The same model, tools and seeds: who drives the conversations changes no token and no weight."""
    common = (*QUICK, *NO_VALIDATION, VARIED, "trainer.deterministic=True")
    common += ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=2")
    loop = small_trainer(tmp_path / "loop", *common, "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3")
    loop.fit()
    function = small_trainer(
        tmp_path / "function",
        *common,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        "custom_generate_function_path=generate_agents.calculator_agent",
    )
    function.fit()
    for step in (1, 2):
        ours, theirs = rows_of(tmp_path / "loop", step), rows_of(tmp_path / "function", step)
        assert [r["records"] for r in ours] == [r["records"] for r in theirs]
        assert [r["reward"] for r in ours] == [r["reward"] for r in theirs]
    assert torch.equal(weights_of(loop), weights_of(function))
    assert any(line.get("actor/grad_norm") for line in metrics_of(tmp_path / "function"))
