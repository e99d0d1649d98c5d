"""Final answers of mathematical solutions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_mt.errors import PluginError
from verl_mt.rewards.base import load_reward
from verl_mt.rewards.math_answer import FinalAnswer, MathAccuracy, final_answer, is_right, same_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{12}", "12"),
        (r"\boxed{\frac{1}{2}} and", r"\frac{1}{2}"),
        ("<answer> 3 </answer> <answer>4</answer>", "4"),
        (r"<answer>\boxed{5}</answer>", "5"),
        ("a\n#### 1,000", "1,000"),
        ("it is 3, no, 4.", "4"),
        ("nothing", None),
        (r"\boxed{unclosed", None),
    ],
)
def test_final_answers(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "0.50", True),
        ("1,000", "1000", True),
        ("$12$", "12.", True),
        ("12", "-12", False),
        ("x+1", "x + 1", True),
        ("x", "y", False),
        ("1/0", "0", False),
        ("", "", False),
    ],
)
def test_answers_that_are_the_same(one, other, same):
    assert same_answer(one, other) is same


def test_a_worked_solution_is_a_truth_too():
    assert is_right("I get 12.", r"Let x ... 36 ... thus \boxed{12}.")
    assert not is_right("I get 36.", r"Let x ... 36 ... thus \boxed{12}.")


@pytest.mark.cap("C39")
def test_the_answer_reward_reads_a_column():
    assert FinalAnswer()(["it is 4", "it is 5"], solution=["4", 4]) == [1.0, 0.0]


def test_accuracy_without_math_verify_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"pip install 'verl_mt\[math\]'.*math_answer"):
        load_reward("accuracy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "solution", "score"),
    [
        (r"<answer>$\frac12$</answer>", "$0.5$", 1.0),
        (r"\boxed{\frac12}", "$0.5$", 0.0),  # without the tags ms-swift asks for well-formed LaTeX
        (r"\boxed{\sqrt{12}}", r"$2\sqrt{3}$", 1.0),
        (r"\boxed{x=3}", "$3$", 1.0),
        (r"\boxed{5\text{ cm}}", "$5$", 1.0),
        (r"\boxed{\{1,2\}}", r"$\{2,1\}$", 1.0),
        (r"<answer>\frac{1}{2}</answer>", "<answer>1/2</answer>", 1.0),
        ("it is 4", "$4$", 0.0),
        (r"\boxed{5}", "$4$", 0.0),
    ],
)
def test_accuracy_is_what_math_verify_says_also_in_a_thread(said, solution, score):
    pytest.importorskip("math_verify")
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(MathAccuracy(), [said], [solution]).result() == [score]
