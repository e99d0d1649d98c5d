"""A process ends with its children, by its id, and tells how it ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from live import processes_of_group

from verl_mt.engines.sglang.process import OwnProcess

pytestmark = pytest.mark.slow

PROGRAM = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if sys.argv[2] == "raise":
    try:
        raise RuntimeError("first")
    except RuntimeError:
        raise ValueError("no memory left")
os.read(int(sys.argv[1]), 1)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A module that starts a child and then waits for its descriptor to close."""
    (tmp_path / "program_with_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    descriptors, processes = [], []

    def start(how: str) -> tuple[OwnProcess, int]:
        reading, writing = os.pipe()
        process = OwnProcess("program_with_child", reading, [how])
        os.close(reading)
        descriptors.append(writing)
        processes.append(process)
        while "child" not in process.log.read_text():
            time.sleep(0.01)
        return process, writing

    yield start
    for process in processes:
        process.end(0.0)
    for descriptor in descriptors:
        os.close(descriptor)


def test_the_process_and_its_child_are_gone_and_so_is_the_log(start):
    process, _ = start("wait")
    assert len(processes_of_group(process.pid)) == 2 and not process.ended
    assert "is running" in process.describe()
    process.end(0.0)
    process.end(0.0)
    assert process.ended and not processes_of_group(process.pid) and not process.log.exists()
    assert "killed by signal 9" in process.describe()


def test_a_process_that_fails_leaves_its_last_exception_and_its_child_does_not_outlive_it(start):
    process, _ = start("raise")
    while not process.ended:
        time.sleep(0.01)
    assert processes_of_group(process.pid)
    process.end(0.0, keep_log=True)
    text = process.describe()
    assert "exit code 1" in text and text.endswith("ValueError: no memory left") and "first" not in text
    assert not processes_of_group(process.pid)
    Path(process.log).unlink()


def test_it_does_not_belong_to_our_terminal(start):
    process, _ = start("wait")
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
