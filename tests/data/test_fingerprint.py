"""Rows are known again by what they hold, whatever file they come from."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict

import pyarrow
import pyarrow.parquet
import pytest

from verl_mt.data import fingerprint as module
from verl_mt.data.dataset import Columns, DataRow, DataSource, load_rows, read_rows
from verl_mt.data.fingerprint import SourceFingerprint, difference, fingerprint


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


def sha(content: bytes) -> hashlib._Hash:
    return hashlib.sha256(content)


def test_a_fingerprint_is_a_hash_of_the_hashes_of_its_blocks(tmp_path, monkeypatch):
    path = write(tmp_path / "data.jsonl", rows(5))
    contents = [json.dumps(row, sort_keys=True).encode() for row in rows(5)]
    for most, size in ((4096, 1), (5, 1), (4, 2), (2, 3), (1, 5)):
        monkeypatch.setattr(module, "_MAX_BLOCKS", most)
        parts = [b"".join(b"%d:%s" % (len(c), c) for c in contents[k : k + size]) for k in range(0, 5, size)]
        (made,) = of(path)
        assert made == asdict(
            SourceFingerprint(
                "data", path, 5, sha(b"".join(sha(part).digest() for part in parts)).hexdigest(),
                "".join(sha(part).hexdigest()[:16] for part in parts), False, None,
            )
        )  # fmt: skip
        assert SourceFingerprint(**made).rows_per_block == size
    assert SourceFingerprint("a", "b", 0, "", "").rows_per_block == 1


def test_one_row_without_a_data_source_has_the_entrys_name():
    named, unnamed = DataRow([], "d", raw={"data_source": "d"}), DataRow([], "d", raw={"data_source": None})
    for content, told in (([named, named], False), ([named, unnamed], True), ([unnamed, named], True)):
        assert fingerprint([DataSource("a", content)])[0]["named_rows"] is told


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ({"a": b"x"}, {"a": bytearray(b"x")}, True),
        ({"a": b"x" * 20_000}, {"a": b"x" * 19_999 + b"y"}, False), ({"a": {1, 2}}, {"a": {2, 1}}, True),
        ({1: "x", "b": 2}, {1: "x", "b": 3}, False), ({"a": "x at 0x1"}, {"a": "x at 0x2f"}, True),
        ({"a": "x at 0y1"}, {"a": "x at 0y2"}, False), ({"a": 1}, {"a": "1"}, False),
    ],
)  # fmt: skip
def test_rows_count_by_what_they_hold(one, other, same):
    hashes = [module._hash([DataRow([], "t", raw=raw)]) for raw in (one, other)]
    assert (hashes[0] == hashes[1]) is same


def told(name="a", path="p", num_rows=2, blocks=("1", "2"), named=False, num_bytes=None, **changed):
    text = "".join(block + "0" * 15 for block in blocks)
    return [asdict(SourceFingerprint(name, path, num_rows, text, text, named, num_bytes)) | changed]


OTHER = "K had the entries a (p), now it has b (p)"
SET = "set data.eager_rows so that it is as it was"


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (told(), told(), None),
        (told(), told(path="q"), None),
        (told(), told(name="b"), None),
        (told(), told(name="b", named=True), f"{OTHER}, and their rows have no data_source but that name"),
        (told(named=True), told(name="b"), f"{OTHER}, and their rows have no data_source but that name"),
        (told(named=True), told(named=True), None),
        ([], told(), "K had the entries none, now it has a (p)"),
        (told() + told("b"), told(), "K had the entries a (p), b (p), now it has a (p)"),
        (told(), told(blocks="13"), "K: a (p, 2 rows): row 2 is the first that differs"),
        (told(), told("b", blocks="13"), f"{OTHER}: b (p, 2 rows): row 2 is the first that differs"),
        (told(), told(blocks="32", num_rows=1), "K: a (p, 1 rows, then 2): row 1 is the first that differs"),
        (told(), told(blocks="123", num_rows=3), "K: a (p, 3 rows, then 2): the first 2 are the same"),
        (told(blocks="123", num_rows=3), told(), "K: a (p, 2 rows, then 3): the first 2 are the same"),
        (told() + told("b"), told(blocks="13") + told("b", blocks="32"),
         "K: a (p, 2 rows): row 2 is the first that differs; b (p, 2 rows): row 1 is the first that differs"),
        (told(num_rows=9000, blocks="123"), told(num_rows=9001, blocks="124"),
         "K: a (p, 9001 rows, then 9000): the first difference is in rows 7 to 9"),
        (told(num_rows=9000, blocks="12"), told(num_rows=9001, blocks="123"),
         "K: a (p, 9001 rows, then 9000): the first difference is in rows 7 to 9"),
        (told(num_rows=4097), told(num_rows=4096, blocks="13"), "K: a (p, 4096 rows, then 4097) has other rows"),
        (told(), told(blocks="13", num_bytes=5), f"K: a (p, 2 rows) was loaded then, and is not loaded now: {SET}"),
        (told(num_bytes=5), told(blocks="13"), f"K: a (p, 2 rows) was not loaded then, and is loaded now: {SET}"),
        (told(num_bytes=5), told(blocks="13", num_bytes=6000), "K: a (p, 2 rows) has 6,000 bytes, then 5"),
        (told(num_bytes=5, blocks="1234"), told(num_bytes=5, blocks="1254"),
         "K: a (p, 2 rows) has as many bytes, but others: the first difference that was found is about 50% into it"),
        (told(num_bytes=5, blocks="1234"), told(num_bytes=5, blocks="5234"),
         "K: a (p, 2 rows) has as many bytes, but others: the first difference that was found is about 0% into it"),
        (told(num_bytes=5), told(num_bytes=5, digest="other"),
         "K: a (p, 2 rows) has as many bytes, but others: the first difference that was found is in its footer"),
    ],
)  # fmt: skip
def test_each_difference_is_said_in_full(then, now, said):
    assert difference("K", then, now) == said


class TestCache:
    @pytest.fixture
    def hashed(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        calls, original = [], module._hash
        monkeypatch.setattr(module, "_hash", lambda rows: calls.append(len(rows)) or original(rows))
        return calls

    def source(self, path, read_at_s=0.0):
        content = [DataRow([], "t", raw={"k": 1}, file=str(path))]
        return DataSource("a", content, read_at_s=read_at_s)

    @pytest.mark.parametrize(("size", "cached"), [(2**20, True), (2**20 - 1, False)])
    def test_only_files_of_a_megabyte_are_worth_it(self, tmp_path, hashed, size, cached):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"x" * size)
        late = max(path.stat().st_mtime, path.stat().st_ctime) + 100
        for _ in range(2):
            fingerprint([self.source(path, late)])
        assert hashed == [1] * (1 if cached else 2) and (tmp_path / "cache").exists() is cached

    @pytest.mark.parametrize(("passed", "cached"), [(2.0, True), (1.9, False)])
    def test_a_file_that_changed_less_than_two_seconds_before_it_was_read_is_not_cached(
        self, tmp_path, hashed, passed, cached
    ):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"x" * 2**20)
        os.utime(path, (10**9, 10**9))  # the time of the change itself stays what it is
        newest = path.stat().st_ctime
        fingerprint([self.source(path, newest + passed)])
        assert (tmp_path / "cache").exists() is cached
        os.utime(path, (newest + 50, newest + 50))
        (tmp_path / "b.jsonl").write_bytes(b"")
        fingerprint([self.source(path, newest + 50 + passed)])
        assert bool(list((tmp_path / "cache").rglob("*.json"))) is cached

    def test_what_is_cached_is_known_by_path_number_of_rows_size_times_and_inode(self, tmp_path, hashed, monkeypatch):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"x" * 2**20)
        source = self.source(path, path.stat().st_ctime + 100)
        fingerprint([source])
        (file,) = (tmp_path / "cache").rglob("*.json")
        stat, kept = path.stat(), json.loads(file.read_text())
        assert kept == {
            "known_by": [str(path), 1, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino],
            "digest": module._hash(source.rows)[0], "blocks": module._hash(source.rows)[1],
        }  # fmt: skip
        named = sha(str(path).encode() + b"\n1").hexdigest()[:32]
        assert file == tmp_path / "cache/verl_mt/rows" / f"{named}.json"
        monkeypatch.setattr(module, "write_rows", None)  # what is there already is not written again
        hashed.clear()
        fingerprint([source])
        assert hashed == []

    def test_what_a_generator_or_another_file_gives_is_not_cached(self, tmp_path, hashed):
        path = tmp_path / "a.py"
        path.write_bytes(b"x" * 2**20)
        for name in (path, tmp_path / "absent.jsonl"):
            for _ in range(2):
                fingerprint([self.source(name, path.stat().st_ctime + 100)])
        assert hashed == [1] * 4
