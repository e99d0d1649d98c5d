"""Several engines get an update from one pass over its tensors."""

from __future__ import annotations

import asyncio
import io
import pickle
import struct
from pathlib import Path

import pytest
import torch
from engine_models import request
from fake_client import FakeClient, FakeEngine, answer

from verl_mt.engines.base import TensorBuckets
from verl_mt.engines.sglang import engine as engine_module
from verl_mt.engines.sglang.buckets import Bucket, SharedPass
from verl_mt.errors import EngineError
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
            raise engine_module.EngineGoneError("killed")
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
        (number_of_users,) = struct.unpack("i", Path("/dev/shm" + _file_of(engine)).read_bytes()[:4])
        assert number_of_users == 1
        await engine.close()

    run_async(go())


def _file_of(engine) -> str:
    used = [r.sender._buckets._buffer for r in engine._replicas if r.sender._buckets._buffer.numel()]
    assert len(used) == 1, "one buffer is enough"
    return used[0].untyped_storage()._share_filename_cpu_()[1].decode()


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
        await asyncio.gather(*(replica.ready(5.0) for replica in engine._replicas))
        assert len(engine.lives) == 4 and engine.version == 1
        assert all(same(life.received, weights) for life in engine.lives[2:])
        await engine.close()

    run_async(go())


def test_who_never_takes_part_or_is_cancelled_is_not_waited_for(run_async):
    async def go():
        buckets = [Bucket(torch.zeros(1), [], number == 2) for number in range(3)]
        shared = SharedPass(iter(buckets), 4)
        seen = {"a": [], "b": []}

        async def take(name, upto=3):
            with shared.member() as mine:
                async for bucket in mine:
                    seen[name].append(bucket)
                    if len(seen[name]) == upto:
                        return

        async def wait_for_ever():
            with shared.member() as mine:
                async for _ in mine:
                    await asyncio.Event().wait()

        stuck = asyncio.ensure_future(wait_for_ever())
        tasks = [asyncio.ensure_future(take("a")), asyncio.ensure_future(take("b", upto=1))]
        await asyncio.sleep(0)
        assert seen == {"a": [], "b": []}
        with shared.member():
            """Left without a look."""
        await asyncio.sleep(0.01)
        assert [len(bs) for bs in seen.values()] == [1, 1] and not tasks[0].done()
        stuck.cancel()
        await asyncio.gather(*tasks)
        assert seen == {"a": buckets, "b": buckets[:1]}

    run_async(go())
