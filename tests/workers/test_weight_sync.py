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
from verl_mt.errors import ConfigError, EngineError, WorkerError
from verl_mt.modeling.load import load_causal_lm
from verl_mt.rollout.stream import RolloutStream
from verl_mt.workers.weight_sync import LiveWeights, Transport, WeightSync, weight_update_for
from verl_mt.workers.worker_group import InlineWorkerGroup, Publication, WorkerGroup


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
    actor = SimpleNamespace(module=module, device="cpu", offloads=False, onload=lambda: None, offload=lambda: None)
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
    elsewhere.publish = lambda *arguments: told.append(arguments) or [None]  # type: ignore[method-assign]
    both, buckets = (
        RecordingEngine(*ways).capabilities for ways in (("from_ranks", "tensor_buckets"), ("tensor_buckets",))
    )
    update = weight_update_for(both, elsewhere, 3, Transport(bucket_bytes=99))
    assert isinstance(update, FromRanks) and update.version == 3 and told == []
    assert asyncio.run(update.publish(["receiver"], "my.Publisher", ("float32",))) == [None]
    assert told == [(Publication(3, "my.Publisher", ("float32",), 99), ["receiver"])]
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
        assert cancelled.wait(5.0) and set(doings) == {"publishing weights to the engines"}
    finally:
        stream.close()


def test_publishing_memory_back_is_emptying_the_allocators_cache(module, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    group(module).give_back_memory()
    assert calls == [1]


def test_only_the_newest_files_stay(module, tmp_path):
    sync = WeightSync(RecordingEngine("disk"), group(module), run, Transport(folder=tmp_path))
    for version in (1, 2, 2):
        sync.push(version)
    assert [path.name for path in tmp_path.iterdir()] == ["version_000002"]


# What is told of weights on their way


def noting(calls, *, offloads=False, frees=False, transports=("tensor_buckets",)):
    """A sync of an engine and a group that note calls in one list."""
    engine = RecordingEngine(*transports, frees_memory=frees)
    engine.calls = calls
    engine.hold_updates = lambda: noted("hold")
    weight = torch.nn.Linear(2, 3)

    async def noted(what):
        calls.append(what)

    actor = SimpleNamespace(
        module=weight, device="cpu", offloads=offloads,
        onload=lambda: calls.append("onload"), offload=lambda: calls.append("offload"),
    )  # fmt: skip
    return WeightSync(engine, InlineWorkerGroup(actor), run)


def test_an_engine_that_keeps_its_memory_holds_updates_while_the_policy_is_trained():
    calls = []
    noting(calls).release()
    assert calls == ["hold"]


@pytest.mark.parametrize(
    ("offloads", "frees", "makes"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_room_is_made_only_where_the_engine_has_it_and_the_policy_waits_for_it(offloads, frees, makes):
    calls = []
    assert noting(calls, offloads=offloads, frees=frees).free_engine_memory() == makes
    assert calls == (["release"] if makes else [])


def test_what_is_saved_is_saved_although_an_engine_keeps_its_memory(caplog):
    sync = noting([], offloads=True, frees=True)

    async def refuses():
        raise EngineError("it is gone")

    sync.engine.release_memory = refuses
    assert sync.free_engine_memory() and "did not give its memory back: it is gone" in caplog.text


def test_weights_are_at_hand_while_they_are_read_and_are_counted():
    calls = []
    sync = noting(calls)
    live = LiveWeights(sync.workers)
    assert [name for name, _ in live] == ["weight", "bias"] and live.num_bytes == 36
    assert calls == ["onload", "offload"]
    for _ in live:
        break
    assert live.num_bytes == 24 and calls == ["onload", "offload"] * 2
    module = torch.nn.Linear(1, 1)
    assert [tensor for _, tensor in LiveWeights(module)] == [module.weight, module.bias]


def test_the_bytes_of_an_update_that_came_through_this_process():
    calls = []
    sync = noting(calls)
    read = []

    async def apply(update):
        read.append([name for name, _ in update.tensors])

    sync.engine.apply = apply
    sync.push(1)
    assert read == [["weight", "bias"]] and sync.trainer_bytes == 36
    sync.engine.capabilities = replace(sync.engine.capabilities, transports=frozenset({"in_place"}))
    sync.engine.apply = lambda update: asyncio.sleep(0)
    sync.push(2)
    assert sync.trainer_bytes == 0


@pytest.mark.parametrize("grouped", [True, False])
def test_files_are_those_of_the_version_and_weights_are_offloaded_behind_them(tmp_path, grouped):
    calls = []
    sync = noting(calls, transports=("disk",))
    module = sync.workers.actor.module

    def save(path):
        calls.append("save")
        path.mkdir(exist_ok=True)
        (path / "a.safetensors").write_bytes(b"12345")
        (path / "b.safetensors").write_bytes(b"123")
        (path / "config.json").write_bytes(b"{}")

    module.save_pretrained = save
    policy = sync.workers if grouped else module
    update = weight_update_for(sync.engine.capabilities, policy, 7, Transport(folder=tmp_path))
    assert update == Disk(7, str((tmp_path / "version_000007").resolve()))
    assert calls == (["onload", "save", "offload"] if grouped else ["save"])
    sync.transport = Transport(folder=tmp_path)
    sync.engine.apply = lambda update: asyncio.sleep(0)
    sync.push(7)
    assert sync.trainer_bytes == 8


def test_an_engine_in_this_process_shares_a_module_that_is_up_to_date():
    refreshed = []
    elsewhere = type("Elsewhere", (WorkerGroup,), dict.fromkeys(WorkerGroup.__abstractmethods__))()
    elsewhere.refresh_policy_module = lambda: refreshed.append(1)
    assert weight_update_for(RecordingEngine("in_place").capabilities, elsewhere, 4) == InPlace(4)
    assert refreshed == [1]


def test_a_lost_worker_is_looked_for_while_an_engine_is_waited_for():
    asked = []
    sync = noting([])
    sync.workers.check = asked.append
    waits = []
    sync.call = lambda coroutine, while_waiting: (coroutine.close(), while_waiting(), waits.append(1))
    sync.release()
    assert asked == ["publishing weights to the engines"] and waits == [1]
