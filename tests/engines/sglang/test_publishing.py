"""Several engines get an update from one pass over its tensors, while the next bucket is packed."""

from __future__ import annotations

import asyncio
import io
import pickle
import struct
import time
from pathlib import Path

import pytest
import torch
from engine_models import request
from fake_client import FakeClient, FakeEngine, answer

from verl_mt.engines.base import Receiver, TensorBuckets
from verl_mt.errors import EngineError, EngineGoneError
from verl_mt.extensions.cluster.replicas import buckets
from verl_mt.extensions.cluster.sglang import engine as engine_module
from verl_mt.extensions.cluster.sglang.publisher import BucketPublisher
from verl_mt.modeling.load import load_causal_lm
from verl_mt.modeling.weights import named_weights

SMALL = 1_000_000
"""Bytes of a bucket, a quarter of the model."""


@pytest.fixture(autouse=True)
def no_sglang_needed(monkeypatch):
    monkeypatch.setattr(engine_module, "require_sglang", lambda: None)


@pytest.fixture(scope="module")
def weights():
    return dict(named_weights(load_causal_lm("verl_mt://tiny")))


class Stream:
    """Counts how often it is read."""

    def __init__(self, weights):
        self.weights, self.num_passes = weights, 0

    def __iter__(self):
        self.num_passes += 1
        return iter(self.weights.items())


class Reader(FakeClient):
    """Copies what it is sent out of shared memory, as SGLang does; `die_at` = the bucket that kills it."""

    num_ranks = 2

    def __init__(self, script, log, die_at=None):
        super().__init__(script, log)
        self.received, self.num_buckets, self.die_at = {}, 0, die_at

    async def call(self, name, body, timeout_s):
        await super().call(name, body, timeout_s)
        await asyncio.sleep(0)
        if name != "update_weights_from_tensor":
            return
        self.num_buckets += 1
        if self.num_buckets == self.die_at:
            self.give_up("killed")
            raise EngineGoneError("killed")
        assert len(body["serialized_named_tensors"]) == self.num_ranks
        for data in body["serialized_named_tensors"]:
            content = pickle.load(io.BytesIO(data))
            for meta in content["metadata"]:
                flat = content["flattened_tensor"][meta.start_idx : meta.end_idx]
                self.received[meta.name] = flat.view(meta.dtype).reshape(meta.shape).clone()


def stop_at_once(body):
    return answer([3], "stop", matched=3)


def same(received, weights):
    return received.keys() == weights.keys() and all(torch.equal(received[name], weights[name]) for name in weights)


def test_weights_are_gathered_once_for_all_engines_and_each_gets_all_of_them(run_async, weights):
    async def go():
        engine = FakeEngine(stop_at_once, num_replicas=3, make=Reader)
        for version in (1, 2):
            stream = Stream({name: tensor + version for name, tensor in weights.items()})
            await engine.apply(TensorBuckets(version, stream, SMALL, streamed=True))
            assert stream.num_passes == 1 and engine.version == version
            assert all(life.num_buckets > 3 * version and same(life.received, stream.weights) for life in engine.lives)
        # Every handle was opened once. With fewer handles than ranks the count falls below what the sender holds, and
        # the file goes away with the first rank that closes it.
        for file in _files_of(engine):
            (number_of_users,) = struct.unpack("i", Path("/dev/shm" + file).read_bytes()[:4])
            assert number_of_users == 1
        await engine.close()

    run_async(go())


def _files_of(engine) -> list[str]:
    (publisher,) = [made for _, made in engine._publishing._publishers._made.values()]
    return [buffer.untyped_storage()._share_filename_cpu_()[1].decode() for buffer in publisher._buckets._buffers]


def test_an_engine_that_dies_in_the_middle_holds_nobody_up_and_gets_a_pass_of_its_own(run_async, weights):
    async def go():
        lives = []

        def make(script, log):
            lives.append(Reader(script, log, die_at=2 if len(lives) == 1 else None))
            return lives[-1]

        engine = FakeEngine(stop_at_once, num_replicas=3, make=make)
        stream = Stream(weights)
        await engine.apply(TensorBuckets(1, stream, SMALL, streamed=True))
        assert stream.num_passes == 2 and len(lives) == 4
        assert [same(life.received, weights) for life in lives] == [True, False, True, True]
        assert (await engine.generate(request([5]))).token_ids == [3]
        await engine.close()

    run_async(go())


def test_tensors_that_do_not_fit_end_the_update_of_every_engine_and_all_are_started_anew(run_async, weights):
    async def go():
        engine = FakeEngine(stop_at_once, num_replicas=2, make=Reader)
        await engine.apply(TensorBuckets(1, Stream(weights), SMALL, streamed=True))
        last = list(weights)[-1]
        with pytest.raises(EngineError, match="has shape"):
            await engine.apply(TensorBuckets(2, Stream({**weights, last: torch.zeros(3)}), SMALL, streamed=True))
        await asyncio.gather(*(replica.ready(600.0) for replica in engine._replicas))
        assert len(engine.lives) == 4 and engine.version == 1
        assert all(same(life.received, weights) for life in engine.lives[2:])
        await engine.close()

    run_async(go())


def test_a_bucket_is_packed_while_engines_copy_the_one_before_and_no_buffer_is_written_too_early():
    shapes = {f"w{number}": (256,) for number in range(6)}
    packed: list[str] = []
    seen: list[tuple[str, list[str], float]] = []

    def stream():
        for number, name in enumerate(shapes):
            packed.append(name)
            yield name, torch.full((256,), float(number))

    def slow(name, body, timeout_s):
        content = pickle.load(io.BytesIO(body["serialized_named_tensors"][0]))
        (meta,) = content["metadata"]
        # The next one is packed meanwhile: the tensor behind it is asked for, and waits for this answer.
        wanted = min(int(meta.name[1]) + 3, 6)
        while len(packed) < wanted:
            time.sleep(0.001)
        time.sleep(0.02)
        flat = content["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype)
        seen.append((meta.name, list(packed), float(flat.unique())))

    publisher = BucketPublisher(shapes, "float32", 600.0, address="127.0.0.1")
    assert publisher.publish(stream(), 1, 1024, [Receiver(slow)]) == [None]
    assert [(name, value) for name, _, value in seen] == [(f"w{number}", float(number)) for number in range(6)]
    assert [len(so_far) for _, so_far, _ in seen] == [3, 4, 5, 6, 6, 6]


def test_who_refuses_is_told_and_the_others_get_all(weights):
    got: list[int] = []

    def takes(name, body, timeout_s):
        got.append(len(body["serialized_named_tensors"]))

    def refuses(name, body, timeout_s):
        raise EngineError("SGLang refused")

    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    publisher = BucketPublisher(shapes, "float32", 600.0, address="127.0.0.1")
    problems = publisher.publish(weights.items(), 1, SMALL, [Receiver(takes, num_ranks=2), Receiver(refuses)])
    assert problems[0] is None and str(problems[1]) == "SGLang refused" and len(got) > 3 and set(got) == {2}
    # Where nobody takes any more, no more is packed.
    stream = iter(weights.items())
    assert len(publisher.publish(stream, 2, SMALL, [Receiver(refuses)])) == 1 and next(stream, None) is not None


def test_memory_for_another_process_is_not_taken_from_segments_that_grow(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", said.append)
    monkeypatch.setattr(buckets, "_empty_on", lambda size, device: said.append((size, device)))
    device = torch.device("cuda", 0)
    buckets._allocate(8, device)
    assert said == [(8, device)]
    said.clear()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    buckets._allocate(8, device)
    assert said == ["expandable_segments:False", (8, device), "expandable_segments:True"]
