"""Answers to geometry problems: what counts as the same, as verl's grader (mathruler) has it."""

from __future__ import annotations

import pytest

from verl_mt.extensions.compat.rewards.geo3k import acc_reward, compute_score, value_of

SAME = [
    ("1/2", "0.5"), (r"\frac{1}{2}", "0.5"), (r"\dfrac12", "1/2"), ("12.0", "12"), ("7", "7.0"), ("1,000", "1000"),
    (r"3\sqrt{2}", r"\sqrt{18}"), (r"\sqrt2", r"\sqrt{2}"), (r"\frac{10}{\sqrt{2}}", r"5\sqrt{2}"),
    (r"10 \sqrt { 3 }", r"10 \sqrt{3}"), (r"1 + 4\sqrt{2}", r"4 \sqrt { 2 } + 1"), (r"25\pi", r"25 \pi"),
    (r"90^\circ", "90"), (r"90^{\circ}", "90"), ("90 degrees", "90"), ("5 cm", "5"),
    (r"5\text{ cm}", "5"), ("3 feet", "3"),
    (r"25\pi cm^2", r"25 \pi"), ("x=3", "3"), ("x = 3", "3"), ("50%", "50"), ("A", "a"), ("$12$", "12"),
]  # fmt: skip
OTHER = [
    ("12.001", "12"), (r"3\sqrt{2}", "4.2426"), ("8.7", "8.66"), ("-3", "3"), ("", "3"), ("twelve", "12"),
    ("(1,2)", "(1, 3)"), ("(1,2)", "12"),
    (r"6\pi", "18.85"), ("0.38", r"\frac { 5 } { 13 }"), ("5+", "5"), ("1/0", "0"), (r"\sqrt{-1}", "1"), ("m", "in"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_the_same_answer(answer, truth):
    assert acc_reward(answer, truth, use_boxed=False) == acc_reward(rf"so \boxed{{{answer}}}", truth) == 1.0


@pytest.mark.parametrize(("answer", "truth"), OTHER)
def test_another_answer(answer, truth):
    assert acc_reward(answer, truth, use_boxed=False) == 0.0


def test_the_score_weighs_format_and_accuracy():
    good = r"<think>it is right-angled</think> \boxed{90^\circ}"
    assert compute_score(good, "90") == pytest.approx(1.0) and compute_score(good, "80") == pytest.approx(0.1)
    assert compute_score(r"\boxed{90}", "90") == pytest.approx(0.9) and compute_score("90", "90") == 0.0


def test_only_short_expressions_of_numbers_have_a_value():
    assert value_of(r"2 \cdot (3 + 4) \div 7") == pytest.approx(2.0)
    assert [value_of(text) for text in ("__import__('os')", "x", "1;2", "9" * 300, "sqrt", "")] == [None] * 6
