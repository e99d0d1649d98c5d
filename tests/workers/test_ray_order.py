"""Calls of two threads reach all ranks in one order: each is a collective, and ranks that differ wait for ever."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from verl_mt.workers.ray_group import RayWorkerGroup


class Rank:
    """Notes the calls in the order in which they arrive, and takes its time to do so."""

    def __init__(self):
        self.calls: list[str] = []

    def __getattr__(self, method: str):
        def remote(number: int) -> None:
            time.sleep(0.0002)
            self.calls.append(f"{method} {number}")

        return SimpleNamespace(remote=remote)


def test_an_update_and_weights_for_an_engine_that_comes_back_do_not_cross():
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    group._broken, group._workers, group._order = None, [Rank() for _ in range(4)], threading.Lock()
    threads = [
        threading.Thread(target=lambda method=method: [group._begin(method, number) for number in range(30)])
        for method in ("update", "bucket")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = [worker.calls for worker in group._workers]
    assert len(first) == 60 and all(calls == first for calls in others)
    group._workers = []
