"""What is written is hashed on its way, and what the disk refuses is said as that."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
import torch

from verl_mt.data.digests import damage, save_tensors
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
