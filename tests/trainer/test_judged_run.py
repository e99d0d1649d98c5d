"""A run whose reward is a judge, which is down for some of the answers."""

from __future__ import annotations

import pytest
from command_lab import NO_VALIDATION, fit, rows_of
from judge_server import JudgeServer

pytest.importorskip("openai")


@pytest.mark.slow
def test_answers_are_trained_by_the_judges_scores_and_those_it_was_down_for_are_not(tmp_path):
    def grade(body):
        answer = body["messages"][0]["content"].split("----")[2]
        return 503 if answer.strip().endswith(("1", "3")) else f"Score: {len(answer) % 11}"

    server = JudgeServer(grade)
    try:
        kwargs = f'{{base_url: "{server.url}", model: m, rubric: any}}'
        (line,) = fit(
            tmp_path / "run", *NO_VALIDATION, "reward.path=llm_judge", f"reward.kwargs={kwargs}",
            "reward.timeout_s=0.6", "trainer.total_training_steps=1", "data.train_batch_size=8",
        )  # fmt: skip
    finally:
        server.close()
    rows = rows_of(tmp_path / "run", 1)
    lost = [row for row in rows if row["stop_reason"] == "reward_unavailable"]
    assert 0 < len(lost) < len(rows) == 32
    assert line["rollout/aborted"] == line["stop/reward_unavailable"] == line["rollout/reward_errors"] == len(lost)
    assert all(row["reward"] is None and row["records"][0]["advantages"] is None for row in lost)
    scored = [row for row in rows if row["reward"] is not None]
    assert all(row["reward"] == pytest.approx(row["reward_parts"]["judge"] / 10) for row in scored)
    assert line["reward/judge"] == pytest.approx(10 * line["reward/mean"])
    assert any(any(row["records"][0]["advantages"] or ()) for row in scored)
