"""Processes joined by gloo, kept for many tests: `pool(function, ...)` runs it on every rank."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "transformers", "rank_pool", "actor_toys", "verl_mt.workers.sharding"])


class RankPool:
    """`size` processes. A function that it runs gets the `Ranks` of its process first; it must be importable."""

    def __init__(self, size: int):
        self.size = size
        port = free_port()
        self._pipes = []
        self._processes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

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
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    import torch.distributed as dist

    from verl_mt.workers.sharding import Ranks

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
