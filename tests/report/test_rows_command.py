"""`python -m verl_mt.report.rows`, and a report of rows in columns."""

from __future__ import annotations

import json

import pytest
from row_formats import as_parquet
from run_lab import small_run

from verl_mt.data.row_files import row_files
from verl_mt.extensions.inspection.report.collect import collect
from verl_mt.extensions.inspection.report.rows import main


def written(run):
    """Name -> bytes."""
    return {p.name: p.read_bytes() for p in (run / "rollouts").iterdir()}


def test_rows_of_both_formats_print_the_same_bytes_and_show_the_same_page(tmp_path, capfdbinary):
    run = small_run(tmp_path / "run", steps=3, prompts=2).folder
    before = written(run)
    shown = collect([str(run)], max_rollouts=100)
    assert main([str(run), "--step", "2"]) == 0
    assert capfdbinary.readouterr().out == before["step_000002.jsonl"]
    as_parquet(run)
    assert [f.format for f in row_files(run)] == ["parquet"] * 3 and len(written(run)) == 3
    in_columns = collect([str(run)], max_rollouts=100)
    assert in_columns.blocks == shown.blocks and in_columns.runs == shown.runs, "the report is the same page"
    assert main([str(run), "--step", "2"]) == 0
    assert capfdbinary.readouterr().out == before["step_000002.jsonl"]
    assert main([str(run / "rollouts" / "step_000003.parquet")]) == 0
    assert capfdbinary.readouterr().out == before["step_000003.jsonl"]
    assert main([str(run)]) == 0
    assert capfdbinary.readouterr().out == b"".join(before[name] for name in sorted(before))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9"], "no rollout rows of step 9 of split train. There are: train 1, train 2"),
        (["--split", "val"], "of split val"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(tmp_path, capsys, words, said):
    run = small_run(tmp_path / "run", steps=2, prompts=1).folder
    assert main([str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_damaged_file_of_columns_costs_the_report_no_other_step(tmp_path, capsys):
    run = small_run(tmp_path / "run", steps=3, prompts=2).folder
    as_parquet(run)
    torn = run / "rollouts" / "step_000002.parquet"
    torn.write_bytes(torn.read_bytes()[:-9])
    shown = collect([str(run)], max_rollouts=100).runs[0]
    assert [part["step"] for part in shown["parts"]] == [1, 3]
    (said,) = shown["problems"]
    assert "step_000002.parquet: not a readable Parquet file" in said and "0 rows of it are read" in said
    assert main([str(run), "--step", "2"]) == 2
    assert "step_000002.parquet: not a readable Parquet file" in capsys.readouterr().err


def test_of_a_step_in_both_formats_the_newer_file_counts(tmp_path, capfd):
    run = small_run(tmp_path / "run", steps=1, prompts=1).folder
    old = run / "rollouts" / "step_000001.jsonl"
    kept = old.read_bytes()
    as_parquet(run)
    old.write_bytes(kept.splitlines(keepends=True)[0])  # as if a killed process had left it
    (file,) = row_files(run)
    assert file.path == old
    capfd.readouterr()
    assert main([str(run)]) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 1
