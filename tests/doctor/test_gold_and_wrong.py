"""`demos=` with what a model should say and what it should not: the doctor says whether gold earns more."""

from __future__ import annotations

import json

import pytest
from parts_project import Project, demonstration, rows

import verl_mt
from verl_mt.errors import DataError
from verl_mt.extensions.inspection.doctor.demonstrations import conversations, wrong_messages

ASKED = [{"role": "user", "content": "What?"}]


def test_a_text_answers_the_own_prompt_or_the_training_row_of_its_place():
    found = conversations({0: {"prompt": "What?", "gold": "It."}, 1: {"prompt": ASKED, "gold": "That."}}, [], "d")
    assert [row["messages"] for row in found.values()] == [
        [*ASKED, {"role": "assistant", "content": "It."}],
        [*ASKED, {"role": "assistant", "content": "That."}],
    ]
    said = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": ""},
    ]
    assert conversations({0: {"prompt": "What?", "gold": said}}, [], "d")[0]["messages"] == [*ASKED, *said]
    assert wrong_messages([*ASKED, *said], "no", "d") == [*ASKED, *said[:2], {"role": "assistant", "content": "no"}]
    assert wrong_messages([*ASKED, *said], said[:1], "d") == [*ASKED, said[0]]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"gold": "It."}, "no `prompt`, and there is no training row 1"),
        ({"prompt": "What?"}, "needs `messages` .* or `gold`"),
        ({"gold": "It.", "messages": ASKED}, "needs `messages` .* or `gold`"),
        ({"prompt": "What?", "gold": 3}, "expected a text, or messages"),
        ({"prompt": "What?", "gold": ASKED}, "the last is the assistant's"),
    ],
)
def test_a_demonstration_that_is_none_is_refused(row, says):
    with pytest.raises(DataError, match=f"--demos: d, row 1.*{says}"):
        conversations({0: row}, [], "d")


def demos(wrong: str, number: int = 4) -> str:
    made = [demonstration(row) | {"wrong": wrong} for row in rows(0, number)]
    return "".join(json.dumps(row) + "\n" for row in made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "wrong", "status", "says"),
    [
        (None, "Answer: 1", "ok", "gold earns more than wrong in all 4: at least 1, wrong at most 0"),
        ("return float('Answer:' in solution_str)", "Answer: 1", "warning", "in 4 of 4: demos.jsonl, row 1: gold 1, "),
        ("return float('Answer: 1' in solution_str)", "Answer: 1", "warning", "gold 0, wrong 1"),
    ],
)  # fmt: skip
def test_gold_earns_more_than_wrong(reward, wrong, status, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path)
    project.write("demos.jsonl", demos(wrong))
    if reward is not None:
        project.write(
            "part_reward.py",
            f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {reward}\n",
        )
    found = project.examine([], "demonstrations", demos="demos.jsonl")
    said = [f for f in found if f.check == "demonstrations" and says in f.text]
    assert [f.status for f in said] == [status], "\n".join(map(str, found))


@pytest.mark.slow
def test_from_python_texts_answer_the_first_rows():
    def score(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str.strip() == ground_truth)

    data = [{"prompt": f"What is {n} plus 1?", "ground_truth": str(n + 1)} for n in range(8)]
    given = [{"gold": str(n + 1), "wrong": str(n)} for n in range(3)]
    keys = {"train_batch_size": 4, "response_length": 64, "rollout__n": 2, "rollout__name": "local", "logger": []}
    found = verl_mt.examine("verl_mt://tiny", data, tools=[], reward=score, demos=given, **keys)
    assert "gold earns more than wrong in all 3" in str(found)
    assert not [text for text in found.warnings if text.startswith(("demonstrations", "reward"))]
    turned = [{"gold": row["wrong"], "wrong": row["gold"]} for row in given]
    found = verl_mt.examine("verl_mt://tiny", data, tools=[], reward=score, demos=turned, **keys)
    assert any("gold does not earn more than wrong in 3 of 3" in text for text in found.warnings)
