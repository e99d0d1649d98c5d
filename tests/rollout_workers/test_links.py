"""The way to a worker's process, where that process is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_mt.extensions.cluster.rollout_workers.links import ProcessLink, WorkerGone

STUCK = """
import pathlib, re, subprocess, os
tool = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids.partial").write_text(f"{os.getpid()} {tool.pid}")
os.rename("pids.partial", "pids")
re.match("(a+)+$", "a" * 60 + "b")  # no other thread of this process gets a turn
"""
TRAINER = """
import asyncio, time
from verl_mt.rollout_workers import links
links._MODULE = "stuck"
async def begin():
    link = links.ProcessLink()
    time.sleep(600)
asyncio.run(begin())
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def waited(what, seconds: float) -> bool:
    ends_at = time.monotonic() + seconds
    while not what() and time.monotonic() < ends_at:
        time.sleep(0.01)
    return what()


def test_a_worker_and_its_tools_end_at_once_with_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], cwd=tmp_path)
    pids = tmp_path / "pids"
    assert waited(pids.exists, 60)
    left = [int(word) for word in pids.read_text().split()]
    try:
        assert all(map(lives, left))
        trainer.kill()
        trainer.wait()
        assert waited(lambda: not any(map(lives, left)), 5)
    finally:
        for pid in filter(lives, left):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_what_was_still_to_be_said_to_a_worker_that_is_gone_does_not_reach_the_next_one():
    """The descriptor's number is given to the next worker's socket as soon as it is free."""
    ours, theirs = socket.socketpair()

    async def ended() -> int:
        link = ProcessLink()
        connection = link._connection
        number = connection.fileno()

        def write_late(frame: bytes) -> None:
            handle = connection.fileno()
            time.sleep(0.2)  # a thread waits its turn here on a machine that is busy
            os.write(handle, frame)

        connection._send = write_late
        os.kill(link.pid, signal.SIGKILL)
        with pytest.raises(WorkerGone, match="got SIGKILL"):
            await link.receive()
        await link.end(0.0)
        os.dup2(ours.fileno(), number)
        await asyncio.to_thread(link._writer.join)
        return number

    with ours, theirs:
        number = asyncio.run(ended())
        os.close(number)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
