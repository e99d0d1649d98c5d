"""What a person reads while a run goes on, and at its end."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pytest
import warm_start
from rich.console import Console

from verl_mt.trainer.display import Display

STEP = {
    "reward/mean": 0.297, "turns/mean": 12.5, "tools/failure_frequency": 0.25, "response/tokens_mean": 1311.0,
    "rollout/entropy": 0.345, "actor/clipfrac": 0.003, "group/zero_variance": 0.62, "rollout/logprob_diff_max": 1e-6,
    "rollout/tokens_per_s": 12345.0, "time/step_s": 12.34, "rollout/failed": 2.0, "actor/grad_norm": 0.5,
}  # fmt: skip
VALIDATION = {
    "val/accuracy": 0.5, "val/accuracy_greedy": 0.6, "val/tool_calls_mean": 1.2, "val/truncated": 0.01,
    "val/failed": 2.0, "val/mismatch_rate": 0.1, "val/loss": 0.3,
}  # fmt: skip
PRINTS_ITS_WIDTH = "from verl_mt.trainer.display import terminal; print(terminal().width)"


def display(width: int = 180) -> tuple[Display, io.StringIO]:
    shown = io.StringIO()
    return Display(total_steps=900, live=False, enabled=True, console=Console(file=shown, width=width)), shown


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


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_step_and_a_validation_are_one_line_each_in_any_terminal(width):
    screen, shown = display(width)
    screen.step(899, STEP)
    screen.validation(899, VALIDATION)
    step, validation = shown.getvalue().splitlines()
    assert max(map(len, (step, validation))) <= width
    assert "reward  0.297" in step and "accuracy 0.500" in validation


def test_a_narrow_terminal_leaves_out_what_matters_least():
    shown = {}
    for width in (80, 120, 200):
        screen, text = display(width)
        screen.step(899, STEP)
        shown[width] = text.getvalue()
    for word in ("reward", "flat", "turns", "failed calls 0.25", "failed 2"):
        assert word in shown[80], word
    assert "Δlogp" not in shown[80] and "Δlogp" in shown[200]
    lengths = [len(shown[width].split()) for width in (80, 120, 200)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[1] < lengths[2]


def test_the_numbers_of_a_run_stand_below_each_other():
    screen, shown = display(80)
    screen.step(9, STEP | {"tools/failure_frequency": 0.0, "rollout/failed": 0.0, "actor/clipfrac": 0.0})
    screen.step(899, STEP | {"response/tokens_mean": 7.0, "turns/mean": 1.0, "rollout/failed": 0.0, "reward/mean": -1})
    first, second = shown.getvalue().splitlines()
    assert all(first.index(word) == second.index(word) for word in ("reward", "turns", "flat"))


def test_what_a_run_began_and_ended_with_is_no_single_step():
    screen, _ = display(80)
    noise = [0.0 if k % 2 else 0.2 for k in range(30)]
    assert screen.curve([*noise, *(0.4 + v for v in noise)]).startswith("0.100 ")
    assert "[bold]0.500[/]" in screen.curve([*noise, *(0.4 + v for v in noise)])
    assert "means of 10 steps each" in screen.curve([*noise, *noise])
    assert "of one step each" in screen.curve([0.1, 0.2])


def width_of(columns: int | None, **environment: str) -> int:
    """Of output into a pipe, in a terminal of so many columns, or in none."""
    words: list[Any] = [sys.executable, "-c", PRINTS_ITS_WIDTH]
    variables = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | environment
    asked, terminal = pty.openpty()
    try:
        if columns is not None:
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        stream = subprocess.DEVNULL if columns is None else terminal
        done = warm_start.run(words, stdin=stream, stderr=stream, stdout=subprocess.PIPE, env=variables, check=True)
        return int(done.stdout)
    finally:
        os.close(asked)
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("columns, width", [(None, 120), (60, 80), (97, 97), (300, 120)])
def test_piped_output_is_as_wide_as_the_terminal_within_limits(columns, width):
    assert width_of(columns) == width


@pytest.mark.slow
def test_columns_of_the_environment_decide():
    assert width_of(97, COLUMNS="200") == 200


def test_a_log_line_of_any_length_costs_little_and_reaches_the_terminal_escaped():
    screen, shown = display()
    logger = logging.getLogger("verl_mt.test_run_display")
    begun = time.process_time()
    with screen:
        logger.warning("a server says %s", "\x1b]0;pwn\x07" + "0123456789abcdef" * 100_000)
        try:
            raise RuntimeError("\x1b[2J" + "y" * 5_000_000)
        except RuntimeError:
            logger.exception("it failed")
    assert time.process_time() - begun < 2.0, "rich's highlighter takes minutes"
    text = "".join(shown.getvalue().split())  # without the line breaks
    assert "\x1b" not in text and "\x07" not in text and len(text) < 50_000
    assert r"aserversays\x1b]0;pwn\x07012" in text and r"RuntimeError:\x1b[2Jyy" in text
