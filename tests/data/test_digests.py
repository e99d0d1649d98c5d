"""What is written is hashed on its way, and what the disk refuses is said as that."""

from __future__ import annotations

import errno
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_mt.data.digests import HashingFile, damage, save_tensors
from verl_mt.data.run_files import append_metrics, write_rows
from verl_mt.errors import CheckpointError

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@pytest.mark.parametrize("numbers", [10, 1_000_000])
def test_the_digest_is_that_of_the_file(tmp_path, numbers):
    path = tmp_path / "state.pt"
    with path.open("wb") as file:
        digest = save_tensors({"x": torch.arange(numbers), "y": [1, "two"]}, file)
    assert digest == f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_size}"
    assert damage(path, digest) is None
    assert torch.load(path)["x"].shape == (numbers,)


def test_every_kind_of_damage_is_said(tmp_path):
    path = tmp_path / "state.pt"
    with path.open("wb") as file:
        digest = save_tensors({"x": torch.arange(100)}, file)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    assert "SHA-256 differs" in damage(path, digest)
    path.write_bytes(whole[:100])
    assert damage(path, digest) == f"it has 100 bytes, {len(whole)} were written"
    path.unlink()
    assert damage(path, digest) == "it is missing"


@needs_full
@pytest.mark.parametrize("numbers", [10, 1_000_000])
def test_a_full_disk_is_an_os_error_also_where_torch_says_otherwise(numbers):
    with FULL.open("wb", buffering=0) as file, pytest.raises(OSError) as error:
        save_tensors({"x": torch.arange(numbers)}, file)
    assert error.value.errno == errno.ENOSPC


@needs_full
def test_a_line_that_does_not_fit_names_the_file_and_the_room(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: No space left on device \(\d+ bytes free"):
        append_metrics(tmp_path / "metrics.jsonl", {"step": 1})


def test_rows_that_do_not_fit_leave_nothing_behind(tmp_path, monkeypatch):
    def refuse(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("verl_mt.data.run_files.os.fsync", refuse)
    with pytest.raises(CheckpointError, match=r"step_000001\.jsonl: No space left on device \(\d+ bytes free"):
        write_rows(tmp_path / "step_000001.jsonl", [{"x": 1}])
    assert not list(tmp_path.iterdir())


def test_a_hashing_file_counts_and_hashes_pieces_of_all_sizes(tmp_path, monkeypatch):
    pools, ended = [], []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers):
            super().__init__(workers)
            pools.append(workers)

        def shutdown(self):
            super().shutdown()
            ended.append(self)

    monkeypatch.setattr("verl_mt.data.digests.ThreadPoolExecutor", Pool)
    pieces = [b"ab", b"x" * (2**20 - 1), b"y" * 2**20, np.arange(2**18, dtype=np.int64), bytearray(b"c"), b"z" * 2**21]
    content, told = b"".join(bytes(piece) for piece in pieces), []
    with (tmp_path / "a").open("wb") as file:
        hashing = HashingFile(file)
        for piece in pieces:
            assert hashing.write(piece) == len(bytes(piece))
            told.append((hashing.tell(), len(pools)))
        sizes = [sum(len(bytes(piece)) for piece in pieces[: k + 1]) for k in range(len(pieces))]
        assert told == list(zip(sizes, [0, 0, 1, 1, 1, 1])) and pools == [1], "one thread, for pieces of a megabyte"
        assert hashing.fileno() == file.fileno() and (tmp_path / "a").stat().st_size == len(content)
        assert hashing.digest() == f"{hashlib.sha256(content).hexdigest()} {len(content)}"
        hashing.close()
        hashing.close()
        assert file.closed and len(ended) == 1
    assert (tmp_path / "a").read_bytes() == content


class Refusing:
    """A file on a disk that is full."""

    def __init__(self, verb):
        self.verb = verb

    def write(self, piece):
        if self.verb == "write":
            raise OSError(errno.ENOSPC, "full")

    def flush(self):
        if self.verb == "flush":
            raise OSError(errno.EDQUOT, "quota")


@pytest.mark.parametrize("size", [3, 2**20])
def test_what_the_disk_refuses_is_kept_and_not_counted(size):
    hashing = HashingFile(Refusing("write"))
    with pytest.raises(OSError, match="full"):
        hashing.write(b"x" * size)
    assert hashing.error.errno == errno.ENOSPC and hashing.tell() == 0
    hashing = HashingFile(Refusing("flush"))
    assert hashing.error is None
    for verb in (hashing.flush, hashing.fileno):
        hashing.error = None
        with pytest.raises(OSError, match="quota"):
            verb()
        assert hashing.error.errno == errno.EDQUOT


def test_errors_of_torch_itself_stay_what_they_are(monkeypatch, tmp_path):
    def save(content, file):
        raise RuntimeError("of torch")

    monkeypatch.setattr(torch, "save", save)
    with (tmp_path / "a").open("wb") as file, pytest.raises(RuntimeError, match="of torch"):
        save_tensors({}, file)


def test_a_file_that_cannot_be_read_is_damaged(tmp_path):
    digest = f"{hashlib.sha256(b'ab').hexdigest()} 2"
    (tmp_path / "a").write_bytes(b"ab")
    assert damage(tmp_path / "a", digest) is None
    assert damage(tmp_path / "a" / "b", digest) == "it cannot be read: Not a directory"
