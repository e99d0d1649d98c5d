"""Tests of `my_project`: python -m pytest"""

import asyncio

from reward import compute_score
from rows import SCRIPT, rows
from user import User

import verl_mt


def answer_of_user(*answers):
    """What the user says to the last of the model's answers, for a row whose answer is 17."""
    messages = [{"role": "user", "content": "12 + 5?"}]
    for line, text in zip(["", *SCRIPT], answers, strict=False):
        messages += [{"role": "user", "content": line}] * bool(line) + [{"role": "assistant", "content": text}]
    user = User({"name": "user"})
    return asyncio.run(user.generate_response("id", messages, answer=17, script=SCRIPT))[:3]


def test_the_user_thanks_for_the_right_answer():
    assert answer_of_user("#### 17") == (True, "Thank you.", 1.0)


def test_the_user_follows_the_script_and_then_leaves():
    assert answer_of_user("#### 170") == (False, SCRIPT[0], 0.0)
    assert answer_of_user("I do not know.", "17") == (False, SCRIPT[1], 0.0)
    assert answer_of_user("#### 1", "#### 2", "#### 3") == (True, "Goodbye.", 0.0)


def test_the_reward_is_less_for_a_later_answer():
    found = [compute_score("my_project", "", 17, {"turn_scores": scores}) for scores in ([1.0], [0.0, 1.0], [0.0], [])]
    assert found == [1.0, 0.5, 0.0, 0.0]


def test_no_question_of_the_validation_is_trained():
    train, val = rows(-1, 0, "train"), rows(-1, 0, "val")
    assert len(train) > len(val) > 64
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}


def test_the_doctor_finds_nothing():
    found = verl_mt.examine(config_name="config.yaml")
    assert found.ok and not found.warnings, found
