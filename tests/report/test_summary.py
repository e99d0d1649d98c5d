"""What the table and the conversation say of a row: boundaries, blocks, calls."""

from __future__ import annotations

import math

import pytest
from run_lab import Lab

from verl_mt.data.trajectory import TrajectoryRecord
from verl_mt.extensions.inspection.report.summary import BOUNDARY_TOKENS, blocks_of, describe, tool_calls
from verl_mt.extensions.inspection.report.token_columns import TokenColumns


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def told(lab: Lab, row: dict):
    texts = {token_id: text for text, token_id in lab.vocabulary.ids.items()}
    return describe(row, TokenColumns(), texts)


def observation(row: dict) -> dict:
    return next(t for t in row["records"][0]["turns"] if t["kind"] == "observation")


@pytest.mark.parametrize(
    ("place", "at_boundary"),
    [("end", True), ("last near", True), ("first far", False), ("start", True), ("far before", False)],
)
@pytest.mark.parametrize("ratio", [3.0, 1 / 3])
def test_a_ratio_counts_at_a_tool_boundary_within_three_trained_tokens_of_the_answer(lab, place, at_boundary, ratio):
    row = lab.row(lab.trajectory(1, 0, 0), 1)
    span, record = observation(row), row["records"][0]
    token = {
        "end": span["end"], "last near": span["end"] + BOUNDARY_TOKENS - 1, "first far": span["end"] + BOUNDARY_TOKENS,
        "start": span["start"] - 1, "far before": span["start"] - BOUNDARY_TOKENS - 1,
    }[place]  # fmt: skip
    record["old_log_probs"][token] = record["rollout_log_probs"][token] + math.log(ratio)
    line, _ = told(lab, row)
    assert line["ratio"] == pytest.approx(3.0, rel=1e-4)
    assert (line["edge_ratio"] > 2) == at_boundary


def test_the_line_of_the_table_counts_what_the_row_holds(lab):
    trajectory = lab.trajectory(1, 1, 0)
    trajectory.counters |= {"tools/search/errors": 1.0, "tools/search/model_errors": 2.0, "tools/search/calls": 4.0}
    trajectory.sanity = {"cause": "retokenized", "causes": ["retokenized", "turn_separator"]}
    line, _ = told(lab, lab.row(trajectory, 1))
    record = trajectory.records[0]
    assert (line["tokens"], line["sampled"]) == (len(record.token_ids), sum(record.sampled))
    assert (line["calls"], line["errors"], line["model_errors"], line["tools"]) == (4.0, 1.0, 2.0, ["search"])
    assert line["mismatch"] == ["retokenized", "turn_separator"]
    assert (line["reward"], line["advantage"], line["seconds"]) == (1.0, 1.0, 3.1)


def test_a_validation_row_has_no_ratio_and_no_advantage(lab):
    row = lab.row(lab.trajectory(1, 0, 0), 1)
    row["records"][0] |= {"old_log_probs": None, "advantages": None}
    line, _ = told(lab, row)
    assert (line["ratio"], line["edge_ratio"], line["advantage"]) == (None, None, None)


def test_blocks_follow_the_messages_and_cover_every_token(lab):
    trajectory = lab.trajectory(1, 0, 0)
    texts = {token_id: text for text, token_id in lab.vocabulary.ids.items()}
    row = lab.row(trajectory, 1)
    blocks = blocks_of(row["records"][0], row["messages"], texts)
    ids = row["records"][0]["token_ids"]
    shown = [(b["role"], "".join(texts[i] for i in ids[b["start"] : b["end"]])) for b in blocks]
    said = [m["content"] for m in trajectory.messages]
    assert [role for role, _ in shown] == ["system", "user", "assistant", "tool", "assistant"]
    assert all(text in block for text, (_, block) in zip(said, shown))
    assert shown[0][1] == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert [b["start"] for b in blocks] == [0, *(b["end"] for b in blocks[:-1])]
    assert blocks[-1]["end"] == len(ids)


def test_a_message_that_the_template_changed_leaves_its_span_to_the_others(lab):
    record = TrajectoryRecord()
    record.append_given(lab.vocabulary.encode("<|im_start|>user\nabc<|im_end|>\n"), kind="prompt", turn=0)
    row = {"token_ids": record.token_ids, "turns": [{"kind": "prompt", "start": 0, "end": 5, "turn": 0}]}
    messages = [{"role": "system", "content": "never rendered"}, {"role": "user", "content": "abc"}]
    texts = {token_id: text for text, token_id in lab.vocabulary.ids.items()}
    assert [(b["role"], b["start"], b["end"]) for b in blocks_of(row, messages, texts)] == [("user", 0, 5)]
    assert [b["role"] for b in blocks_of(row, messages, {})] == ["system"]  # no texts: the span as a whole


TOOLS = '<tools>\n{"name": "look", "parameters": {' + '"x": "number", ' * 20 + "}}\n</tools>"
TURN = "<|im_start|>%s\n%s<|im_end|>\n"


@pytest.mark.parametrize(
    ("text", "roles", "question"),
    [
        (TURN % ("system", TOOLS) + TURN % ("user", "Why so?"), ["tools", "user"], TURN % ("user", "Why so?")),
        (
            TURN % ("system", f"Be brief.\n{TOOLS}") + TURN % ("user", "Why so?"),
            ["system", "tools", "user"],
            TURN % ("user", "Why so?"),
        ),
        (TURN % ("user", f"{TOOLS}\nWhy so?"), ["tools", "user"], "Why so?<|im_end|>\n"),
        (TURN % ("system", "I am Q.") + TURN % ("user", "Why so?"), ["template", "user"], TURN % ("user", "Why so?")),
        (TURN % ("system", "Be brief.") + TURN % ("user", "Why so?"), ["system", "user"], TURN % ("user", "Why so?")),
    ],
    ids=["own turn", "behind the system message", "in the user's turn", "default system message", "none"],
)
def test_what_the_template_writes_is_no_part_of_the_question(text, roles, question):
    ids = list(range(len(text)))
    record = {"token_ids": ids, "turns": [{"kind": "prompt", "start": 0, "end": len(ids), "turn": 0}]}
    messages = [{"role": "user", "content": "Why so?"}]
    if "system" in roles:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    blocks = blocks_of(record, messages, dict(enumerate(text)))
    assert [b["role"] for b in blocks] == roles
    assert text[blocks[-1]["start"] : blocks[-1]["end"]] == question
    assert [b["start"] for b in blocks] == [0, *(b["end"] for b in blocks[:-1])]


def test_the_table_says_what_was_asked_answered_and_right(lab):
    trajectory = lab.trajectory(1, 0, 0)
    trajectory.messages[1]["content"] = "Why?\n" + "so " * 60
    trajectory.messages[-1]["content"] = "so " * 60 + "\n#### 7"
    trajectory.ground_truth, trajectory.reward_parts = {"target": [7]}, {"score": 1.0, "form": 0.5}
    trajectory.source, trajectory.data_source = "train.jsonl", "toy"
    line, details = told(lab, lab.row(trajectory, 1))
    assert line["question"].startswith("Why? so so") and len(line["question"]) == 120 and line["question"][-1] == "…"
    assert line["answer"].endswith("so #### 7") and len(line["answer"]) == 80 and line["answer"][0] == "…"
    assert (line["truth"], details["truth"]) == ('{ "target": [ 7 ] }', '{\n "target": [\n  7\n ]\n}')
    assert (line["parts"], line["entry"], line["data"]) == (trajectory.reward_parts, "train.jsonl", "toy")


def test_a_prompt_is_the_same_in_every_step_and_under_another_system_message_and_no_other(lab):
    trajectory = lab.trajectory(1, 0, 0)
    first, _ = told(lab, lab.row(trajectory, 1))
    trajectory.messages[0]["content"] = "Be long."
    trajectory.messages[-1]["content"] = "another answer"
    again, _ = told(lab, lab.row(trajectory, 9))
    other, _ = told(lab, lab.row(lab.trajectory(1, 1, 0), 1))
    assert first["prompt"] == again["prompt"] != other["prompt"]


def test_an_answer_that_is_a_call_and_a_truth_that_is_not_there_are_told_from_empty_ones(lab):
    trajectory = lab.trajectory(1, 0, 0)
    call = trajectory.messages[2]
    trajectory.messages, trajectory.num_turns = [*trajectory.messages[:2], call | {"content": ""}], 1
    trajectory.ground_truth = None
    line, details = told(lab, lab.row(trajectory, 1))
    assert (line["answer"], line["truth"], "truth" in details) == ("calls search", None, False)
    trajectory.ground_truth = ""
    assert told(lab, lab.row(trajectory, 1))[0]["truth"] == ""


def test_calls_keep_their_answers_whether_read_or_not(lab):
    trajectory = lab.trajectory(1, 0, 0)
    bad = {"turn": 1, "name": "search", "call_id": "", "arguments": None, "written": "{oops", "failure": "model"}
    trajectory.tool_calls.insert(0, bad | {"latency_s": 0.0, "step_reward": 0.0})
    trajectory.messages.insert(3, {"role": "tool", "content": "<error>no JSON</error>", "tool_call_id": ""})
    first, second = tool_calls(lab.row(trajectory, 1))
    assert (first["written"], first["failure"], first["result"]) == ("{oops", "model", "<error>no JSON</error>")
    assert second["result"] == trajectory.messages[4]["content"]
    assert (second["seconds"], "failure" in second) == (0.5, False)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_shown_under_whatever_key_the_template_reads_it(lab, key):
    row = lab.row(lab.trajectory(1, 0, 0), 1)
    place = next(k for k, message in enumerate(row["messages"]) if message["role"] == "assistant")
    row["messages"][place] = {"role": "assistant", "content": "4", key: "easy"}
    _, shown = told(lab, row)
    assert shown["messages"][place]["reasoning"] == "easy"


def test_an_older_row_without_calls_takes_them_from_its_messages(lab):
    row = lab.row(lab.trajectory(1, 0, 0), 1)
    wanted = tool_calls(row)
    del row["tool_calls"]
    (call,) = tool_calls(row)
    assert call == {k: v for k, v in wanted[0].items() if k not in ("seconds", "step_reward")}
