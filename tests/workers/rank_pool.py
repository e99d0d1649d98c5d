"""Processes joined by gloo, kept for many tests: `pool(function, ...)` runs it on every rank.

Ranks are forks of a fork of the test process that was made before any test ran: it has imported torch and has computed
nothing. A process that has run a backward pass cannot be forked (torch refuses it), and one that starts anew imports
for three seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

_template: Connection | None = None


def make_template() -> None:
    """Fork the process that ranks are forked from; it ends when this one does."""
    # Once, instead of in every rank.
    import peft  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    global _template
    ours, theirs = Pipe()
    if os.fork() == 0:
        ours.close()
        _fork_on_request(theirs)
    theirs.close()
    _template = ours


def _fork_on_request(pipe: Connection) -> None:
    """Until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            where = pipe.recv()
            if os.fork() == 0:
                pipe.close()
                _serve(*where)
                break
    except EOFError:
        pass
    finally:
        os._exit(0)


class RankPool:
    """`size` processes. A function that it runs gets the `Ranks` of its process first; it must be importable."""

    def __init__(self, size: int):
        assert _template is not None, "no test has asked for ranks when tests were collected"
        self.size = size
        port = free_port()
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/ranks", "AF_UNIX", backlog=size) as listener:
            for rank in range(size):
                _template.send((rank, size, port, listener.address))
            found = [listener.accept() for _ in range(size)]
            ranks = {}
            for pipe in found:
                rank, pid = pipe.recv()
                ranks[rank] = pipe, pid
        self._pipes = [ranks[rank][0] for rank in range(size)]
        self._pids = [ranks[rank][1] for rank in range(size)]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What it returned on each rank; raises the traceback of the first rank that failed."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(120):
                self.close()
                raise TimeoutError(f"rank {rank} does not answer: do all ranks run the same collectives?")
            answers.append(pipe.recv())
        for failed, text in answers:
            if failed:
                raise RuntimeError(text)
        return [value for _, value in answers]

    def close(self) -> None:
        for pid, pipe in zip(self._pids, self._pipes):
            if not pipe.closed:
                os.kill(pid, signal.SIGKILL)  # it is there: it ends by itself only behind the closed pipe
                pipe.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, size: int, port: int, address: str) -> None:
    import torch
    import torch.distributed as dist

    from verl_mt.workers.sharding import Ranks

    pipe = Client(address, "AF_UNIX")
    pipe.send((rank, os.getpid()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(Ranks(rank, size), *args, **kwargs)))
        except BaseException:
            pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))
