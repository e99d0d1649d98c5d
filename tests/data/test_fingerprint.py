"""Rows are known again by what they hold, whatever file they come from."""

from __future__ import annotations

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from verl_mt.data import fingerprint as module
from verl_mt.data.dataset import Columns, DataRow, load_rows, read_rows
from verl_mt.data.fingerprint import difference, fingerprint


def rows(n, start=0):
    return [
        {"prompt": f"What is {k}?", "data_source": "t", "ground_truth": str(k), "extra_info": {"k": k}}
        for k in range(start, start + n)
    ]


def write(file, content):
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(file)


def of(path, split="train", **keys):
    return fingerprint(load_rows(path, split=split, **keys))


def changed(tmp_path, content):
    """What is said where 16 rows were, and `content` is now."""
    before = of(write(tmp_path / "data.jsonl", rows(16)))
    return difference("data.train_files", before, of(write(tmp_path / "data.jsonl", content)))


def test_the_same_rows_are_the_same(tmp_path):
    assert changed(tmp_path, rows(16)) is None


def test_the_same_rows_in_a_file_of_another_kind_are_the_same(tmp_path):
    one = of(write(tmp_path / "data.jsonl", rows(16)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(16)), tmp_path / "data.parquet")
    assert difference("data.train_files", one, of(str(tmp_path / "data.parquet"))) is None


def test_the_first_row_that_differs_is_named(tmp_path):
    content = rows(16)
    content[11]["ground_truth"] = "another"
    said = changed(tmp_path, content)
    assert said.startswith("data.train_files: data (") and "data.jsonl, 16 rows)" in said
    assert said.endswith("row 12 is the first that differs")


def test_rows_in_another_order_are_other_rows(tmp_path):
    content = rows(16)
    content[3], content[4] = content[4], content[3]
    assert "row 4 is the first that differs" in changed(tmp_path, content)


@pytest.mark.parametrize(("count", "same"), [(20, 16), (9, 9)])
def test_more_rows_or_fewer_are_said_with_what_is_the_same(tmp_path, count, same):
    assert f"{count} rows, then 16): the first {same} are the same" in changed(tmp_path, rows(count))


@pytest.mark.slow
def test_of_many_rows_the_block_is_named(tmp_path):
    one = of(write(tmp_path / "data.jsonl", rows(9000)))
    content = rows(9000)
    content[4711]["prompt"] = "another"
    said = difference("data.train_files", one, of(write(tmp_path / "data.jsonl", content)))
    assert "the first difference is in rows 4711 to 4713" in said


def test_other_entries_are_named(tmp_path):
    one, two = (write(tmp_path / f"{name}.jsonl", rows(4)) for name in ("a", "b"))
    assert f"had the entries a ({one}), now it has a ({one}), b ({two})" in difference("K", of(one), of([one, two]))


def test_a_file_of_another_name_with_the_same_rows_is_the_same(tmp_path):
    one, two, other = (write(tmp_path / f"{n}.jsonl", rows(4, s)) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert difference("K", of(one), of(two)) is None
    said = difference("K", of(one), of(other))
    assert f"had the entries a ({one}), now it has c ({other})" in said and "row 1 is the first" in said


def test_a_name_that_says_what_scores_the_rows_counts(tmp_path):
    content = [{"prompt": "q", "answer": "1"}]
    one, two = (write(tmp_path / f"{name}.jsonl", content) for name in ("a", "b"))
    first, second = (of(path, columns=Columns(label="answer")) for path in (one, two))
    assert "now it has b" in difference("K", first, second) and difference("K", first, first) is None


class Opaque:
    """An object whose text says where it lies in memory."""


def made(num_rows, seed, split):
    """Rows of a generator: objects and a set are made anew at each call."""
    extra = {"thing": Opaque(), "words": {"b", "a", split}, 3: "three"}
    return [{**row, "extra_info": {"k": seed, **extra}} for row in rows(num_rows)]


def test_rows_of_a_generator_are_known_by_what_they_hold():
    name = f"{__name__}:made"
    first, again, other = (of(name, num_rows=8, seed=seed) for seed in (1, 1, 2))
    assert difference("K", first, again) is None
    assert f"made ({name}, 8 rows): row 1" in difference("K", first, other)


def test_the_last_byte_of_an_image_counts(tmp_path):
    def table(end):
        content = [{**row, "images": [{"bytes": b"x" * 50_000 + end}]} for row in rows(2)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), tmp_path / "data.parquet")
        return module._hash([DataRow([], "t", raw=row) for row in read_rows(tmp_path / "data.parquet", "K").values()])

    assert table(b"1") == table(b"1") != table(b"2")


class TestLargeFiles:
    """Their rows are hashed once."""

    @pytest.fixture
    def hashed(self, tmp_path, monkeypatch):
        """A list that grows with every hashing; files of any size count as large."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(module, "_CACHED_FROM_BYTES", 0)
        calls, original = [], module._hash
        monkeypatch.setattr(module, "_hash", lambda rows: calls.append(len(rows)) or original(rows))
        return calls

    @pytest.fixture
    def settled(self, monkeypatch):
        monkeypatch.setattr(module, "_SETTLED_S", -1.0)

    def test_a_second_start_does_not_hash_them_again(self, tmp_path, hashed, settled):
        path = write(tmp_path / "data.jsonl", rows(8))
        assert of(path) == of(path) and hashed == [8]

    def test_fewer_rows_of_the_same_file_are_another_matter(self, tmp_path, hashed, settled):
        path = write(tmp_path / "data.jsonl", rows(8))
        assert of(path)[0]["digest"] != of(path, num_rows=4)[0]["digest"] and hashed == [8, 4]

    def test_a_file_of_the_same_size_and_date_that_was_changed_is_hashed_again(self, tmp_path, hashed, settled):
        path = write(tmp_path / "data.jsonl", rows(8))
        before, stat = of(path), os.stat(path)
        while os.stat(path).st_ctime_ns == stat.st_ctime_ns:  # until the clock of the disk's times has ticked
            write(tmp_path / "data.jsonl", rows(8, start=1))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        assert "row 1" in difference("K", before, of(path)) and hashed == [8, 8]

    def test_a_file_that_has_just_been_written_is_not_believed_to_stay(self, tmp_path, hashed):
        path = write(tmp_path / "data.jsonl", rows(8))
        of(path), of(path)
        assert hashed == [8, 8] and not (tmp_path / "cache").exists()

    def test_a_damaged_cache_is_made_again(self, tmp_path, hashed, settled):
        path = write(tmp_path / "data.jsonl", rows(8))
        first = of(path)
        next((tmp_path / "cache").rglob("*.json")).write_text("{")
        assert of(path) == first and of(path) == first and hashed == [8, 8]

    def test_without_a_place_for_the_cache_they_are_hashed_each_time(self, tmp_path, hashed, settled, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        path = write(tmp_path / "data.jsonl", rows(8))
        assert of(path) == of(path) and hashed == [8, 8]

    def test_without_a_home_they_are_hashed_each_time(self, tmp_path, hashed, settled, monkeypatch):
        path = write(tmp_path / "data.jsonl", rows(8))
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)

        def nobody(uid):
            raise KeyError(f"getpwuid(): uid not found: {uid}")

        monkeypatch.setattr("pwd.getpwuid", nobody)
        assert of(path) == of(path) and hashed == [8, 8]
