"""Names in /dev/shm are removed when their owner has ended and nobody has them mapped, and no others."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl_mt.extensions.cluster.replicas import shared_memory
from verl_mt.extensions.cluster.replicas.buckets import Buckets, payload
from verl_mt.extensions.cluster.replicas.shared_memory import mark, mark_group, sweep


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def living():
    """A process of its own group."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("verl_mt.")}


def test_what_an_ended_process_left_is_swept_and_what_lives_or_is_somebody_elses_stays(folder, living):
    for name in ("torch_mine", "torch_its", "torch_other", "sglang_loads_unmarked"):
        (folder / name).write_bytes(b"x")
    mark("torch_mine", os.getpid())
    mark("torch_its", living.pid)
    elsewhere = folder / f"verl_mt.1.{living.pid}.1.torch_other"  # of another container, where numbers mean others
    elsewhere.touch()
    sweep()
    assert names(folder) == {"torch_mine", "torch_its", "torch_other", "sglang_loads_unmarked"}
    living.kill()
    living.wait()
    sweep()
    assert names(folder) == {"torch_mine", "torch_other", "sglang_loads_unmarked"}
    sweep(ending=os.getpid())
    assert names(folder) == {"torch_other", "sglang_loads_unmarked"}
    assert [path for path in folder.iterdir() if path.name.startswith("verl_mt.")] == [elsewhere]


def test_a_number_that_was_given_again_is_another_process(folder, living):
    (folder / "torch_old").touch()
    space = shared_memory._number_space()
    (folder / f"verl_mt.{space}.{living.pid}.1.torch_old").touch()
    sweep()
    assert list(folder.iterdir()) == []


def test_a_file_that_is_mapped_stays_until_it_is_not(folder):
    (folder / "torch_mapped").write_bytes(bytes(mmap.PAGESIZE))
    mark("torch_mapped", os.getpid())
    with (folder / "torch_mapped").open("r+b") as file:
        held = mmap.mmap(file.fileno(), 0)
    sweep(ending=os.getpid())
    assert names(folder) == {"torch_mapped"}
    held.close()
    sweep(ending=os.getpid())
    assert list(folder.iterdir()) == []


HOLDS = """
import mmap, os, sys, time
for name in sys.argv[1:]:
    file = open(name, "r+b")
    globals()[name] = mmap.mmap(file.fileno(), 0)
print("holds", flush=True)
time.sleep(600)
"""


def test_an_engines_files_go_with_its_process_group(folder):
    paths = [folder / name for name in ("sglang_loads_a_1.shm", "sgl_shm_mq_1_2", "psm_1a", "nccl-x")]
    for path in [*paths, folder / "sglang_loads_b_2.shm", folder / "psm_2b"]:
        path.write_bytes(bytes(mmap.PAGESIZE))
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDS, *map(str, paths)], start_new_session=True, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"holds\n"
    mark_group(holder.pid)
    holder.kill()
    holder.communicate()
    sweep()
    assert names(folder) == {"nccl-x", "sglang_loads_b_2.shm", "psm_2b"}


def buffers() -> set[str]:
    """Of this process."""
    return {name for name in os.listdir("/dev/shm") if f"torch_{os.getpid()}_" in name}


def test_buffers_leave_nothing_though_an_engine_never_opened_them():
    before = buffers()
    made = Buckets({"a": (64,), "b": (64,)}, torch.float32)
    for bucket in made.pack([("a", torch.ones(64)), ("b", torch.ones(64))], limit=300):
        payload(bucket.buffer, bucket.entries)  # holds a share until somebody opens it
    del bucket
    assert len(buffers() - before) == 4, "two buffers, and their markers"
    made.close()
    assert not buffers() - before
    made.close()


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_what_the_next_start_sweeps():
    program = (
        "import os, signal, torch; from verl_mt.extensions.cluster.replicas.buckets import _allocate;"
        "buffer = _allocate(64, torch.device('cpu')); print(os.getpid(), flush=True);"
        "os.killpg(0, signal.SIGKILL)"  # with torch's own process, which would remove it
    )
    killed = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True, text=True)
    left = [name for name in os.listdir("/dev/shm") if f"torch_{killed.stdout.strip()}_" in name]
    assert len(left) == 2, "the buffer and its marker"
    sweep()
    assert not [name for name in os.listdir("/dev/shm") if name in left]
