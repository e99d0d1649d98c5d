"""What a run writes can be read back, whatever happened while it wrote."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import uuid

import numpy
import pytest
from hostile import Unshowable
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.data.run_files import (
    SCHEMA_VERSION,
    TRUTH_CHARACTERS,
    append_metrics,
    append_token_texts,
    read_jsonl_tolerant,
    read_token_texts,
    row_to_trajectory,
    to_json_value,
    trajectory_to_row,
    truncate_metrics,
    write_rows,
)
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryRecord
from verl_mt.errors import DataError

texts = st.text(st.characters(), max_size=8)  # any code point, separators and halves of surrogate pairs included
numbers = st.floats(-1e6, 1e6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
ids = st.lists(st.integers(0, 200_000), max_size=5)


@st.composite
def records(draw):
    record = TrajectoryRecord()
    record.append_given(draw(ids), kind="prompt", turn=0)
    for turn in range(1, draw(st.integers(1, 3)) + 1):
        sampled = draw(ids)
        log_probs = [draw(st.floats(-30, 0)) for _ in sampled]
        record.append_sampled(sampled, log_probs, [draw(st.integers(0, 9))] * len(sampled), turn=turn)
        record.append_given(draw(ids), kind="observation", turn=turn)
    record.clear_mask([p for p in range(len(record.token_ids)) if draw(st.booleans())])
    return record


@st.composite
def trajectories(draw):
    return Trajectory(
        *(draw(texts) for _ in range(5)),
        source=draw(texts),
        row_index=draw(st.integers(-1, 99)),
        messages=[{"role": draw(texts), "content": draw(texts), "tool_calls": [draw(json_values)]}],
        tools=draw(st.lists(st.dictionaries(texts, json_values, max_size=2), max_size=2)),
        records=draw(st.lists(records(), max_size=2)),
        reward=draw(st.none() | numbers),
        reward_parts=draw(st.dictionaries(texts, numbers, max_size=2)),
        tool_rewards=draw(st.dictionaries(texts, st.lists(numbers, max_size=2), max_size=2)),
        turn_scores=draw(st.lists(numbers, max_size=2)),
        stop_reason=draw(st.none() | st.sampled_from(StopReason)),
        num_turns=draw(st.integers(0, 9)),
        counters=draw(st.dictionaries(texts, numbers, max_size=2)),
        time_spans=draw(st.lists(st.builds(TimeSpan, st.sampled_from(["queue", "tool"]), numbers, numbers,
                                           st.integers(0, 5), texts), max_size=2)),
        sanity=draw(st.none() | st.dictionaries(texts, json_values, max_size=2)),
        error=draw(st.none() | texts),
        info=draw(st.dictionaries(texts, json_values, max_size=2)),
        ground_truth=draw(json_values),
    )  # fmt: skip


def test_a_row_has_the_fields_of_its_trajectory_in_this_order():
    """All come back, except those of the step."""
    fields = {
        "trajectory_id": "t", "prompt_id": "p", "group_id": "g", "episode_id": "e", "data_source": "d", "row_index": 5,
        "num_turns": 1, "reward": 0.5, "reward_parts": {"score": 0.75}, "tool_rewards": {"add": [0.25]},
        "turn_scores": [0.1], "messages": [{"role": "user", "content": "q"}], "turn_texts": ["a"],
        "tools": [{"name": "add"}], "counters": {"retries": 1.0}, "sanity": {"cause": "x"}, "error": "why",
        "info": {"k": 1}, "source": "train",
    }  # fmt: skip
    where_known = {
        "greedy_reward": 0.2, "tool_calls": [{"name": "add"}], "tool_reward_turns": {"add": [1]},
        "turn_rewards": {1: 0.3}, "execution_id": "x", "replicas": ["r0"], "ground_truth": "yes",
    }  # fmt: skip
    begin = {"schema_version": 2, "step": 3, "trained_version": 7}
    times = {"phase": "tool", "start_s": 1.0, "end_s": 2.0, "turn": 1, "name": "add"}
    end = {"status": "completed", "stop_reason": "finished", "time_spans": [times], "records": []}
    plain = Trajectory(
        **fields, trained_version=7, stop_reason=StopReason.FINISHED, time_spans=[TimeSpan("tool", 1.0, 2.0, 1, "add")]
    )
    row = trajectory_to_row(plain, step=3)
    assert list(row.items()) == list((begin | fields | end).items())
    assert row_to_trajectory(row) == dataclasses.replace(plain, trained_version=None)
    known = dataclasses.replace(plain, **where_known)
    row = trajectory_to_row(known, step=3)
    assert list(row.items()) == list((begin | fields | where_known | {"turn_rewards": {"1": 0.3}} | end).items())
    assert row_to_trajectory(row) == dataclasses.replace(known, trained_version=None)


@given(trajectories())
@settings(max_examples=15, deadline=None)
def test_a_trajectory_survives_the_way_through_a_file(tmp_path_factory, trajectory):
    file = tmp_path_factory.mktemp("rows") / "step.jsonl"
    assert write_rows(file, [trajectory_to_row(trajectory, step=3)] * 2) == 2
    for row in read_jsonl_tolerant(file):
        assert row_to_trajectory(row) == trajectory
        assert row["status"] == trajectory.status


def one_record() -> Trajectory:
    record = TrajectoryRecord()
    record.append_given([1, 2], kind="prompt", turn=0)
    record.append_sampled([3], [-0.5], [7], turn=1)
    return Trajectory("t", "p", "p", "e", records=[record], stop_reason=StopReason.FINISHED)


def test_a_row_holds_everything_a_batch_is_made_of():
    row = trajectory_to_row(one_record(), step=4, advantages=[[0, 0, 1.5]], old_log_probs=[None])
    assert (row["schema_version"], row["step"], row["status"], row["stop_reason"]) == (2, 4, "completed", "finished")
    assert row["records"] == [
        {
            "token_ids": [1, 2, 3],
            "sampled": [0, 0, 1],
            "loss_mask": [0, 0, 1],
            "rollout_log_probs": [0.0, 0.0, -0.5],
            "policy_versions": [-1, -1, 7],
            "advantages": [0, 0, 1.5],
            "old_log_probs": None,
            "has_log_probs": True,
            "turns": [
                {"kind": "prompt", "start": 0, "end": 2, "turn": 0},
                {"kind": "assistant", "start": 2, "end": 3, "turn": 1},
            ],
        }
    ]


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match="advantages: 2 numbers for a record of 3 tokens"):
        trajectory_to_row(one_record(), step=1, advantages=[[1.0, 2.0]])


@pytest.mark.parametrize("truth", ["x" * 20_000, {"tests": ["assert f(1) == 2"] * 1000}])
def test_a_ground_truth_too_long_for_a_row_is_cut_and_says_so(truth):
    trajectory = one_record()
    trajectory.ground_truth = truth
    row = trajectory_to_row(trajectory, step=1)
    size = len(truth if isinstance(truth, str) else json.dumps(truth))
    assert len(row["ground_truth"]) == TRUTH_CHARACTERS
    assert row["ground_truth"].endswith(f" ... (cut: the ground truth has {size} characters)")
    assert trajectory_to_row(row_to_trajectory(row), step=1) == row


def test_nan_is_never_written(tmp_path):
    trajectory = one_record()
    trajectory.reward = math.nan
    trajectory.records[0].rollout_log_probs[2] = -math.inf
    trajectory.info = {"a": numpy.float32("nan"), "b": (1, numpy.int64(2)), "c": object, "d": numpy.ones((1, 2))}
    write_rows(tmp_path / "a.jsonl", [trajectory_to_row(trajectory, step=1, advantages=[[math.nan, 0, math.inf]])])
    text = (tmp_path / "a.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    row = json.loads(text)
    assert row["reward"] is None
    assert row["records"][0]["advantages"] == [None, 0, None]
    assert row["info"] == {"a": None, "b": [1, 2], "c": "<class 'object'>", "d": [[1.0, 1.0]]}
    assert math.isnan(row_to_trajectory(row).records[0].rollout_log_probs[2])


@given(json_values)
@settings(max_examples=40, deadline=None)
def test_plain_json_is_left_alone(value):
    assert to_json_value(value) == value


@dataclasses.dataclass(frozen=True)
class Box:
    held: object


@pytest.mark.parametrize(
    ("wrap", "written"),
    [
        (lambda v: [v], lambda v: [v]),
        (lambda v: (v,), lambda v: [v]),
        (lambda v: frozenset({v}), lambda v: [v]),
        (lambda v: {"k": v}, lambda v: {"k": v}),
        (Box, lambda v: {"held": v}),
    ],
    ids=["list", "tuple", "set", "dict", "dataclass"],
)
def test_each_container_is_a_level_and_those_too_deep_become_a_text(wrap, written):
    deep, text = wrap(wrap(wrap("x"))), "(nested too deeply to be written)"
    assert to_json_value(deep) == to_json_value(deep, 3) == written(written(written("x")))
    assert to_json_value(deep, 2) == written(written(text))
    assert to_json_value(deep, 0) == text


def test_a_list_in_itself_is_written_200_levels_deep():
    value, expected = [], "(nested too deeply to be written)"
    value.append(value)
    for _ in range(200):
        expected = [expected]
    assert to_json_value(value) == expected


def test_keys_that_are_no_texts_are_written_as_str_writes_them():
    name = uuid.UUID(int=5)
    written = to_json_value({numpy.int64(3): "a", name: "b", None: "c", 1.5: "d", (1, 2): "e", True: "f"})
    assert written == {"3": "a", str(name): "b", "None": "c", "1.5": "d", "(1, 2)": "e", "True": "f"}
    (odd,) = to_json_value({Unshowable(): 1})
    assert "__repr__ raised" in odd


def test_rows_of_other_versions_are_refused_and_new_keys_are_left_aside():
    row = trajectory_to_row(one_record(), step=1)
    assert row_to_trajectory(row | {"later": 1}) == one_record()
    assert row_to_trajectory({k: v for k, v in row.items() if k != "source"}) == one_record()
    with pytest.raises(DataError, match=f"schema_version 9.*reads 1 and {SCHEMA_VERSION}"):
        row_to_trajectory(row | {"schema_version": 9})
    assert row_to_trajectory(row | {"schema_version": 1}) == one_record()
    del row["messages"]
    with pytest.raises(DataError, match="messages missing"):
        row_to_trajectory(row)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "rollouts" / "step.jsonl"
    write_rows(file, [{"a": 1}])

    def broken():
        yield {"a": 2}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(file, broken())
    assert file.read_text() == '{"a": 1}\n'
    assert os.listdir(file.parent) == ["step.jsonl"]


@given(steps=st.integers(1, 6), after=st.integers(-1, 7), torn=st.integers(0, 40))
@settings(max_examples=15, deadline=None)
def test_truncating_drops_later_steps_and_a_torn_line_and_keeps_the_rest_byte_for_byte(
    tmp_path_factory, steps, after, torn
):
    file = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    for step in range(steps):
        append_metrics(file, {"step": step, "a": step / 3, "text": "é\u2028"})
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(whole[: len(whole) - min(torn, len(lines[-1]) - 1)])
    complete = steps if torn == 0 else steps - 1
    assert len(read_jsonl_tolerant(file)) == complete
    truncate_metrics(file, after_step=after)
    assert file.read_bytes() == b"".join(lines[: min(complete, after + 1)])
    append_metrics(file, {"step": 99})
    assert read_jsonl_tolerant(file)[-1] == {"step": 99}


def test_a_broken_line_in_the_middle_is_an_error_and_an_absent_file_is_none(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert truncate_metrics(file, after_step=3) == 0
    file.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 2"):
        read_jsonl_tolerant(file)


def test_token_texts_are_added_up_over_lines_and_a_torn_one_costs_only_itself(tmp_path):
    assert read_token_texts(tmp_path) == {}
    append_token_texts(tmp_path, {7: " the", 8: "\n"})
    with open(tmp_path / "token_texts.jsonl", "ab") as file:
        file.write(b'{"9": "lo')
    append_token_texts(tmp_path, {10: "⟨E2 9C⟩"})
    assert read_token_texts(tmp_path) == {7: " the", 8: "\n", 10: "⟨E2 9C⟩"}
