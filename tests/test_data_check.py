"""What `verl_mt.check_data` understands of a file, and what it finds in one."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from verl_mt import check_data
from verl_mt.data.dataset import load_rows
from verl_mt.errors import VerlMTError
from verl_mt.extensions.inspection.data_check import run as main

ROW = {"prompt": "How many pens?", "data_source": "stock", "ground_truth": 3}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_column_is_said_with_its_kind_and_its_meaning(tmp_path):
    rows = [ROW | {"shelf": 7}, ROW | {"ground_truth": "4", "prompt": [{"role": "user", "content": "q"}]}]
    found = check_data(jsonl(tmp_path / "a.jsonl", rows))
    assert found and found.num_rows == 2
    assert found.columns["prompt"].kinds == {"text": 1, "list": 1}
    assert found.columns["shelf"].kinds == {"whole number": 1, "absent": 1}
    text = str(found)
    assert "all can be used" in text and "user> How many pens?" in text
    assert "the reward for 'stock' gets the ground truth 3 (whole number)" in text
    assert "several kinds: whole number in" in found.remarks[0] and "row 2" in found.remarks[0]


def test_every_bad_row_is_named_and_those_are_refused_by_a_run(tmp_path):
    bad = [{"prompt": "q", "data_source": "s"}, ROW | {"prompt": []}]
    file = jsonl(tmp_path / "a.jsonl", [ROW, bad[0], ROW | {"prompt": "other"}, bad[1]])
    found = check_data(file)
    assert not found and len(found.rows) == 2
    assert [p.partition(": ")[0] for p in found.problems] == [f"{file}, row 2", f"{file}, row 4, column prompt"]
    with pytest.raises(VerlMTError) as caught:
        load_rows(str(file), split="train")
    assert str(caught.value) == found.problems[0]


def test_what_is_probably_not_meant_is_said(tmp_path):
    answered = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [ROW, ROW, ROW | {"prompt": answered}, ROW | {"prompt": [{"role": "human", "content": "q"}]}]
    found = check_data(jsonl(tmp_path / "a.jsonl", rows))
    assert found
    taken_off, role, again = found.remarks
    assert "row 3" in taken_off and "taken off" in taken_off
    assert "row 4" in role and "'human'" in role
    assert "row 2" in again and "repeat the prompt and ground truth of an earlier row" in again


def test_with_a_model_the_prompt_is_the_text_that_it_reads(tmp_path):
    found = check_data(jsonl(tmp_path / "a.jsonl", [ROW, ROW | {"prompt": "pens " * 9}]), model="verl_mt://tiny")
    assert found.rendered == "<|im_start|>user\nHow many pens?<|im_end|>\n<|im_start|>assistant\n"
    assert found.longest is not None and found.longest[1].endswith("row 2")
    refused = check_data(
        jsonl(tmp_path / "b.jsonl", [ROW, ROW | {"prompt": [{"role": "human", "content": "q"}]}]),
        model="verl_mt://tiny",
    )
    assert not refused and "row 2" in refused.problems[0] and "human" in refused.problems[0]


def test_the_command_takes_files_and_the_keys_of_a_run(tmp_path, capsys):
    table = pyarrow.Table.from_pylist([{"question": "q", "answer": "a"}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert main([str(tmp_path / "a.parquet"), "data.prompt_key=question", "data.label_key=answer"]) == 0
    out = capsys.readouterr().out
    assert "user> q" in out and "the reward for 'a' gets the ground truth 'a' (text)" in out
    assert main([str(tmp_path / "a.parquet")]) == 2
    assert "column 'prompt' is missing" in capsys.readouterr().out
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "no file" in capsys.readouterr().err


def test_rows_in_both_of_two_files_are_said(tmp_path, capsys):
    files = [str(jsonl(tmp_path / f"{name}.jsonl", rows)) for name, rows in (("a", [ROW]), ("b", [{**ROW}]))]
    assert main(files) == 0
    assert f"note: {files[1]}, row 1: the prompt is in {files[0]}, too" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "text", "named"),
    [
        (None, "q<|im_end|>\n<|im_start|>assistant", "'<|im_end|>', '<|im_start|>'"),
        (None, "q<end_of_turn> [INST]", "'<end_of_turn>', '[INST]'"),
        ("verl_mt://tiny", "q<|im_end|>[INST]", "'<|im_end|>'"),
        (None, "Is a <b>b</b> <| |> c [inst]?", None),
    ],
)
def test_control_tokens_in_a_question_are_said(tmp_path, model, text, named):
    found = check_data(jsonl(tmp_path / "a.jsonl", [ROW, ROW | {"prompt": text}]), model=model)
    assert found
    said = [remark for remark in found.remarks if "control tokens" in remark]
    assert len(said) == (named is not None)
    assert named is None or (f"row 2: a user's text holds control tokens ({named})" in said[0])


def test_rows_of_an_environment_need_no_prompt_and_have_the_columns_that_it_wants(tmp_path, capsys):
    rows, environment = tmp_path / "seeds.jsonl", Path(__file__).parent / "environments" / "maze.py"
    rows.write_text('{"seed": 1}\n{"sed": 2}\n')
    assert main([str(rows)]) == 2
    assert "An environment may make it: add actor_rollout_ref.rollout.environment.path=" in capsys.readouterr().out
    assert main([str(rows), f"actor_rollout_ref.rollout.environment.path={environment}:Maze"]) == 2
    said = capsys.readouterr().out
    assert "1 cannot be used" in said and "(Maze.reset) wants 'seed', which the row has not" in said
    assert "row 2" in said and "row 1:" not in said and "same prompt" not in said
