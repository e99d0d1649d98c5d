"""Rows of large files are read when they are drawn, and are the rows that loading the file gives."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.data import large_files, sampler
from verl_mt.data.dataset import Columns, DataRow, DataSource, Reading, load_rows
from verl_mt.data.fingerprint import difference, fingerprint
from verl_mt.data.large_files import LargeRows, open_rows, rows_in_files
from verl_mt.data.sampler import DifficultySampler, PositionSampler, ShuffledSampler, WeightedSampler, permuted
from verl_mt.errors import DataError

TRAIN = Reading("train")


def rows(n, start=0):
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {k}?"}],
            "data_source": "t",
            "reward_model": {"ground_truth": str(k)},
            "extra_info": {"level": k % 3, "odd": {"k": k} if k % 2 else None},
        }
        for k in range(start, start + n)
    ]


def write(file, content, group=7):
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), file, row_group_size=group)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(file)


def opened(spec, reading=TRAIN) -> list[DataSource]:
    return open_rows(spec, reading, 0)


kinds = pytest.mark.parametrize("kind", ["parquet", "jsonl"])


@kinds
def test_they_are_the_rows_that_loading_gives_in_any_order_of_asking(tmp_path, kind):
    path = write(tmp_path / f"a.{kind}", rows(40))
    columns = Columns(system="be brief", renamed={"data_source": "data_source"})
    (loaded,) = load_rows(path, split="train", columns=columns, num_rows=33)
    (large,) = opened(path, replace(TRAIN, columns=columns, num_rows=33))
    assert isinstance(large.rows, LargeRows) and isinstance(loaded.rows, list)
    assert (large.name, large.weight, len(large.rows)) == (loaded.name, loaded.weight, 33)
    assert list(large.rows) == loaded.rows and large.rows[3:9] == loaded.rows[3:9]
    order = [32, 0, 8, 8, 31, 7, -1]
    assert large.rows.take([k % 33 for k in order]) == [loaded.rows[k] for k in order]
    assert large.rows[-1] == loaded.rows[-1]
    with pytest.raises(IndexError):
        large.rows[33]


def test_up_to_eager_rows_of_all_files_together_everything_is_loaded(tmp_path):
    spec = [write(tmp_path / "a.parquet", rows(5)), write(tmp_path / "b.jsonl", rows(4))]
    assert [type(s.rows) for s in open_rows(spec, TRAIN, 9)] == [list, list]
    assert [type(s.rows) for s in open_rows(spec, TRAIN, 8)] == [LargeRows, LargeRows]
    assert [type(s.rows) for s in open_rows(spec, replace(TRAIN, num_rows=4), 8)] == [list, list]
    made = open_rows([*spec, "verl_mt.tiny.problems:rows"], replace(TRAIN, num_rows=5), 8)
    assert [type(s.rows) for s in made] == [LargeRows, LargeRows, list]


def test_files_are_not_counted_further_than_needed_and_a_broken_one_is_left_to_its_reader(tmp_path):
    entries = large_files.entries_of([write(tmp_path / "a.jsonl", rows(50)), write(tmp_path / "b.jsonl", [])], "train")
    assert rows_in_files(entries, -1, 10) == 11 and rows_in_files(entries, 3, 10) == 3
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    for name, said in (("c.parquet", "not a readable parquet file"), ("d.jsonl", "data.train_files: no file")):
        with pytest.raises(DataError, match=said):
            opened(str(tmp_path / name))


@given(
    lines=st.lists(st.sampled_from(['{"a": 1}', '  {"b": 2}', "", "   ", "\t\r", '{"c": "\\n"}\r']), max_size=30),
    ends=st.booleans(),
    part=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_lines_are_found_as_reading_finds_them_wherever_a_part_ends(tmp_path_factory, lines, ends, part):
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_bytes(("\n".join(lines) + ("\n" if ends else "")).encode())
    expected = [json.loads(line) for line in file.read_bytes().split(b"\n") if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_files, "_SCANNED_BYTES", part)
        found = large_files.JsonLinesRows(file, -1)
        assert found.take(range(found.num_rows)) == expected
        placed = [k for k, line in enumerate(file.read_bytes().split(b"\n")) if line.strip()]
        assert [found.position_of(k) for k in range(found.num_rows)] == placed
        assert large_files.JsonLinesRows(file, 3).num_rows == min(3, len(expected))


BROKEN = [(3, "column prompt: expected messages"), (5, "'reward_model' is missing")]


def broken(kind):
    content = rows(8)
    if kind == "jsonl":
        content[3]["prompt"] = 5
        del content[5]["reward_model"]
        return content
    content = [{**row, "prompt": "q"} for row in content]
    content[3]["prompt"] = content[5]["reward_model"] = None
    return content


@kinds
def test_a_bad_row_is_named_when_it_is_read_and_no_earlier(tmp_path, kind):
    path = write(tmp_path / f"a.{kind}", broken(kind))
    (source,) = opened(path)
    assert [row.index for row in source.rows[:3]] == [0, 1, 2]
    for index in (3, 5):
        with pytest.raises(DataError, match=rf"a\.{kind}, row {index + 1}[,:]"):
            source.rows[index]
    assert [row.problem is not None for row in source.rows.take([2, 3, 4, 5])] == [False, True, False, True]
    assert [row.index for row in ShuffledSampler([source], shuffle=False).next_batch(8)] == list(range(8))
    (kept,) = opened(path, replace(TRAIN, keeps_bad=True))
    assert [(row.index, row.problem is not None) for row in kept.rows] == [(k, k in (3, 5)) for k in range(8)]
    assert [row.file for row in kept.rows] == [path] * 8


def test_a_line_that_is_no_json_is_a_bad_row_with_its_line_also_where_all_are_loaded(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in rows(4)]
    file.write_text("\n".join([lines[0], "", '{"prompt": ', "[1]", lines[3]]))
    (large,) = opened(str(file), replace(TRAIN, keeps_bad=True))
    loaded = large_files.load_entry(large_files.entries_of(str(file), "train")[0], replace(TRAIN, keeps_bad=True))
    assert list(large.rows) == loaded.rows
    problems = [row.problem for row in loaded.rows]
    assert problems[0] is problems[3] is None and "a.jsonl, row 3: not JSON" in problems[1]
    assert "a.jsonl, row 4: expected a mapping column -> value, got list" in problems[2]
    with pytest.raises(DataError, match="row 3: not JSON"):
        opened(str(file))[0].rows[1]


@kinds
def test_a_file_that_is_written_to_while_it_is_read_is_one_clear_error(tmp_path, kind):
    path = write(tmp_path / f"a.{kind}", rows(8))
    (source,) = opened(path)
    os.replace(write(tmp_path / f"other.{kind}", rows(3)), tmp_path / f"a.{kind}")
    assert source.rows[7].ground_truth == "7", "the file that was opened is still there, under no name"
    (source,) = opened(path)
    with open(path, "ab") as file:
        file.write(b" ")
    with pytest.raises(DataError, match=rf"a\.{kind} was changed while the run reads it.*Write new rows to a new file"):
        source.rows[0]


def test_columns_that_are_renamed_must_be_there(tmp_path):
    path = write(tmp_path / "a.parquet", rows(8))
    with pytest.raises(DataError, match=r"a\.parquet, first 1000 rows: data\.columns renames absent, which no row has"):
        opened(path, replace(TRAIN, columns=Columns(renamed={"absent": "prompt"})))


class TestFingerprint:
    @kinds
    def test_the_same_file_is_the_same_and_another_is_said(self, tmp_path, kind):
        path = write(tmp_path / f"a.{kind}", rows(40))
        one = fingerprint(opened(path))
        assert difference("K", one, fingerprint(opened(path))) is None
        write(tmp_path / f"a.{kind}", rows(41))
        assert "41 rows, then 40) has" in difference("K", one, fingerprint(opened(path)))

    @kinds
    def test_an_edit_that_keeps_the_size_is_found_with_its_place(self, tmp_path, kind):
        content = rows(4000)
        path = write(tmp_path / f"a.{kind}", content)
        one = fingerprint(opened(path))
        raw = bytearray((tmp_path / f"a.{kind}").read_bytes())
        raw[len(raw) // 2] ^= 1
        (tmp_path / f"a.{kind}").write_bytes(raw)
        said = difference("K", one, fingerprint(opened(path)))
        assert "has as many bytes, but others: the first difference that was found is about" in said

    def test_fewer_rows_of_it_are_other_rows(self, tmp_path):
        path = write(tmp_path / "a.jsonl", rows(40))
        fewer = fingerprint(opened(path, replace(TRAIN, num_rows=30)))
        assert "30 rows, then 40" in difference("K", fingerprint(opened(path)), fewer)

    def test_loaded_then_and_not_loaded_now_is_said(self, tmp_path):
        path = write(tmp_path / "a.jsonl", rows(40))
        said = difference("K", fingerprint(load_rows(path, split="train")), fingerprint(opened(path)))
        assert "was loaded then, and is not loaded now: set data.eager_rows" in said


def made(cls, sources):
    if cls is DifficultySampler:
        schedule = [{"rows": 0, "max": 0}, {"rows": 10, "max": 1}, {"rows": 25, "max": None}]
        return cls(sources, key="level", schedule=schedule, seed=3)
    return cls(sources, seed=3)


@pytest.mark.parametrize("ahead", [0, 17])
@pytest.mark.parametrize("cls", [ShuffledSampler, WeightedSampler, DifficultySampler])
def test_every_sampler_draws_the_rows_that_it_would_draw_of_lists(tmp_path, monkeypatch, cls, ahead):
    monkeypatch.setattr(large_files, "_LOOK_AHEAD", 17)
    monkeypatch.setattr(large_files, "_LARGE_GROUP", 0 if ahead else 10**6)
    spec = {
        "x": {"path": write(tmp_path / "a.parquet", rows(20)), "weight": 2},
        "y": {"path": write(tmp_path / "b.jsonl", rows(11, 20)), "weight": 1},
    }
    of_lists, large = made(cls, load_rows(spec, split="train")), made(cls, opened(spec))
    for n in (5, 30, 1, 8, 40):
        assert large.next_batch(n) == of_lists.next_batch(n)
    assert large.state_dict() == of_lists.state_dict()
    resumed = made(cls, opened(spec))
    resumed.load_state_dict(large.state_dict())
    again = made(cls, load_rows(spec, split="train"))
    again.load_state_dict(resumed.state_dict())
    assert resumed.next_batch(20) == again.next_batch(20)


class Backwards(PositionSampler):
    def row_at(self, position):
        return self.sources[0].rows[-1 - position % self.num_rows]


def test_a_sampler_of_ones_own_needs_only_row_at(tmp_path):
    path = write(tmp_path / "a.parquet", rows(20))
    assert [row.index for row in Backwards(opened(path)).next_batch(22)] == [*range(19, -1, -1), 19, 18]


@pytest.mark.slow
def test_a_group_of_rows_is_decoded_once_for_all_that_are_drawn_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(large_files, "_LARGE_GROUP", 10)
    (source,) = opened(write(tmp_path / "a.parquet", rows(100), group=50))
    decoded = []
    read = source.rows._raw._file.read_row_group
    monkeypatch.setattr(
        source.rows._raw, "_file", type("F", (), {"read_row_group": lambda _, k: decoded.append(k) or read(k)})()
    )
    drawn = ShuffledSampler([source])
    for _ in range(25):
        drawn.next_batch(4)
    assert decoded == [0, 1]


@given(size=st.integers(1, 300), key=st.text(max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_computed_order_has_every_number_once(size, key):
    assert sorted(permuted(key, size, k) for k in range(size)) == list(range(size))


def test_computed_orders_of_keys_are_their_own_and_look_like_chance():
    size = 10_007
    one, two = ([permuted(key, size, k) for k in range(size)] for key in "ab")
    assert one != two and one[:4] == [permuted("a", size, k) for k in range(4)]
    # Of two independent orders one number in `size` lies at the same place in both: Poisson with mean 1.
    assert sum(a == b for a, b in zip(one, two)) < 8
    steps = Counter(a < b for a, b in pairwise(one))
    assert abs(steps[True] - size / 2) < 5 * np.sqrt(size / 12)  # five standard errors of ascents
    assert abs(np.corrcoef(np.arange(size), one)[0, 1]) < 5 / np.sqrt(size)


def test_above_a_million_rows_the_order_is_computed_and_below_it_is_the_list_that_it_ever_was(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", rows(30))
    monkeypatch.setattr(sampler, "_LISTED", 29)
    large, of_list = ShuffledSampler(opened(path)), ShuffledSampler(load_rows(path, split="train"))
    first, second = ([row.index for row in large.next_batch(30)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(30)) and first != second and not large._orders
    assert first == [permuted("0/all/0", 30, k) for k in range(30)]
    monkeypatch.setattr(sampler, "_LISTED", 30)
    assert ShuffledSampler(opened(path)).next_batch(60) == of_list.next_batch(60)


def test_weights_count_the_same_in_one_go_and_draw_by_draw(monkeypatch):
    sources = [
        DataSource(f"s{k}", [DataRow([], f"s{k}", index=i) for i in range(5)], weight)
        for k, weight in enumerate((0.3, 1.7, 2.9))
    ]
    drawn = WeightedSampler(sources, seed=5)
    expected = [(row.source, row.data_source, row.index) for row in drawn.next_batch(3000)]
    monkeypatch.setattr(sampler, "_COUNTED_AT_ONCE", 700)
    resumed = WeightedSampler(sources, seed=5)
    resumed.position = 2900
    assert [(row.source, row.data_source, row.index) for row in resumed.next_batch(100)] == expected[2900:]


def test_a_large_file_is_known_by_samples_of_its_bytes_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(large_files, "_SAMPLES", 4)
    monkeypatch.setattr(large_files, "_SAMPLE_BYTES", 10)
    path = write(tmp_path / "a.jsonl", rows(3))
    (source,) = opened(path)
    content = (tmp_path / "a.jsonl").read_bytes()
    for end in (0, 7, len(content) + 5):
        source.rows._raw.end_bytes = end
        step = (len(content) - 10) // 3
        samples = [hashlib.sha256(content[k : k + 10]).digest() for k in range(0, len(content), step)]
        last = content[max(0, len(content) - end) :] if end else b""
        whole = hashlib.sha256(f"{len(content)} 3 ".encode() + b"".join(samples) + hashlib.sha256(last).digest())
        assert source.rows.known_by() == (len(content), whole.hexdigest(), "".join(s.hex()[:16] for s in samples))
    monkeypatch.setattr(large_files, "_SAMPLE_BYTES", len(content) // 2 + 1)
    assert len(source.rows.known_by()[2]) == 2 * 16, "samples do not overlap"


def test_a_parquet_file_says_its_groups_and_the_length_of_its_end(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", rows(20))
    raw = large_files.ParquetRows(tmp_path / "a.parquet", -1)
    content = (tmp_path / "a.parquet").read_bytes()
    assert raw.end_bytes == int.from_bytes(content[-8:-4], "little") + 8
    assert (raw.num_rows, raw.largest_group, raw.look_ahead, raw.position_of(5)) == (20, 7, 0, 5)
    for large, ahead in ((7, 0), (6, 8192)):
        monkeypatch.setattr(large_files, "_LARGE_GROUP", large)
        assert large_files.ParquetRows(tmp_path / "a.parquet", -1).look_ahead == ahead
        assert opened(path)[0].rows.look_ahead == ahead
    assert large_files.JsonLinesRows.look_ahead == large_files.JsonLinesRows.end_bytes == 0
    pyarrow.parquet.write_table(pyarrow.table({"x": []}), tmp_path / "none.parquet")
    assert large_files.ParquetRows(tmp_path / "none.parquet", -1).largest_group == 0


def test_a_damaged_row_group_is_named_by_its_rows(tmp_path):
    (source,) = opened(write(tmp_path / "a.parquet", rows(20)))

    def refuse(group):
        raise OSError("torn")

    source.rows._raw._file = type("File", (), {"read_row_group": staticmethod(refuse)})
    for index, said in ((0, "rows 1 to 7"), (6, "rows 1 to 7"), (7, "rows 8 to 14"), (19, "rows 15 to 20")):
        with pytest.raises(DataError, match=rf"a\.parquet, {said}: this row group cannot be read: torn"):
            source.rows.take([index])


@pytest.mark.parametrize(
    ("num_rows", "enough", "counted"),
    [
        (-1, 99, 9),
        (-1, 9, 9),
        (-1, 8, 9),
        (-1, 5, 6),
        (-1, 4, 5),
        (-1, 0, 1),
        (3, 99, 6),
        (3, 2, 3),
        (4, 4, 5),
        (0, 5, 0),
    ],
)
def test_rows_of_all_files_are_counted_up_to_one_more_than_enough(tmp_path, num_rows, enough, counted):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "c.json").write_text("[1, 2]")
    paths = [tmp_path / "bad.parquet", tmp_path / "c.json", tmp_path / "absent.jsonl", "made:rows"]
    paths += [write(tmp_path / "a.parquet", rows(5)), write(tmp_path / "b.jsonl", rows(4))]
    entries = large_files.entries_of([str(path) for path in paths], "train")
    assert rows_in_files(entries, num_rows, enough) == counted


def test_files_behind_what_is_enough_are_not_opened(tmp_path, monkeypatch):
    entries = large_files.entries_of([write(tmp_path / f"{name}.jsonl", rows(4)) for name in "abc"], "train")
    asked, formats = [], dict(large_files._FORMATS)
    monkeypatch.setitem(
        large_files._FORMATS,
        ".jsonl",
        lambda file, wanted: asked.append((file.name, wanted)) or formats[".jsonl"](file, wanted),
    )
    assert rows_in_files(entries, -1, 5) == 6 and asked == [("a.jsonl", 6), ("b.jsonl", 2)]
    asked.clear()
    assert rows_in_files(entries, 3, 6) == 7 and asked == [("a.jsonl", 3), ("b.jsonl", 3), ("c.jsonl", 1)]


@pytest.mark.parametrize(("num_rows", "there"), [(-1, 8), (5, 5), (8, 8), (99, 8)])
@kinds
def test_a_large_file_has_as_many_rows_as_are_taken_of_it(tmp_path, kind, num_rows, there):
    path = write(tmp_path / f"a.{kind}", rows(8))
    (source,) = opened(path, replace(TRAIN, num_rows=num_rows))
    assert (len(source.rows), len(list(source.rows)), source.rows[-1].index) == (there, there, there - 1)
    assert [row.index for row in source.rows[:99]] == list(range(there)) and source.rows.file == path


def test_of_a_large_file_no_rows_may_be_taken(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(8))
    entry, raw = large_files.Entry("a", path), large_files.JsonLinesRows(tmp_path / "a.jsonl", -1)
    assert [len(LargeRows(entry, replace(TRAIN, num_rows=n), raw)) for n in (0, 1, 8, 9, -1)] == [0, 1, 8, 8, 8]


@kinds
def test_a_large_file_without_rows_is_refused(tmp_path, kind):
    empty, full = write(tmp_path / f"a.{kind}", []), write(tmp_path / f"b.{kind}", rows(2))
    for path, reading in ((empty, TRAIN), (full, replace(TRAIN, num_rows=0))):
        with pytest.raises(DataError, match="has no rows"):
            large_files.open_rows(path, reading, -1)


def test_rows_of_a_large_file_are_read_many_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(large_files, "_LOOK_AHEAD", 3)
    (source,) = opened(write(tmp_path / "a.jsonl", rows(8)))
    taken, take = [], source.rows.take
    source.rows.take = lambda indices: taken.append(list(indices)) or take(indices)
    assert [row.index for row in source.rows] == list(range(8)) and taken == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_names_are_looked_for_in_the_first_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(large_files, "_SAMPLE_OF_NAMES", 2)
    content = rows(3)
    content[0]["question"], content[2]["late"] = "q", "x"
    path = write(tmp_path / "a.jsonl", content)
    opened(path, replace(TRAIN, columns=Columns(renamed={"question": "prompt"})))
    with pytest.raises(DataError, match=r"a\.jsonl, first 2 rows: data\.columns renames late, which no row has"):
        opened(path, replace(TRAIN, columns=Columns(renamed={"late": "prompt"})))
    (tmp_path / "b.jsonl").write_text("[1]\n" + json.dumps(content[0]) + "\n")
    opened(str(tmp_path / "b.jsonl"), replace(TRAIN, columns=Columns(renamed={"question": "prompt"}), keeps_bad=True))


class Ahead(LargeRows):
    """Six rows, which keep what was asked for."""

    look_ahead = 0

    def __init__(self, ahead):
        self.look_ahead, self.taken = ahead, []

    def __len__(self):
        return 6

    def take(self, indices):
        self.taken.append(list(indices))
        return [DataRow([], "large", index=k) for k in indices]


def test_the_file_that_wants_the_most_ahead_decides():
    one, two = Ahead(0), Ahead(5)
    ShuffledSampler([DataSource("x", one), DataSource("y", two)], shuffle=False).next_batch(2)
    assert (one.taken, two.taken) == ([[0, 1, 2, 3, 4]], [[]])


@pytest.mark.parametrize("ahead", [0, 2, 5, 100])
def test_rows_that_were_read_ahead_are_read_once(ahead):
    """Of two sources, one in memory; draws of 3."""
    large = Ahead(ahead)
    sources = [DataSource("l", large), DataSource("m", [DataRow([], "m", index=k) for k in range(2)])]
    drawn = ShuffledSampler(sources, shuffle=False)
    found = [(row.data_source, row.index) for _ in range(4) for row in drawn.next_batch(3)]
    every = [("large", k) for k in range(6)] + [("m", k) for k in range(2)]
    assert found == [*every, *every[:4]] and drawn.position == 12
    expected = {
        0: [[0, 1, 2], [3, 4, 5], [0], [1, 2, 3]], 2: [[0, 1, 2], [3, 4, 5], [0], [1, 2, 3]],
        5: [[0, 1, 2, 3, 4], [5, 0, 1], [2, 3, 4, 5]],
    }  # fmt: skip
    if ahead < 100:
        assert large.taken == expected[ahead]
    else:
        assert large.taken == [[k % 8 for k in range(100) if k % 8 < 6]] and len(drawn._ahead) == 88
