"""Tests of `my_project`: python -m pytest"""

import pytest
from environment import Stall

import verl_mt


@pytest.fixture
def stall():
    made = Stall()
    made.reset(seed=1)
    return made


def test_a_right_answer_ends_the_episode(stall):
    assert stall.reply(f"#### {stall.total}") == "Thank you."
    assert stall.done and stall.score() == 1.0


def test_the_second_answer_earns_less_and_there_is_no_third(stall):
    assert "wrong" in stall.reply("#### 0") and not stall.done and stall.score() == 0.0
    stall.reply(f"#### {stall.total}")
    assert stall.done and stall.score() == 0.5


def test_two_wrong_answers_earn_nothing(stall):
    assert [stall.reply("I do not know."), stall.done, stall.reply("#### 0"), stall.done][1::2] == [False, True]
    assert stall.score() == 0.0


def test_the_tool_computes_and_says_what_it_wants(stall):
    assert stall.calculator("12 + 5") == "17"
    with pytest.raises(verl_mt.ToolCallError, match="such as 3"):
        stall.calculator("twelve")


def test_the_doctor_finds_nothing():
    found = verl_mt.examine(config_name="config.yaml")
    assert found.ok and not found.warnings, found
