"""What a person reads while a run goes on."""

from __future__ import annotations

import io

from rich.console import Console

from verl_mt.trainer.run_log import Display


def display() -> tuple[Display, io.StringIO]:
    shown = io.StringIO()
    return Display(total_steps=9, live=False, enabled=True, console=Console(file=shown, width=180)), shown


def test_a_validation_shows_an_accuracy_of_zero():
    screen, shown = display()
    screen.validation(3, {"val/accuracy": 0.0, "val/accuracy_greedy": 0.0, "val/truncated": 0.0, "val/failed": 0})
    assert shown.getvalue().split() == ["validation", "after", "step", "3:", "accuracy", "0.000", "greedy", "0.000"]


def test_a_step_shows_the_share_of_tool_calls_that_failed():
    screen, shown = display()
    screen.step(1, {"reward/mean": 0.0, "tools/failure_frequency": 1.0})
    screen.step(2, {"reward/mean": 0.0, "tools/failure_frequency": 0.0})
    assert "failed calls 1.00" in shown.getvalue().splitlines()[0]
    assert "failed calls" not in shown.getvalue().splitlines()[1]
