"""A few rollouts to read: over the whole range of rewards, and never too much text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.rollout_table import COLUMNS, MAX_CHARACTERS, clip, conversation_text, rollout_table


def trajectory(number: int, reward: float | None, **more) -> Trajectory:
    return Trajectory(f"t{number}", "p", "g", f"t{number}", reward=reward, stop_reason=StopReason.FINISHED, **more)


def table(rewards, rows):
    groups = [TrajectoryGroup("g", "p", [trajectory(k, r) for k, r in enumerate(rewards)])]
    return rollout_table(7, groups, rows)


def test_the_worst_the_best_and_those_between_are_chosen():
    shown = table([0.4, 1.0, 0.0, 0.2, 0.6, 0.8, 0.5], 3)
    assert [row[COLUMNS.index("reward")] for row in shown.rows] == [0.0, 0.5, 1.0]
    assert shown.columns == COLUMNS and all(len(row) == len(COLUMNS) for row in shown.rows)
    assert {row[0] for row in shown.rows} == {7}


@given(st.lists(st.none() | st.floats(allow_nan=True), max_size=12), st.integers(0, 15))
def test_there_are_never_more_rows_than_asked_for_nor_one_twice(rewards, rows):
    names = [row[1] for row in table(rewards, rows).rows]
    assert len(names) == len(set(names)) == min(rows, len(rewards))


def test_one_without_a_reward_counts_as_the_worst():
    assert [row[3] for row in table([0.5, None, -1.0], 3).rows] == [None, -1.0, 0.5]
    assert math.isnan(table([1.0, math.nan], 1).rows[0][3])


@given(st.text(max_size=300), st.integers(2, 60))
def test_a_text_that_is_cut_keeps_its_ends_and_says_how_much_is_missing(text, limit):
    cut = clip(text, limit)
    if len(text) <= limit:
        assert cut == text
    else:
        half = limit // 2
        assert cut.startswith(text[:half]) and cut.endswith(text[-half:])
        assert f"{len(text) - 2 * half} characters" in cut and len(cut) <= limit + 50


def test_a_tool_result_of_ten_megabytes_makes_a_small_table():
    long = trajectory(0, 1.0, messages=[{"role": "tool", "content": "x" * 10_000_000}], error="e" * 1_000_000)
    (row,) = rollout_table(1, [TrajectoryGroup("g", "p", [long])], 8).rows
    assert len(row[-1]) < 1.5 * MAX_CHARACTERS and "[error]" in row[-1]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "2+2?"}, "[user]\n2+2?"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calc", "arguments": {"x": 1}}}]},
            '[assistant]\n{"name": "calc", "arguments": {"x": 1}}',
        ),
        (
            {"role": "assistant", "content": "4", "reasoning_content": "easy"},
            "[assistant]\n<think>easy</think>\n4",
        ),
        ({"role": "assistant", "content": "4", "thinking": "easy"}, "[assistant]\n<think>easy</think>\n4"),
        ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "who?"}]}, "[user]\n<image>\nwho?"),
        ({"role": "assistant", "content": None}, "[assistant]\n"),
    ],
)
def test_a_message_is_shown_with_all_that_it_holds(message, text):
    assert conversation_text([message]) == text
