"""The way to a worker's process, where that process is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

import pytest

from verl_mt.rollout_workers.links import ProcessLink, WorkerGone


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
