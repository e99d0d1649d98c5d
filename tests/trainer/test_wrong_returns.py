"""Whole runs whose plug-ins now and then return something wrong: those trajectories fail, and the run goes on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from command_lab import NO_VALIDATION, fit, rows_of

pytestmark = pytest.mark.slow

PLUGINS = Path(__file__).with_name("wrong_plugins.py")
RO = "actor_rollout_ref.rollout"
SCHEDULER, GENERATE = f"{RO}.multi_turn.scheduler='{PLUGINS}:", f"{RO}.custom_generate_function_path='{PLUGINS}:"
RUNS = {
    "messages of an output": (f"{SCHEDULER}WrongMessages'", "messages[0] must be a dict"),
    "mask of a step": (f"{SCHEDULER}WrongMask'", "response_loss_mask[0] must be 0 or 1"),
    "check_finished": (f"{SCHEDULER}WrongCheck'", "must be True or False, got 'False'"),
    "infos": (f"{SCHEDULER}WrongInfos'", "nested more than 100 levels deep"),
    "status of a Sample": (f"{GENERATE}wrong_status'", "sample.status is 'done'"),
    "tokens of a Sample": (f"{GENERATE}wrong_tokens'", "sample.tokens must be"),
    "reward": (f"reward.path='{PLUGINS}:reward_func'", "returned 'good' as the score"),
    "should_terminate": ("should_terminate", "should_terminate must be True or False"),
    "text": ("text", "the text must be a str, got 5"),
}


@pytest.mark.parametrize("name", RUNS)
def test_one_trajectory_in_three_returns_something_wrong_and_the_run_goes_on(name, tmp_path):
    override, says = RUNS[name]
    if name in ("should_terminate", "text"):
        file = tmp_path / "interaction.yaml"
        file.write_text(f"interaction:\n  - class_name: {PLUGINS}:Wrong\n    config: {{field: {name}}}\n")
        override = f"{RO}.interaction_config_file={file}"
    more = ("data.train_batch_size=2", "trainer.total_training_steps=2", "trainer.progress=off")
    more += (f"{RO}.tool_kwargs.tools_config_file=null",)
    lines = fit(tmp_path / "run", *more, *NO_VALIDATION, override)
    assert len(lines) == 2
    failed = 0
    for step, line in enumerate(lines, start=1):
        rows = rows_of(tmp_path / "run", step)
        lost = [row for row in rows if row["status"] == "failed"]
        assert 0 < len(lost) < len(rows) and line["rollout/failed"] == len(lost)
        assert all(says in row["error"] for row in lost), lost[0]["error"]
        assert all(math.isfinite(value) for key, value in line.items() if isinstance(value, float)), line
        failed += len(lost)
    assert failed >= 8
