"""Which way the policy's weights take to an engine, and when its memory is given back."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from verl_mt.engines.base import Disk, FromRanks, InPlace, TensorBuckets
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import ConfigError, WorkerError
from verl_mt.modeling.load import load_causal_lm
from verl_mt.rollout.stream import RolloutStream
from verl_mt.workers.weight_sync import Transport, WeightSync, weight_update_for
from verl_mt.workers.worker_group import HandedOver, InlineWorkerGroup, WorkerGroup


class RecordingEngine(ScriptedEngine):
    """Takes what its transports say; records the order of calls."""

    def __init__(self, *transports, frees_memory=False):
        super().__init__([])
        self.capabilities = replace(self.capabilities, transports=frozenset(transports), frees_memory=frees_memory)
        self.calls = []

    async def apply(self, update):
        self.calls.append("apply")
        await super().apply(update)

    async def release_memory(self):
        self.calls.append("release")

    async def resume_memory(self):
        self.calls.append("resume")


def group(module):
    """As much of a worker group as weights need."""
    actor = SimpleNamespace(module=module, device="cpu", offloads=False, bring=lambda: None, put_away=lambda: None)
    return InlineWorkerGroup(actor)  # type: ignore[arg-type]


def run(coroutine, while_waiting):
    return asyncio.run(coroutine)


@pytest.fixture(scope="module")
def module():
    return load_causal_lm("verl_mt://tiny")


def test_the_lightest_way_that_the_engine_takes_is_chosen(module, tmp_path):
    update = lambda *ways: weight_update_for(  # noqa: E731
        RecordingEngine(*ways).capabilities, module, 3, Transport(bucket_bytes=99, folder=tmp_path)
    )
    assert update("in_place", "tensor_buckets", "disk") == InPlace(3)
    tensors = update("tensor_buckets", "disk")
    assert isinstance(tensors, TensorBuckets) and (tensors.version, tensors.bucket_bytes) == (3, 99)
    assert not tensors.streamed
    files = update("disk")
    assert isinstance(files, Disk) and load_causal_lm(files.path) is not None


def test_weights_come_straight_from_ranks_only_where_there_are_ranks_and_the_engine_takes_it(module):
    elsewhere = type("Elsewhere", (WorkerGroup,), dict.fromkeys(WorkerGroup.__abstractmethods__))()
    told = []
    elsewhere.hand_over = lambda *arguments: told.append(arguments) or [None]  # type: ignore[method-assign]
    both, buckets = (
        RecordingEngine(*ways).capabilities for ways in (("from_ranks", "tensor_buckets"), ("tensor_buckets",))
    )
    update = weight_update_for(both, elsewhere, 3, Transport(bucket_bytes=99))
    assert isinstance(update, FromRanks) and update.version == 3 and told == []
    assert asyncio.run(update.hand_over(["receiver"], "my.Giver", ("float32",))) == [None]
    assert told == [(HandedOver(3, "my.Giver", ("float32",), 99), ["receiver"])]
    for capabilities, policy, streamed in (
        (buckets, elsewhere, True),
        (both, group(module), False),
        (both, module, False),
    ):
        update = weight_update_for(capabilities, policy, 3)
        assert isinstance(update, TensorBuckets) and update.streamed == streamed


def test_an_engine_that_takes_nothing_that_can_be_made_is_refused(module):
    with pytest.raises(ConfigError, match="takes weights only by disk"):
        weight_update_for(RecordingEngine("disk").capabilities, module, 1)


def test_tensors_are_read_anew_at_every_pass(module):
    update = weight_update_for(RecordingEngine("tensor_buckets").capabilities, module, 1)
    before = {name: tensor.clone() for name, tensor in update.tensors}
    with torch.no_grad():
        module.lm_head.weight.add_(1.0)
    after = dict(update.tensors)
    with torch.no_grad():
        module.lm_head.weight.sub_(1.0)
    assert before.keys() == after.keys() and len(after) == len(list(update.tensors))
    assert after["model.embed_tokens.weight"] is not before["model.embed_tokens.weight"]


@pytest.mark.parametrize("frees", [True, False])
def test_memory_is_taken_back_before_the_new_weights_arrive(module, frees):
    engine, workers = RecordingEngine("tensor_buckets", frees_memory=frees), group(module)
    # What training holds in reserve is the memory that the engine wants back.
    workers.give_back_memory = lambda: engine.calls.append("give back")
    sync = WeightSync(engine, workers, run)
    sync.release()
    sync.push(1)
    assert engine.calls == (["release", "give back", "resume", "apply"] if frees else ["apply"])
    assert engine.version == 1


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["release_memory", "resume_memory", "apply"])
def test_a_rank_that_is_lost_is_noticed_while_an_engine_is_waited_for(module, hangs):
    """Such as the engine beside it, which went away with their machine and cannot come back."""
    engine, workers = RecordingEngine("tensor_buckets", frees_memory=True), group(module)
    cancelled, doings = threading.Event(), []

    async def for_ever(*args):
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    def check(doing):
        doings.append(doing)
        if len(doings) > 2:
            raise WorkerError("rank 1 of 2 died")

    setattr(engine, hangs, for_ever)
    workers.check = check
    stream = RolloutStream(SimpleNamespace(tools=None))
    try:
        sync = WeightSync(engine, workers, stream.call)
        with pytest.raises(WorkerError, match="rank 1 of 2 died"):
            sync.release()
            sync.push(1)
        assert cancelled.wait(5.0) and set(doings) == {"giving the engines their weights"}
    finally:
        stream.close()


def test_giving_memory_back_is_emptying_the_allocators_cache(module, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    group(module).give_back_memory()
    assert calls == [1]


def test_only_the_newest_files_stay(module, tmp_path):
    sync = WeightSync(RecordingEngine("disk"), group(module), run, Transport(folder=tmp_path))
    for version in (1, 2, 2):
        sync.push(version)
    assert [path.name for path in tmp_path.iterdir()] == ["version_000002"]
