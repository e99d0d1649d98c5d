"""What goes to the ranks: calls of two threads in one order, since each is a collective and ranks that differ wait for
ever; and of a batch all that they read."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import torch
from actor_toys import make_batch
from tensordict import NonTensorStack

from verl_mt.data import batch as columns
from verl_mt.data.media import MediaInput
from verl_mt.extensions.cluster.workers import ray_group
from verl_mt.extensions.cluster.workers.ray_group import RayWorkerGroup
from verl_mt.workers.sharding import ALONE


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


def test_a_worker_of_its_own_process_is_sent_the_images_of_the_rows():
    seen = columns.RowMedia((MediaInput("image", 0, 1, {"pixel_values": torch.ones(2, 2)}),))
    batch = make_batch([[1.0, 0.0]])
    batch[columns.MEDIA] = NonTensorStack(seen, columns.RowMedia())
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    config = SimpleNamespace(actor=SimpleNamespace(ppo_mini_batch_size=None))
    group._setup = SimpleNamespace(config=config, ranks=lambda rank: ALONE)
    (share,) = group._shares(batch, for_update=True)
    arrived = columns.media_of(ray_group.ray.cloudpickle.loads(ray_group.ray.cloudpickle.dumps(share)).rows)
    assert arrived is not None and [len(row.inputs) for row in arrived] == [1, 0]
    assert arrived[0].inputs[0].tensors["pixel_values"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
