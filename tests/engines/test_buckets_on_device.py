"""Buckets of weights, opened in another process while the next one is packed; on a GPU by CUDA's handles.

An engine answers when its copies are on their way, not when they are done: a buffer that was filled again at once would
be read half old, half new. The same bodies run on the CPU, through shared memory.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from verl_mt.extensions.cluster.replicas.buckets import Buckets, payload

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
DEVICES = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA])
MANY, EACH = 12, 2**18


def receive(pipe: Any) -> None:
    """The engine: opens a bucket, answers at once, and copies later than the publisher expects. Sends all weights."""
    got: dict[str, torch.Tensor] = {}
    while (sent := pipe.recv_bytes()) != b"":
        opened = pickle.loads(sent)
        pipe.send("enqueued")
        time.sleep(0.05)
        flat = opened["flattened_tensor"]
        for entry in opened["metadata"]:
            part = flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
            got[entry.name] = part.to("cpu", copy=True)
    pipe.send({name: tensor.numpy() for name, tensor in got.items()})


@DEVICES
def test_a_bucket_holds_while_the_next_one_is_packed(device):
    weights = {f"layer.{k}": torch.full((EACH,), float(k + 1), device=device) for k in range(MANY)}
    buckets = Buckets({name: tuple(w.shape) for name, w in weights.items()}, torch.float32)
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    engine = context.Process(target=receive, args=(there,), daemon=True)
    engine.start()
    try:
        count = 0
        for bucket in buckets.pack(weights.items(), limit=2 * EACH * 4):
            here.send_bytes(payload(bucket.buffer, bucket.entries))
            assert here.recv() == "enqueued"
            count += 1
        assert count == MANY // 2
        here.send_bytes(b"")
        got = here.recv()
    finally:
        engine.join()
    assert engine.exitcode == 0 and got.keys() == weights.keys()
    for name, weight in weights.items():
        assert (torch.from_numpy(got[name]) == weight.cpu()).all(), name
