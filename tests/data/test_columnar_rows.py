"""Rows in columns are the rows of the JSON Lines."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_formats import table_of_rows
from test_run_files import one_record, trajectories

from verl_mt.data import columnar_rows
from verl_mt.data.columnar_rows import (
    late_part,
    read_parquet,
    seal,
    table_of,
    to_rows,
    token_ids,
    write_parquet,
)
from verl_mt.data.run_files import (
    LATE_FIELDS,
    trajectory_to_row,
    update_columns,
    write_rows,
)
from verl_mt.errors import DataError

number = st.floats(allow_nan=True, allow_infinity=True, width=32)


@st.composite
def updates(draw, trajectory):
    """What an update computed for each record, where it computed something."""
    made = {}
    for name in ("advantages", "old_log_probs", "clipped"):
        made[name] = [
            draw(st.none() | st.lists(number, min_size=len(r.token_ids), max_size=len(r.token_ids)))
            for r in trajectory.records
        ]
    return made


@st.composite
def rollouts(draw):
    made = draw(st.lists(trajectories(), min_size=1, max_size=3))
    return [(t, draw(updates(t))) for t in made]


def late_of(trajectory, computed, step):
    """As the trainer has it: arrays of numpy."""
    row = {name: getattr(trajectory, name, step) for name in LATE_FIELDS}
    row["records"] = [
        update_columns(
            len(record.token_ids), *(None if c[k] is None else np.array(c[k], np.float32) for c in computed.values())
        )
        for k, record in enumerate(trajectory.records)
    ]
    return row


def test_what_the_trainer_still_decides_is_not_part_of_what_was_sealed():
    trajectory = one_record()
    trajectory.reward = 1.0
    sealed = seal([trajectory])
    trajectory.reward, trajectory.reward_parts, trajectory.counters = 0.5, {"overlong": -0.5}, {"filtered": 1.0}
    trajectory.trained_version = 3
    (row,) = to_rows(table_of([sealed], [late_of(trajectory, {"a": [None], "b": [None], "c": [None]}, 2)]))
    assert row == trajectory_to_row(trajectory, step=2) and row["trained_version"] == 3


@given(rollouts())
@settings(max_examples=5, deadline=None)
def test_rows_that_were_sealed_are_those_of_the_json_lines_byte_for_byte(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("rows")
    rows = [trajectory_to_row(t, step=3, **computed) for t, computed in made]
    sealed = [seal([t for t, _ in made[:1]]), seal([t for t, _ in made[1:]])]
    table = table_of(sealed, [late_of(t, computed, 3) for t, computed in made])
    assert write_parquet(folder / "step_000003.parquet", table) == write_rows(folder / "a.jsonl", rows) == len(made)
    write_rows(folder / "b.jsonl", read_parquet(folder / "step_000003.parquet"))
    assert (folder / "a.jsonl").read_bytes() == (folder / "b.jsonl").read_bytes()


def test_rows_of_another_form_that_an_earlier_version_converted_are_read():
    rows = [{"anything": [1, {"x": None}]}, trajectory_to_row(one_record(), step=1) | {"later": 2}]
    columns = pa.Table.from_pylist([{"other": json.dumps(row)} for row in rows], schema=columnar_rows._SCHEMA)
    whole = pa.concat_tables([columns, table_of_rows([trajectory_to_row(one_record(), step=1)])])
    assert list(to_rows(whole)) == [*rows, trajectory_to_row(one_record(), step=1)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("token_ids", [1, 2**40, 3]), ("sampled", [0, 300, 1])])
def test_what_a_column_cannot_hold_is_kept_and_nothing_is_rounded(name, value):
    odd, neighbour = one_record(), one_record()
    setattr(odd.records[0], name, value)
    made = [neighbour, odd, neighbour]
    table = table_of([seal(made)], [late_part(t, step=1, late=[update_columns(3)]) for t in made])
    assert list(to_rows(table)) == [trajectory_to_row(t, step=1) for t in made]
    assert table["token_ids"].is_valid().to_pylist() == [True, False, True], "its neighbours are in columns"


def test_numbers_stand_in_columns_of_numbers(tmp_path):
    trajectory = one_record()
    trajectory.reward = math.nan
    trajectory.records[0].rollout_log_probs[2] = -math.inf
    late = late_of(trajectory, {"advantages": [[0, 0, 1.5]], "old": [[0, 0, math.nan]], "clipped": [[0, 0, 1]]}, 4)
    write_parquet(tmp_path / "a.parquet", table_of([seal([trajectory])], [late]))
    columns = pq.read_table(tmp_path / "a.parquet").to_pydict()
    assert columns["token_ids"] == [[[1, 2, 3]]] and columns["sampled"] == [[[0, 0, 1]]]
    assert columns["rollout_log_probs"] == [[[0.0, 0.0, None]]] and columns["policy_versions"] == [[[-1, -1, 7]]]
    assert columns["advantages"] == [[[0.0, 0.0, 1.5]]] and columns["old_log_probs"] == [[[0.0, 0.0, None]]]
    assert (columns["clipped"], columns["step"], columns["reward"]) == ([[[2]]], [4], [None])
    assert (columns["status"], columns["stop_reason"]) == (["completed"], ["finished"])
    assert "token_ids" not in columns["details"][0] and columns["other"] == [None]


def test_rows_of_before_they_knew_what_they_had_trained_stand_in_columns_too():
    row = trajectory_to_row(one_record(), step=1)
    del row["trained_version"]
    late = late_part(one_record(), step=1, late=[update_columns(3)])
    del late["trained_version"]
    table = table_of([seal([one_record()])], [late])
    assert list(to_rows(table)) == [row] and table["other"].to_pylist() == [None]


def test_a_record_of_arrays_seals_to_the_same_bytes():
    plain, packed = one_record(), one_record()
    record = packed.records[0]
    for name, kind in (("token_ids", np.int32), ("sampled", np.int8), ("rollout_log_probs", np.float64)):
        setattr(record, name, np.array(getattr(record, name), kind))
    assert seal([plain]) == seal([packed])


def test_parts_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="1 rows were sealed, and the late part is of 0"):
        table_of([seal([one_record()])], [])


def test_a_file_of_another_kind_or_layout_and_a_torn_one_are_named(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, table_of_rows([trajectory_to_row(one_record(), step=1)]))
    assert columnar_rows.is_rows_file(file) and columnar_rows.count_rows(file) == 1
    whole = file.read_bytes()
    for torn in (whole[:-4], whole[: len(whole) // 2], b""):
        file.write_bytes(torn)
        assert not columnar_rows.is_rows_file(file)
        for read in (lambda: list(read_parquet(file)), lambda: columnar_rows.count_rows(file)):
            with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
                read()
    for metadata, words in (
        (None, "no rollout rows"),
        ({"verl_mt.rollout_rows": "9"}, "of layout '9'.*reads layout '1'"),
    ):
        pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(metadata), file)
        with pytest.raises(DataError, match=words):
            list(read_parquet(file))


@pytest.mark.slow
def test_many_rows_and_none_are_files_too(tmp_path):
    write_parquet(tmp_path / "none.parquet", table_of_rows([]))
    assert list(read_parquet(tmp_path / "none.parquet")) == []
    rows = [trajectory_to_row(one_record(), step=k) for k in range(1100)]
    write_parquet(tmp_path / "many.parquet", table_of_rows(rows))
    assert [row["step"] for row in read_parquet(tmp_path / "many.parquet")] == list(range(1100))


def test_what_has_no_column_of_its_own_is_in_the_details_once():
    trajectory = one_record()
    trajectory.reward, trajectory.reward_parts, trajectory.counters = 0.5, {"score": 0.5}, {"retries": 1.0}
    (row,) = table_of_rows([trajectory_to_row(trajectory, step=3)]).to_pylist()
    spans = [
        {"kind": "prompt", "start": 0, "end": 2, "turn": 0},
        {"kind": "assistant", "start": 2, "end": 3, "turn": 1},
    ]
    assert json.loads(row["details"]) == {
        "tool_rewards": {}, "turn_scores": [], "messages": [], "turn_texts": [], "tools": [], "sanity": None,
        "error": None, "info": {}, "time_spans": [], "records": [{"has_log_probs": True, "turns": spans}],
    }  # fmt: skip
    assert json.loads(row["late_details"]) == {
        "trained_version": None, "reward_parts": {"score": 0.5}, "counters": {"retries": 1.0},
    }  # fmt: skip
    assert (row["step"], row["reward"], row["row_index"], row["trajectory_id"]) == (3, 0.5, -1, "t")


def test_a_row_that_does_not_fit_is_sealed_as_a_whole_and_its_neighbours_are_not():
    good, odd = one_record(), one_record()
    odd.trajectory_id, odd.reward = "\ud800", 0.5
    late = [late_part(t, step=4, late=[update_columns(3)]) for t in (good, odd)]
    table = table_of([seal([good, odd])], late)
    assert list(to_rows(table)) == [trajectory_to_row(t, step=4) for t in (good, odd)]
    assert table["other"].is_valid().to_pylist() == [False, True]
    assert not {"step", "reward", "trained_version"} & set(json.loads(table["other"].to_pylist()[1]))


def test_the_late_part_is_what_the_trainer_decides():
    trajectory = one_record()
    trajectory.reward, trajectory.trained_version = 0.5, 7
    late = [update_columns(3)]
    assert late_part(trajectory, step=4, late=late) == {
        "step": 4, "trained_version": 7, "reward": 0.5, "reward_parts": {}, "counters": {}, "records": late,
    }  # fmt: skip


def test_each_token_id_is_told_once():
    one, two = one_record(), one_record()
    two.records[0].token_ids[2] = 9
    two.records.append(one_record().records[0])
    parts = [update_columns(3)] * 2
    table = table_of(
        [seal([one]), seal([two])], [late_part(t, step=1, late=parts[: len(t.records)]) for t in (one, two)]
    )
    assert token_ids(table) == [1, 2, 3, 9]
    assert token_ids(table_of([], [])) == []


def test_a_file_is_laid_out_for_its_content(tmp_path):
    """Floats of tokens are split by bytes, what repeats has a dictionary, and what rows are looked up by has limits."""
    rows = [trajectory_to_row(one_record(), step=1, advantages=[[0.0, 0.0, 0.5]])] * 1025
    assert (
        write_parquet(tmp_path / "a.parquet", table_of_rows(rows))
        == 1025
        == columnar_rows.count_rows(tmp_path / "a.parquet")
    )
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)] == [1024, 1]
    group = metadata.row_group(0)
    found = {}
    for column in (group.column(k) for k in range(group.num_columns)):
        kind = "dictionary" if column.has_dictionary_page else ""
        kind = "split" if "BYTE_STREAM_SPLIT" in column.encodings else kind
        found[column.path_in_schema.partition(".")[0]] = (kind, column.is_stats_set)
        assert column.compression == "ZSTD"
    looked_up = ["schema_version", "trajectory_id", "prompt_id", "group_id", "episode_id", "data_source", "source",
                 "row_index", "num_turns", "status", "stop_reason"]  # fmt: skip
    numbers = ["rollout_log_probs", "advantages", "old_log_probs"]
    plain = ["token_ids", "reward", "details", "late_details", "other"]
    repeated = ["sampled", "loss_mask", "policy_versions", "clipped", "step"]
    assert found == (
        dict.fromkeys(looked_up, ("dictionary", True)) | dict.fromkeys(repeated, ("dictionary", False))
        | dict.fromkeys(numbers, ("split", False)) | dict.fromkeys(plain, ("", False))
    )  # fmt: skip


def test_missing_columns_and_numbers_of_a_record_are_none_where_they_were():
    trajectory = one_record()
    trajectory.records += one_record().records * 2
    columns = {"advantages": [[1.0, math.nan, 3.0], None, [4.0, 5.0, 6.0]], "old_log_probs": [None, None, None]}
    row = trajectory_to_row(trajectory, step=1, **columns, clipped=[[0, 0, 0], None, [1, 0, 1]])
    others = [trajectory_to_row(one_record(), step=1), trajectory_to_row(one_record(), step=1, advantages=[[7.0] * 3])]
    (_, found, last) = to_rows(table_of_rows([others[0], row, others[1]]))
    assert [record["advantages"] for record in found["records"]] == [[1.0, None, 3.0], None, [4.0, 5.0, 6.0]]
    assert [record.get("clipped", "none") for record in found["records"]] == [[], "none", [0, 2]]
    assert [record["old_log_probs"] for record in found["records"]] == [None] * 3
    assert last["records"][0]["advantages"] == [7.0] * 3 and found == row


def test_a_file_without_metadata_is_no_file_of_rows(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    assert not columnar_rows.is_rows_file(tmp_path / "a.parquet")
    assert not columnar_rows.is_rows_file(tmp_path / "absent.parquet")
