"""What the table and the conversation say of a row: boundaries, blocks, calls."""

from __future__ import annotations

import math

import pytest
from run_lab import Lab

from verl_mt.data.trajectory import TrajectoryRecord
from verl_mt.report.summary import BOUNDARY_TOKENS, blocks_of, describe, tool_calls
from verl_mt.report.token_columns import TokenColumns


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
