"""Tests of `my_project`: python -m pytest"""

import pytest
from reward import compute_score
from rows import rows
from tools import add

import verl_mt


def test_the_tool_computes_and_says_what_it_wants():
    assert add("12 + 5") == "17" and add("12-5") == "7"
    with pytest.raises(verl_mt.ToolCallError, match="such as 3"):
        add("twelve")


def test_the_reward_pays_the_right_answer_alone():
    assert compute_score("my_project", "It is #### 17", 17, {}) == 1.0
    assert compute_score("my_project", "It is #### 170", 17, {}) == compute_score("my_project", "17", 17, {}) == 0.0


def test_no_question_of_the_validation_is_trained():
    train, val = rows(-1, 0, "train"), rows(-1, 0, "val")
    assert len(train) > len(val) > 64
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}


def test_the_doctor_finds_nothing():
    found = verl_mt.examine(config_name="config.yaml")
    assert found.ok and not found.warnings, found
