"""Rows: what is read, what is refused, and what each refusal names."""

from __future__ import annotations

import json
import re
import sys
import time
import types
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.data.dataset import (
    Columns,
    DataRow,
    Entry,
    Reading,
    begun_by_system,
    check_renamed,
    drop_nulls,
    entries_of,
    examine_rows,
    load_entry,
    load_rows,
    read_line,
    read_rows,
)
from verl_mt.errors import DataError, PluginError

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 0},
}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def load(spec, **kwargs):
    return load_rows(spec, split="train", **kwargs)


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("made_up_rows")
    monkeypatch.setitem(sys.modules, "made_up_rows", made)
    return made


@pytest.mark.slow
def test_the_three_kinds_of_files_give_the_same_rows(tmp_path):
    rows = [ROW | {"reward_model": {"style": "rule", "ground_truth": str(i)}} for i in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    entries = [jsonl(tmp_path / "a.jsonl", rows), str(tmp_path / "a.json"), str(tmp_path / "a.parquet")]
    loaded = load(entries)
    for source in loaded:
        assert [r.ground_truth for r in source.rows] == ["0", "1", "2"]
        assert [r.prompt for r in source.rows] == [ROW["prompt"]] * 3
        assert [r.index for r in source.rows] == [0, 1, 2]
        assert [r.data_source for r in source.rows] == ["openai/gsm8k"] * 3
    assert [r.file for s in loaded for r in s.rows[:1]] == entries


def test_the_forms_of_train_files(tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", [ROW]), jsonl(tmp_path / "b.jsonl", [ROW, ROW])
    assert [(s.name, s.weight, len(s.rows)) for s in load(a)] == [("a", None, 1)]
    assert [s.name for s in load([a, b])] == ["a", "b"]
    assert [s.name for s in load([a, a])] == ["a_0", "a_1"]
    mixed = load({"x": {"path": a, "weight": 3}, "y": {"path": b, "weight": 1}, "z": a})
    assert [(s.name, s.weight) for s in mixed] == [("x", 3.0), ("y", 1.0), ("z", None)]
    assert [s.weight for s in load([{"path": a, "weight": 2}])] == [2.0]
    assert len(load(b, num_rows=1)[0].rows) == 1


def test_rows_of_two_files_with_one_data_source_are_told_apart_by_their_entry(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [ROW, ROW])
    rows = [row for source in load({"easy": a, "hard": a}) for row in source.rows]
    assert len({(r.data_source, r.index) for r in rows}) == 2
    assert [(r.source, r.index) for r in rows] == [("easy", 0), ("easy", 1), ("hard", 0), ("hard", 1)]
    with pytest.raises(DataError, match="two entries are named 'a_0'"):
        load([a, a, {"path": a, "name": "a_0"}])


def test_weights_of_validation_files_are_refused_not_ignored(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [ROW])
    with pytest.raises(DataError, match=r"data\.val_files\.x: weight 3 would be ignored"):
        load_rows({"x": {"path": a, "weight": 3}, "y": a}, split="val")


@pytest.mark.cap("C40")
def test_the_data_sets_own_answer_is_not_part_of_the_prompt(tmp_path):
    few_shot = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    rows = [ROW | {"prompt": [*few_shot, {"role": "assistant", "content": "4"}]}, ROW | {"prompt": few_shot}]
    for row in load(jsonl(tmp_path / "a.jsonl", rows))[0].rows:
        assert row.prompt == few_shot


def test_a_text_prompt_is_a_user_message(tmp_path):
    rows = load(jsonl(tmp_path / "a.jsonl", [ROW | {"prompt": "hi"}]))[0].rows
    assert rows[0].prompt == [{"role": "user", "content": "hi"}]


def test_a_ground_truth_column_serves_too(tmp_path):
    row = {"data_source": "d", "prompt": "p", "ground_truth": None}
    assert load(jsonl(tmp_path / "a.jsonl", [row]))[0].rows[0].ground_truth is None


def test_what_parquet_fills_in_is_removed(tmp_path):
    create = {"create_kwargs": {"ground_truth": "1"}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    search = {"search": {"create_kwargs": {"topk": 3}}}
    rows = [
        ROW | {"extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"calculator": create}}},
        ROW | {"extra_info": {"tools_kwargs": search, "interaction_kwargs": {"name": "x"}}},
        ROW | {"prompt": [ROW["prompt"][1], call, {"role": "tool", "content": "2"}], "extra_info": {"split": "test"}},
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second, third = load(str(tmp_path / "a.parquet"))[0].rows
    assert first.tools_kwargs == {"calculator": create}
    assert (first.need_tools_kwargs, second.need_tools_kwargs) == (True, False)
    assert second.tools_kwargs == search
    assert second.interaction_kwargs == {"name": "x"}
    assert third.extra_info == {"split": "test"}
    assert third.prompt == [ROW["prompt"][1], call, {"role": "tool", "content": "2"}]


json_values = st.recursive(
    st.integers() | st.text(max_size=5) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
@settings(max_examples=50, deadline=None)
def test_a_value_without_nulls_is_left_alone(value):
    assert drop_nulls(value) == value


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), st.integers(-9, 9),
       min_size=1), min_size=1), min_size=1, max_size=4))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_structs_come_back_from_parquet_as_they_were_written(tmp_path_factory, structs):
    file = tmp_path_factory.mktemp("parquet") / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**ROW, "extra_info": s} for s in structs]), file)
    assert [r.extra_info for r in load(str(file))[0].rows] == structs


def test_a_generator_gets_number_seed_and_split(module):
    def rows(num_rows, seed, split):
        for i in range(num_rows + 5):
            yield ROW | {"prompt": f"{split} {seed} {i}"}

    module.rows = rows
    (source,) = load_rows("made_up_rows:rows", split="val", num_rows=3, seed=9)
    assert [r.prompt[0]["content"] for r in source.rows] == ["val 9 0", "val 9 1", "val 9 2"]
    with pytest.raises(DataError, match="val_max_samples"):
        load_rows("made_up_rows:rows", split="val", num_rows=-1)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ([{"data_source": "d", "promt": "x", "reward_model": {}}], ["row 1", "'prompt' is missing", "you mean 'promt'",
         "columns present: data_source, promt, reward_model"]),
        ([ROW, {k: v for k, v in ROW.items() if k != "data_source"}], ["row 2", "'data_source' is missing"]),
        ([{k: v for k, v in ROW.items() if k != "reward_model"}], ["row 1", "'reward_model' is missing",
         "without labels", "ground_truth that is null"]),
        ([ROW | {"reward_model": {"style": "rule"}}], ["row 1", "ground_truth"]),
        ([ROW, ROW | {"prompt": 5}], ["row 2, column prompt", "messages", "int 5"]),
        ([ROW | {"prompt": []}], ["row 1, column prompt", "no message"]),
        ([ROW | {"prompt": [{"role": "assistant", "content": "x"}]}], ["no message before the answer"]),
        ([ROW | {"prompt": [{"content": "x"}]}], ["message 1", "role"]),
        ([ROW | {"prompt": [{"role": "user", "content": 3}]}], ["message 1", "content must be text", "int 3"]),
        ([ROW | {"prompt": None}], ["'prompt' is null"]),
        ([ROW | {"extra_info": "x"}], ["extra_info must be a mapping"]),
        ([ROW | {"data_source": 3}], ["data_source", "int 3"]),
        ([[1]], ["row 1", "mapping"]),
        ([], ["no rows"]),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_file_row_and_column(tmp_path, content, parts):
    file = jsonl(tmp_path / "bad.jsonl", content)
    with pytest.raises(DataError) as caught:
        load(file)
    for part in (file, *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "row 2: not JSON"),
        ("a.jsonl", b"\xff\xfe\n", "row 1: not"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "line 2: not JSON: Extra data; one object per line is .jsonl"),
        ("a.json", b'{"a": 1}', "expected a list of rows, got dict"),
        ("a.parquet", b"PAR1 no", "not a readable parquet file"),
        ("a.parquet", b"", "not a readable parquet file"),
        ("a.jsonl", b"", "no rows"),
    ],
)
def test_a_file_of_the_wrong_schema_is_named(tmp_path, name, content, part):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(part)) as caught:
        load(str(tmp_path / name))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("absent.parquet", "data.train_files: no file 'absent.parquet'"),
        ("openai/gsm8k", "Hub names"),
        ("https://a/b.csv", "Hub names"),
        (None, "expected a path"),
        ([], "no entry"),
        ({}, "no entry"),
        ({"a": {"path": "x.jsonl", "wieght": 1}}, "did you mean 'weight'"),
        ({"a": {"weight": 1}}, "expected {path"),
        ({"a": {"path": "x.jsonl", "weight": 0}}, "above 0, got 0"),
        ({"a": {"path": "x.jsonl", "weight": True}}, "above 0, got True"),
        ([5], "got 5"),
    ],
)
def test_a_bad_entry_is_named_with_its_key(spec, part):
    with pytest.raises(DataError, match=re.escape(part)):
        load(spec)


def test_a_generator_that_fails_is_named(module):
    module.takes_nothing = list
    module.number = 3
    module.not_rows = lambda num_rows, seed, split: 5
    for name, part in (("takes_nothing", "raised TypeError"), ("number", "expected a function"), ("not_rows", "int")):
        with pytest.raises(DataError, match=part):
            load(f"made_up_rows:{name}", num_rows=2)
    with pytest.raises(PluginError, match="has no 'absent'"):
        load("made_up_rows:absent")


def test_gsm8k_rows_of_the_reference_data_need_preparation_and_say_so(shared_data):
    with pytest.raises(DataError, match="columns present: answer, question"):
        load(str(shared_data / "tasks" / "gsm8k_test.jsonl"), num_rows=5)


QUESTION = {"question": "Population?", "answer": {"ground_truth": ["14 million"]}, "metadata": {"tools": []}}


@pytest.mark.cap("C66")
def test_renamed_columns_are_read_and_rows_with_a_label_need_no_data_source(tmp_path):
    file = jsonl(tmp_path / "qa.jsonl", [QUESTION, QUESTION | {"metadata": None, "extra_info": {"k": 1}}])
    first, second = load(file, columns=Columns("question", "answer"))[0].rows
    assert first.prompt == [{"role": "user", "content": "Population?"}]
    assert (first.label, first.ground_truth) == ({"ground_truth": ["14 million"]}, ["14 million"])
    assert (first.metadata, second.metadata, first.data_source) == ({"tools": []}, {"k": 1}, "qa")
    plain = load(jsonl(tmp_path / "p.jsonl", [QUESTION | {"answer": "yes"}]), columns=Columns("question", "answer"))
    assert plain[0].rows[0].label == plain[0].rows[0].ground_truth == "yes"
    assert (
        load(jsonl(tmp_path / "v.jsonl", [ROW]))[0].rows[0].label
        == load(str(tmp_path / "v.jsonl"))[0].rows[0].ground_truth
    )


@pytest.mark.cap("C66")
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"answer": "x"}, "row 2: column 'question' is missing"),
        ({"question": "x", "anwser": "y"}, r"row 2: column 'answer' is missing; did you mean 'anwser'"),
        ({"question": "x", "answer": "y", "metadata": [1]}, "row 2: column metadata must be a mapping, got list"),
    ],
)
def test_a_missing_column_is_named_with_its_row(tmp_path, row, text):
    file = jsonl(tmp_path / "qa.jsonl", [QUESTION, row])
    with pytest.raises(DataError, match=text):
        load(file, columns=Columns("question", "answer"))


def test_a_system_message_stands_before_prompts_that_have_none(tmp_path):
    file = jsonl(
        tmp_path / "q.jsonl", [ROW, ROW | {"prompt": [{"role": "user", "content": "q"}]}, ROW | {"prompt": "q"}]
    )
    own, second, text = load(file, columns=Columns(system="be brief"))[0].rows
    assert own.prompt == ROW["prompt"]
    assert second.prompt == text.prompt == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]


def test_a_system_message_may_stand_in_a_text_file(tmp_path):
    (tmp_path / "system.txt").write_text("from a file\n")
    file = jsonl(tmp_path / "q.jsonl", [ROW | {"prompt": "q"}])
    columns = Columns(system=str(tmp_path / "system.txt"))
    assert load(file, columns=columns)[0].rows[0].prompt[0] == {"role": "system", "content": "from a file\n"}
    with pytest.raises(DataError, match=r"data\.system: .*missing\.txt cannot be read"):
        load(file, columns=Columns(system="missing.txt"))


def test_columns_are_read_by_other_names_everywhere(tmp_path):
    file = jsonl(tmp_path / "q.jsonl", [{"question": "q", "answer": "7", "solution": "old"}, {"question": "r"}])
    columns = Columns("prompt", renamed={"question": "prompt", "answer": "solution"})
    with pytest.raises(DataError, match="column 'data_source' is missing"):
        load(file, columns=columns)
    first = load(file, num_rows=1, columns=replace(columns, label="solution"))[0].rows[0]
    assert first.raw == {"prompt": "q", "solution": "7"} and first.ground_truth == "7"
    with pytest.raises(DataError, match=r"data\.columns renames anwser, which no row has. The first has answer"):
        load(file, columns=Columns(renamed={"anwser": "solution"}))


def test_a_row_without_the_old_column_keeps_what_it_has_under_the_new_name(tmp_path):
    rows = [ROW | {"question": "q", "prompt": "old"}, ROW | {"prompt": "own"}, ROW | {"question": None, "prompt": "x"}]
    found = load(jsonl(tmp_path / "q.jsonl", rows), columns=Columns(renamed={"question": "prompt"}))[0].rows
    assert [row.prompt[0]["content"] for row in found] == ["q", "own", "x"]
    assert all("question" not in row.raw for row in found)
    swapped = load(
        jsonl(tmp_path / "s.jsonl", [ROW | {"answer": "a", "prompt": "b"}]),
        columns=Columns(renamed={"answer": "prompt", "prompt": "answer"}),
    )[0].rows[0]
    assert swapped.prompt[0]["content"] == "a" and swapped.raw["answer"] == "b"


def test_two_columns_of_one_new_name_are_refused_by_name(tmp_path):
    file = jsonl(tmp_path / "q.jsonl", [ROW | {"question": "q", "query": "r"}])
    with pytest.raises(DataError, match=r"data\.columns renames query, question to one name, prompt"):
        load(file, columns=Columns(renamed={"query": "prompt", "question": "prompt"}))


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_system_message_without_text_is_refused(tmp_path, text):
    file = jsonl(tmp_path / "q.jsonl", [ROW | {"prompt": "q"}])
    with pytest.raises(DataError, match=r"data\.system: got .* no text. Give a text, or leave it out"):
        load(file, columns=Columns(system=text))
    (tmp_path / "system.txt").write_text(text)
    with pytest.raises(DataError, match=r"data\.system: .*system\.txt is empty"):
        load(file, columns=Columns(system=str(tmp_path / "system.txt")))


def test_a_prompt_that_begins_with_a_developers_message_gets_no_system_message(tmp_path):
    prompt = [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}]
    file = jsonl(tmp_path / "q.jsonl", [ROW | {"prompt": prompt}])
    assert load(file, columns=Columns(system="be brief"))[0].rows[0].prompt == prompt


def test_every_field_of_a_row_has_its_column(tmp_path):
    raw = ROW | {"metadata": {"m": 1}, "extra_info": {"k": 1}, "other": 5}
    file = jsonl(tmp_path / "a.jsonl", [raw])
    before = time.time()
    (source,) = load({"x": file})
    assert before <= source.read_at_s <= time.time()
    assert source.rows == [
        DataRow(ROW["prompt"], "openai/gsm8k", "7", {"k": 1}, raw, 0, file, "x", "7", {"m": 1}, problem=None)
    ]
    row = source.rows[0]
    assert row.place == f"{file}, row 1" and row.extra_info is not row.raw["extra_info"]
    assert row.metadata is not row.raw["metadata"]


def test_the_file_decides_positions_and_number_of_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(["", json.dumps(ROW), "  ", json.dumps(ROW), json.dumps(ROW)]))
    (tmp_path / "a.json").write_text(json.dumps([ROW] * 3))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 3), tmp_path / "a.parquet")
    for name, indices in (("a.jsonl", [1, 3, 4]), ("a.json", [0, 1, 2]), ("a.parquet", [0, 1, 2])):
        for num_rows, there in ((-1, 3), (2, 2), (1, 1), (9, 3)):
            assert [row.index for row in load(str(tmp_path / name), num_rows=num_rows)[0].rows] == indices[:there]
        with pytest.raises(DataError, match=f"data.train_files: .*{name} has no rows"):
            load(str(tmp_path / name), num_rows=0)


def test_what_a_row_does_not_say_about_tools_is_empty():
    extra = {
        "tools_kwargs": {"f": {}},
        "interaction_kwargs": {"name": "x"},
        "need_tools_kwargs": 1,
        "tool_selection": ["f"],
    }
    full, bare = DataRow([], "d", extra_info=extra), DataRow([], "d", extra_info={"tools_kwargs": None})
    assert (full.tools_kwargs, full.interaction_kwargs) == ({"f": {}}, {"name": "x"})
    assert full.need_tools_kwargs is True and full.tool_selection == ["f"]
    assert (bare.tools_kwargs, bare.interaction_kwargs, bare.need_tools_kwargs, bare.tool_selection) == (
        {},
        {},
        False,
        None,
    )


@pytest.mark.parametrize(
    ("spec", "entries"),
    [
        ("d/a.parquet", [Entry("a", "d/a.parquet")]),
        ("m:f", [Entry("m:f", "m:f")]),
        ({"path": "a.json", "weight": 1}, [Entry("a", "a.json", 1.0)]),
        (["a.json", {"path": "d/a.json", "weight": 0.5}, "b.json"],
         [Entry("a_0", "a.json"), Entry("a_1", "d/a.json", 0.5), Entry("b", "b.json")]),
        ({5: "a.json", "y": {"path": "b.json", "name": "z"}}, [Entry("5", "a.json"), Entry("z", "b.json")]),
        (("a.json", {"path": "a.json", "name": "b"}), [Entry("a", "a.json"), Entry("b", "a.json")]),
    ],
)  # fmt: skip
def test_entries_have_a_name_a_path_and_a_weight(spec, entries):
    assert entries_of(spec, "train") == entries


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"a": {"path": 5}}, "data.train_files.a: expected {path: ..., weight: ...}, got {'path': 5}"),
        ({"path": "a.json", "wait": 1}, "data.train_files: expected {path"),
        ({"a": {"path": "a.json", "weight": -1}}, "data.train_files.a: weight must be a number above 0, got -1"),
        ({"a": {"path": "a.json", "weight": float("nan")}}, "above 0, got nan"),
        ({"a": {"path": "a.json", "weight": "2"}}, "above 0, got '2'"),
        ({"a": " "}, "data.train_files.a: expected a path or package.module:function, got ' '"),
        ([""], "data.train_files: expected a path or package.module:function, got ''"),
        (["a.json", "b.json", {"path": "c.json", "name": "b"}, {"path": "d.json", "name": "b_1"}], "named 'b_1'"),
    ],
)
def test_a_wrong_entry_is_named_with_what_is_wrong(spec, said):
    with pytest.raises(DataError, match=re.escape(said)):
        entries_of(spec, "train")


def test_a_hint_stands_only_where_a_key_is_unknown():
    for spec in ({"a": {"path": 5}}, {"a": {"name": "x"}}):
        with pytest.raises(DataError) as caught:
            entries_of(spec, "train")
        assert "did you mean" not in str(caught.value)


def test_bad_rows_are_kept_where_they_are_wanted(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [ROW, [1], ROW | {"prompt": 5}])
    entry, reading = Entry("x", file), Reading("val", keeps_bad=True)
    good, no_row, bad = load_entry(entry, reading).rows
    assert good.problem is None and good.raw == ROW
    where = {"file": file, "source": "x"}
    assert no_row == DataRow(
        [], "", index=1, problem=f"{file}, row 2: expected a mapping column -> value, got list [1]", **where
    )
    assert bad.raw == ROW | {"prompt": 5} and "row 3, column prompt: expected messages" in bad.problem
    assert reading.key == "data.val_files"
    with pytest.raises(DataError, match="row 2: expected a mapping"):
        Reading("val").row_of([1], 1, entry)


def test_examined_rows_are_the_good_ones_and_a_line_for_each_bad_one(tmp_path):
    rows = [ROW | {"question": "q"}, [1], {"question": "r"}, ROW | {"question": "last"}]
    file = jsonl(tmp_path / "a.jsonl", rows)
    columns = Columns(renamed={"question": "prompt"}, system="be brief")
    raw, good, wrong = examine_rows(file, columns=columns)
    assert list(raw) == [0, 2, 3] and raw[0] == ROW | {"prompt": "q"} and raw[2] == {"prompt": "r"}
    assert [(row.index, row.prompt[0]["content"], row.prompt[1]["content"]) for row in good] == [
        (0, "be brief", "q"), (3, "be brief", "last"),
    ]  # fmt: skip
    assert [line.partition(":")[0] for line in wrong] == [f"{file}, row 2", f"{file}, row 3"]
    assert [row.index for row in examine_rows(file, num_rows=1)[1]] == [0]
    with pytest.raises(DataError, match="no row has"):
        examine_rows(file, columns=Columns(renamed={"absent": "prompt"}))
    with pytest.raises(DataError, match=r"none\.jsonl has no rows"):
        examine_rows(jsonl(tmp_path / "none.jsonl", []))


def test_a_file_of_any_schema_is_read_as_it_is(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [{"x": 1}, {"y": None}])
    assert read_rows(file, "K") == {0: {"x": 1}, 1: {"y": None}}
    with pytest.raises(DataError, match=r"K: no file 'absent\.json'"):
        read_rows("absent.json", "K")


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ({"a": None}, None), ({}, {}), ({"a": {}}, {"a": {}}), ({"a": {"b": None}}, None), ([], []), (None, None),
        ([None, {"a": None}, 1], [None, None, 1]), ({"a": [{"b": None, "c": 0}]}, {"a": [{"c": 0}]}), (0, 0),
    ],
)  # fmt: skip
def test_nulls_are_removed_from_mappings_and_stay_in_lists(value, left):
    assert drop_nulls(value) == left


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": ]', "a.jsonl, row 4: not JSON: Expecting value at column 7"),
        (b"\xff", "a.jsonl, row 4: not UTF-8: "),
        (b"[" * 100_000, "a.jsonl, row 4: lists or objects are nested too deep to be read"),
        (b'{"x": ' + b"1" * 6000 + b"}", "a.jsonl, row 4: an integer of more than 4300 digits. Write it as a text"),
    ],
)
def test_a_line_that_is_no_json_is_an_error_of_its_row(tmp_path, line, said):
    assert read_line(b'{"a": 1}', tmp_path / "a.jsonl", 3) == {"a": 1}
    found = read_line(line, tmp_path / "a.jsonl", 3)
    assert isinstance(found, DataError) and said in str(found)


def test_a_json_file_that_cannot_be_read_is_named(tmp_path):
    for content, said in (
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b"1" * 6000, "4300 digits"),
        (b"[1,]", "line 1: not JSON"),
    ):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(DataError, match=said) as caught:
            load(str(tmp_path / "a.json"))
        assert "one object per line" not in str(caught.value)


def test_a_generators_own_errors_pass_and_all_others_are_told_with_the_call(module):
    def raises(error):
        def rows(num_rows, seed, split):
            raise error

        return rows

    module.refuses, module.stops = raises(DataError("mine")), raises(KeyboardInterrupt())
    module.exits, module.lists = raises(SystemExit(3)), lambda num_rows, seed, split: (ROW, ROW, ROW)
    with pytest.raises(DataError, match=r"^mine$"):
        load("made_up_rows:refuses")
    with pytest.raises(KeyboardInterrupt):
        load("made_up_rows:stops")
    with pytest.raises(DataError, match=r"made_up_rows:exits\(num_rows=2, seed=4, split='train'\) raised SystemExit"):
        load("made_up_rows:exits", num_rows=2, seed=4)
    assert [len(load("made_up_rows:lists", num_rows=n)[0].rows) for n in (-1, 1, 2, 5)] == [3, 1, 2, 3]
    with pytest.raises(DataError, match="has no rows"):
        load("made_up_rows:lists", num_rows=0)
    module.endless = lambda num_rows, seed, split: iter([ROW])
    with pytest.raises(DataError, match=r"Say how many: data\.train_max_samples \(it is -1\)"):
        load("made_up_rows:endless")
    assert len(load("made_up_rows:endless", num_rows=2)[0].rows) == 1


@pytest.mark.parametrize("value", [7, 2.5, True])
def test_a_number_is_a_prompt_only_for_a_function_that_reads_it_itself(tmp_path, value):
    file = jsonl(tmp_path / "a.jsonl", [ROW | {"prompt": value}])
    (row,) = load(file, columns=Columns(as_it_is=True))[0].rows
    assert row.prompt == [{"role": "user", "content": str(value)}]
    with pytest.raises(DataError, match="expected messages"):
        load(file)
    with pytest.raises(DataError, match="expected messages"):
        load(jsonl(tmp_path / "b.jsonl", [ROW | {"prompt": {}}]), columns=Columns(as_it_is=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"audios": ["a", "b"]}, "column audios holds 2 items. Audio is not offered"),
        ({"data_source": None}, "column 'data_source' is null"),
        ({"reward_model": None}, "column 'reward_model' is null"),
        ({"reward_model": ["ground_truth"]}, "column reward_model must be a mapping with ground_truth"),
        ({"prompt": [{"role": 5, "content": "x"}]}, "message 1: expected {role"),
        ({"prompt": [{"role": "user"}]}, "message 1: content must be text"),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "tool", "content": None}]},
            "message 2: content must be",
        ),
        ({"prompt": [{"role": "user", "content": None, "tool_calls": []}]}, "message 1: content must be"),
        ({"prompt": [{"role": "assistant", "content": "", "tool_calls": '[{"id": 1}]'}]}, "tool_calls must be a list"),
        ({"prompt": [{"role": "assistant", "content": "", "tool_calls": ["f"]}]}, "tool_calls must be a list of calls"),
    ],
)
def test_a_wrong_value_is_named_by_its_column(tmp_path, changes, said):
    with pytest.raises(DataError, match=r"a\.jsonl, row 1") as caught:
        load(jsonl(tmp_path / "a.jsonl", [ROW | changes]))
    assert said in str(caught.value)


ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ASKED),
        json.dumps([{"content": "Be brief.", "role": "system"}, *ASKED], indent=2) + "\n",
        json.dumps(ASKED[0]),
        json.dumps({"messages": ASKED}),
        str(ASKED),
        f"array([{ASKED[0]}], dtype=object)",
    ],
    ids=["json", "indented", "one", "mapping", "python", "numpy"],
)
def test_messages_written_as_text_are_no_prompt(tmp_path, text):
    """A column that went through CSV or a data frame."""
    file = jsonl(tmp_path / "a.jsonl", [ROW, ROW | {"prompt": text}])
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: column prompt holds messages written as text, ") as caught:
        load(file)
    assert "json.loads" in str(caught.value)
    _, rows, problems = examine_rows(file)
    assert len(rows) == 1 and problems == [str(caught.value)]
    assert load(file, columns=Columns(as_it_is=True))[0].rows[1].prompt[0]["content"] == text


@pytest.mark.parametrize("text", [" " * 20_000 + "x", "{" + " " * 20_000, '[{"role": ' + '"role"' * 10_000])
def test_a_long_prompt_is_looked_at_in_a_moment(tmp_path, text):
    began = time.process_time()
    (row,) = load(jsonl(tmp_path / "a.jsonl", [ROW | {"prompt": text}]))[0].rows
    assert row.prompt == [{"role": "user", "content": text}]
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "pens"}]',
        f"What is wrong with {json.dumps(ASKED)}?",
        json.dumps(ASKED) + " Answer it.",
        "[1, 2]",
        "{}",
    ],
)
def test_a_question_may_hold_json(tmp_path, text):
    (row,) = load(jsonl(tmp_path / "a.jsonl", [ROW | {"prompt": text}]))[0].rows
    assert row.prompt == [{"role": "user", "content": text}]


def test_where_nothing_is_wrong_a_column_may_be_empty(tmp_path):
    prompt = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]
    raw = ROW | {"audios": [], "extra_info": None, "metadata": None, "prompt": prompt}
    (row,) = load(jsonl(tmp_path / "a.jsonl", [raw]))[0].rows
    assert (row.extra_info, row.metadata) == ({}, {}) and row.prompt == [
        {"role": "user", "content": prompt[0]["content"]}
    ]
    (row,) = load(jsonl(tmp_path / "b.jsonl", [ROW | {"ground_truth": "8"}]))[0].rows
    assert row.ground_truth == "7", "reward_model comes first"
    (row,) = load(jsonl(tmp_path / "c.jsonl", [ROW | {"metadata": {}}]))[0].rows
    assert row.metadata == {} and row.extra_info == {"index": 0}
    (row,) = load(jsonl(tmp_path / "d.jsonl", [ROW | {"label": 5}]), columns=Columns(label="label"))[0].rows
    assert (row.label, row.ground_truth, row.data_source) == (5, 5, "openai/gsm8k")
    (row,) = load(jsonl(tmp_path / "e.jsonl", [ROW | {"label": {"x": 1}}]), columns=Columns(label="label"))[0].rows
    assert row.label == row.ground_truth == {"x": 1}


@pytest.mark.parametrize(("length", "shown"), [(118, 120), (119, 120), (500, 120)])
def test_a_long_value_is_cut_in_an_error(tmp_path, length, shown):
    with pytest.raises(DataError) as caught:
        load(jsonl(tmp_path / "a.jsonl", [ROW | {"extra_info": "x" * length}]))
    text = str(caught.value).partition("got str ")[2]
    assert len(text) == shown and text == (repr("x" * length) if length == 118 else "'" + "x" * 116 + "...")


def test_columns_to_rename_are_checked_only_where_there_are_rows():
    names = {"a": "b", "c": "d"}
    check_renamed([], names, "f")
    check_renamed([{"z": 1}], {}, "f")
    check_renamed([{"a": 1}, {"c": 1}], names, "f")
    with pytest.raises(DataError, match=r"f: data\.columns renames c, which no row has. The first has a"):
        check_renamed([{"a": 1}], names, "f")
    with pytest.raises(DataError, match="renames a, c to one name, b"):
        check_renamed([{"a": 1, "c": 1}], {"a": "b", "c": "b", "e": "f"}, "f")


def test_a_system_message_stands_before_an_empty_prompt_too():
    system = {"role": "system", "content": "s"}
    assert begun_by_system([], "s") == [system] and begun_by_system([], None) == []
    other = [{"role": "user", "content": "q"}, system]
    assert begun_by_system(other, "s") == [system, *other] and begun_by_system(other, None) is other
