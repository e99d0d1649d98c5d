"""What a run writes can be read back, whatever happened while it wrote."""

from __future__ import annotations

import dataclasses
import enum
import errno
import json
import math
import os
import uuid

import numpy
import pytest
import torch
from hostile import Unshowable
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from verl_mt.data.run_files import (
    SCHEMA_VERSION,
    TRUTH_CHARACTERS,
    append_metrics,
    append_token_texts,
    disk_refused,
    json_text,
    plain_row,
    read_jsonl_tolerant,
    read_token_texts,
    row_to_trajectory,
    to_json_value,
    trajectory_to_row,
    truncate_metrics,
    update_columns,
    write_rows,
    writing,
)
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryRecord
from verl_mt.errors import CheckpointError, DataError

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


def test_each_record_has_its_own_update_in_order():
    """Two records; the second has seen other messages and tools."""
    trajectory = one_record()
    trajectory.records += one_record().records
    second = trajectory.records[1]
    second.messages, second.tools, second.has_log_probs = [{"role": "user", "content": "m"}], [], False
    row = trajectory_to_row(
        trajectory, step=1, advantages=[None, [1.0, 2.0, 3.0]], old_log_probs=[[4.0, 5.0, 6.0], None],
        clipped=[[0.0, -1.0, 2.0], None],
    )  # fmt: skip
    first, other = row["records"]
    names = ["token_ids", "sampled", "loss_mask", "rollout_log_probs", "policy_versions", "advantages", "old_log_probs"]
    assert list(first) == [*names, "clipped", "has_log_probs", "turns"]
    assert list(other) == [*names, "has_log_probs", "messages", "tools", "turns"]
    assert (first["advantages"], first["old_log_probs"], first["clipped"]) == (None, [4.0, 5.0, 6.0], [2])
    assert (other["advantages"], other["old_log_probs"], other["tools"]) == ([1.0, 2.0, 3.0], None, [])
    back = row_to_trajectory(row).records
    assert back == trajectory.records and back[0].tools is None and back[1].tools == []
    late = plain_row(trajectory)["records"][0]
    assert list(late) == [*names[:5], "has_log_probs", "turns"] and plain_row(trajectory)["step"] is None


@pytest.mark.parametrize("length", [2, 4])
def test_an_update_has_a_number_per_token(length):
    assert update_columns(3, [1.0] * 3) == {"advantages": [1.0] * 3, "old_log_probs": None}
    with pytest.raises(ValueError, match=f"old_log_probs: {length} numbers for a record of 3 tokens"):
        update_columns(3, None, [0.0] * length)
    clipped = update_columns(3, clipped=numpy.array([1.0, numpy.nan, 0.5]))["clipped"]
    assert clipped.tolist() == [0, 2] and clipped.dtype == numpy.int32


def test_pictures_that_replaced_those_of_the_row_are_part_of_it():
    trajectory = one_record()
    trajectory.media = {"images": [Image.new("RGB", (1, 2), (1, 2, 3)), "a.png"], "videos": []}
    row = trajectory_to_row(trajectory, step=1)
    assert row["media"]["images"][1] == "a.png" and row["media"]["videos"] == []
    assert row["media"]["images"][0]["image"].startswith("data:image/png;base64,")
    assert row_to_trajectory(row).media["images"][0].getpixel((0, 1)) == (1, 2, 3)
    assert "media" not in trajectory_to_row(one_record(), step=1)


@pytest.mark.parametrize("length", [TRUTH_CHARACTERS, TRUTH_CHARACTERS + 1])
def test_a_ground_truth_of_just_the_most_characters_stays(length):
    trajectory = one_record()
    trajectory.ground_truth = "é" * length
    found = trajectory_to_row(trajectory, step=1)["ground_truth"]
    note = f" ... (cut: the ground truth has {length} characters)"
    assert found == ("é" * length if length == TRUTH_CHARACTERS else "é" * (TRUTH_CHARACTERS - len(note)) + note)
    trajectory.ground_truth = ["é" * (length - 4)]
    assert (trajectory_to_row(trajectory, step=1)["ground_truth"] == ["é" * (length - 4)]) is (
        length == TRUTH_CHARACTERS
    )


def test_a_row_without_what_it_must_have_names_all_of_it():
    row = trajectory_to_row(one_record(), step=1)
    short = {name: value for name, value in row.items() if name not in ("messages", "stop_reason", "records")}
    with pytest.raises(DataError, match="rollout row 't': messages, stop_reason, records missing"):
        row_to_trajectory(short)
    pending = row_to_trajectory(row | {"stop_reason": None})
    assert pending.stop_reason is None
    span = {"phase": "tool", "start_s": 1.0, "end_s": 2.0, "turn": 1, "name": "f", "later": 1}
    record = {**row["records"][0], "turns": [{**row["records"][0]["turns"][0], "later": 1}]}
    back = row_to_trajectory(row | {"time_spans": [span], "records": [record]})
    assert back.time_spans == [TimeSpan("tool", 1.0, 2.0, 1, "f")] and len(back.records[0].turns) == 1


class Color(enum.IntEnum):
    """A number with a name."""

    RED = 2


class Word(str):
    """A subclass."""


@pytest.mark.parametrize(
    ("value", "made"),
    [
        (None, None), (True, True), (Color.RED, 2), (StopReason.FINISHED, "finished"), (Word("x"), "x"),
        (numpy.float64(0.5), 0.5), (numpy.float64("nan"), None), (math.inf, None), (-math.inf, None),
        ({"b", "a"}, ["a", "b"]), (torch.tensor([[1, 2]]), [[1, 2]]), (torch.tensor(1.5), 1.5), (numpy.int32(3), 3),
        (Word, "<class 'test_run_files.Word'>"), ((), []),
    ],
)  # fmt: skip
def test_a_value_is_written_as_plain_json(value, made):
    found = to_json_value(value)
    assert found == made and type(found) is type(made)


def test_a_long_text_of_an_object_is_cut():
    class Long:
        def __repr__(self):
            return "x" * 20_000

    assert to_json_value(Long()) == "x" * 9_997 + "..."


def test_an_array_is_a_list_of_as_many_levels():
    text = "(nested too deeply to be written)"
    assert to_json_value(numpy.ones((1, 1)), 2) == [[1.0]] and to_json_value(numpy.ones((1, 1)), 1) == [text]


def test_halves_of_a_surrogate_pair_are_escaped_and_other_letters_are_not():
    assert json_text({"k": "é"}) == '{"k": "é"}'.encode()
    assert json_text({"k": "é\ud800"}) == b'{"k": "\\u00e9\\ud800"}'
    assert json_text([math.nan, 1]) == b"[null, 1]" and json_text(["\ud800", math.nan]) == b'["\\ud800", null]'


def test_a_refused_write_names_the_file_the_cause_and_the_room(tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr("shutil.disk_usage", lambda place: places.append(place) or type("Usage", (), {"free": 5}))
    path = tmp_path / "a" / "b.jsonl"
    said = disk_refused(path, OSError(errno.ENOSPC, "No space left on device"))
    assert said.startswith(f"cannot write {path}: No space left on device (5 bytes free on its disk); free disk space")
    assert places == [tmp_path]
    assert disk_refused(tmp_path, OSError("odd")).startswith(f"cannot write {tmp_path}: odd (5 bytes")
    assert disk_refused("absent_folder/x", OSError("odd")) and places[-1] == type(path)(".")
    with pytest.raises(CheckpointError, match=r"b\.jsonl: odd"), writing(path):
        raise OSError("odd")
    with pytest.raises(KeyError), writing(path):
        raise KeyError


@pytest.mark.parametrize(("mask", "mode"), [(0o027, 0o640), (0o002, 0o664), (0o111, 0o666)])
def test_a_written_file_has_the_permissions_of_others_and_leaves_nothing_beside_it(tmp_path, monkeypatch, mask, mode):
    old = os.umask(mask)
    try:
        # Another thread's file that is made meanwhile must not be writable for all.
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask of the process was changed"))
        assert write_rows(tmp_path / "new" / "a.jsonl", [{"x": 1}, {"y": 2}]) == 2
    finally:
        monkeypatch.undo()
        assert os.umask(old) == mask
    assert (tmp_path / "new" / "a.jsonl").stat().st_mode & 0o777 == mode
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.jsonl"]
    assert (tmp_path / "new" / "a.jsonl").read_bytes() == b'{"x": 1}\n{"y": 2}\n'


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The content, the name, the folder; each line of metrics too."""
    happened = []
    fsync, replace = os.fsync, os.replace

    def synced(number):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
        happened.append(("sync", name.rpartition(".")[2], os.fstat(number).st_size if name != "new" else 0))
        fsync(number)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: happened.append(("name",)) or replace(*names))
    write_rows(tmp_path / "new" / "a.jsonl", [{"x": 1}])
    append_metrics(tmp_path / "new" / "m.jsonl", {"x": 1})
    append_metrics(tmp_path / "new" / "m.jsonl", {"y": 1})
    assert happened == [("sync", "tmp", 9), ("name",), ("sync", "new", 0), ("sync", "jsonl", 9), ("sync", "jsonl", 18)]


def test_token_texts_of_torn_or_foreign_lines_are_left_out(tmp_path):
    file = tmp_path / "token_texts.jsonl"
    file.write_bytes(b'{"1": "a", "x": "b", "2": 3}\n\n[4]\n{"5"\n{"1": "c", "6": "d"}')
    assert read_token_texts(tmp_path) == {1: "c", 6: "d"}
    append_token_texts(tmp_path, {7: "e"})
    assert file.read_bytes().endswith(b'"d"}\n{"7": "e"}\n')
    append_token_texts(tmp_path, {8: "f"})
    assert file.read_bytes().endswith(b'{"7": "e"}\n{"8": "f"}\n')
    file.write_bytes(b"")
    append_token_texts(tmp_path, {9: "g"})
    assert file.read_bytes() == b'{"9": "g"}\n'


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("1a 2a 1b 2b 3b", "1b 2b"),
        ("0v 1a 1a 2a 2b 2v", "0v 1a 2b 2v"),
        ("n 1a 2a 2v 1b", "n 1b"),
        ("1a 2a 1b 3b", "1b"),
    ],
)
def test_steps_that_stand_there_twice_keep_their_last_lines_on_resume(tmp_path, written, kept):
    def line(word: str) -> bytes:
        name = {"v": "val/accuracy", "n": "note"}.get(word[-1], "loss")
        return json.dumps({**({"step": int(word[0])} if word != "n" else {}), name: word}).encode() + b"\n"

    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(map(line, written.split())))
    went = truncate_metrics(file, after_step=2)
    assert file.read_bytes() == b"".join(map(line, kept.split()))
    assert went == len(written.split()) - len(kept.split())


def test_truncating_counts_what_went_and_keeps_lines_without_a_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [b'{"note": 1}\n', b'{"step": 1}\n', b'{"step": 2}\n', b'{"step": 3}\n', b'{"st']
    file.write_bytes(b"".join(lines))
    assert truncate_metrics(file, after_step=2) == 2 and file.read_bytes() == b"".join(lines[:3])
    stamp = file.stat().st_ino
    assert truncate_metrics(file, after_step=2) == 0 and file.stat().st_ino == stamp, "nothing is written"
    assert truncate_metrics(file, after_step=-1) == 2 and file.read_bytes() == lines[0]


@pytest.mark.parametrize(
    ("content", "rows"),
    [(b'{"a": 1}\n{"b": 2}', 1), (b'{"a": 1}\n[1]\n', 1), (b'{"a": 1}\n{"b"\n', 1), (b"", 0), (b'{"a": 1}\n', 1)],
)
def test_a_torn_last_line_is_left_out(tmp_path, content, rows):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert read_jsonl_tolerant(tmp_path / "a.jsonl") == [{"a": 1}] * rows
    (tmp_path / "a.jsonl").write_bytes(b"[1]\n" + content)
    if content:
        with pytest.raises(DataError, match=r"a\.jsonl, line 1: not a JSON object"):
            read_jsonl_tolerant(tmp_path / "a.jsonl")
