"""Which files of rollout rows a run directory has, and what replaces what."""

from __future__ import annotations

import os

import pytest
from row_formats import table_of_rows
from test_run_files import one_record

from verl_mt.data.row_files import count_rows, read_rows, row_files, rows_of_step, write_columns
from verl_mt.data.run_files import trajectory_to_row, write_rows
from verl_mt.errors import DataError


def made(folder, *names):
    (folder / "rollouts").mkdir()
    for age, name in enumerate(names):
        path = folder / "rollouts" / name
        path.write_text("x")
        os.utime(path, ns=(10**9 * age, 10**9 * age))


def test_files_are_found_in_order_of_step_training_before_validation(tmp_path):
    made(
        tmp_path, "val_000002.jsonl", "step_000002.jsonl", "val_greedy_000002.parquet", "step_000010.parquet",
        "step_9.jsonl", ".step_000001.jsonl", "step_000003.jsonl.tmp", "step_x.jsonl", "notes.txt", "step_000004.csv",
    )  # fmt: skip
    found = [(file.step, file.split, file.format) for file in row_files(tmp_path)]
    assert found == [
        (2, "train", "jsonl"), (2, "val", "jsonl"), (2, "val_greedy", "parquet"), (9, "train", "jsonl"),
        (10, "train", "parquet"),
    ]  # fmt: skip
    assert rows_of_step(tmp_path, 10).path == tmp_path / "rollouts" / "step_000010.parquet"
    assert rows_of_step(tmp_path, 3) is None and row_files(tmp_path / "absent") == []
    first = row_files(tmp_path)[0]
    assert first.stamp == (10**9, 1)


@pytest.mark.parametrize("newer", ["jsonl", "parquet"])
def test_of_a_step_in_both_formats_the_newer_file_counts(tmp_path, newer):
    older = "parquet" if newer == "jsonl" else "jsonl"
    made(tmp_path, f"step_000001.{older}", f"step_000001.{newer}", f"val_000001.{newer}", "other_000001.jsonl")
    assert [(file.split, file.format) for file in row_files(tmp_path)] == [
        ("train", newer), ("other", "jsonl"), ("val", newer),
    ]  # fmt: skip


def test_a_file_replaces_that_of_an_earlier_version(tmp_path):
    rows = [trajectory_to_row(one_record(), step=k) for k in range(3)]
    stem = tmp_path / "rollouts" / "step_000001.part"
    old = stem.with_name("step_000001.part.jsonl")
    write_rows(old, rows)
    assert list(read_rows(old)) == rows and count_rows(old) == 3
    path = write_columns(stem, table_of_rows(rows[:2]))
    assert path.name == "step_000001.part.parquet" and list(read_rows(path)) == rows[:2] and count_rows(path) == 2
    assert [file.name for file in stem.parent.iterdir()] == [path.name]


def test_rows_of_a_large_file_are_counted_without_reading_what_they_hold(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x" * (2**20 - 1) + b"\n" + b"y\n" * 5 + b"torn")
    assert count_rows(tmp_path / "a.jsonl") == 6
    (tmp_path / "a.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        count_rows(tmp_path / "a.parquet")
