"""One broadcast from rank 0 to all engines: real process groups over gloo, engines that only receive."""

from __future__ import annotations

import multiprocessing as mp
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from verl_mt.engines.base import Receiver
from verl_mt.errors import EngineError, EngineGoneError
from verl_mt.extensions.cluster.replicas.broadcaster import WeightBroadcaster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CONTEXT = mp.get_context("forkserver")
"""Its server has imported what a new process needs."""
CONTEXT.set_forkserver_preload(["torch.distributed", WeightBroadcaster.__module__])
SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2)}


def receive(pipe):
    """What an SGLang rank does with the calls, as far as the group is concerned."""
    groups = {}
    while True:
        name, body = pipe.recv()
        if name == "init_weights_update_group":
            store = dist.TCPStore(body["master_address"], body["master_port"], None, is_master=False)
            groups[body["group_name"]] = dist.distributed_c10d._new_process_group_helper(
                body["world_size"], body["rank_offset"], [], dist.distributed_c10d.Backend(body["backend"]),
                dist.PrefixStore(body["group_name"], store), group_name=body["group_name"],
                timeout=timedelta(seconds=20),
            )[0]  # fmt: skip
            pipe.send(None)
        elif name == "update_weights_from_distributed":
            kinds = [getattr(torch, dtype) for dtype in body["dtypes"]]
            sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(body["shapes"], kinds)]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            groups[body["group_name"]].broadcast(buffer, 0).wait()
            pieces = zip(buffer.split(sizes), kinds, body["shapes"])
            parts = [part.view(kind).view(shape).tolist() for part, kind, shape in pieces]
            pipe.send((dict(zip(body["names"], parts)), body["flush_cache"], body.get("weight_version")))
        else:
            groups.pop(body["group_name"], None)
            pipe.send(None)


class Engine:
    """An engine in a process of its own, and the call that a rank has of it."""

    def __init__(self):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=receive, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.received, self.names = [], []

    def __call__(self, name, body, timeout_s):
        self.names.append(name)
        try:
            self.pipe.send((name, body))
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise EngineGoneError("killed") from None
        if answer is not None:
            self.received.append(answer)


@pytest.fixture
def engines():
    made = [Engine() for _ in range(3)]
    yield made
    for engine in made:
        engine.process.kill()
        engine.process.join()


def takers(engines):
    return [Receiver(engine) for engine in engines]


def weights(value):
    return [(name, torch.full(shape, float(value))) for name, shape in SHAPES.items()]


def arrived(engine):
    found = {}
    for tensors, _, _ in engine.received:
        found |= tensors
    return {name: torch.tensor(values).unique().tolist() for name, values in found.items()}


def test_every_engine_gets_every_update_and_the_group_is_made_once(engines):
    publisher = WeightBroadcaster(SHAPES, "float32", 60.0, address="127.0.0.1")
    for version in (1, 2):
        assert publisher.publish(weights(version), version, 64, takers(engines)) == [None] * 3
        for engine in engines:
            assert arrived(engine) == {name: [float(version)] for name in SHAPES}
            # Only the last bucket of an update empties the cache and names the version.
            assert [last for _, last, _ in engine.received] == [False] * (len(engine.received) - 1) + [True]
            assert engine.received[-1][2] == str(version)
            engine.received.clear()
    assert all(engine.names.count("init_weights_update_group") == 1 for engine in engines)


def test_an_engine_that_is_gone_breaks_off_for_all_and_the_others_are_served_again(engines):
    publisher = WeightBroadcaster(SHAPES, "float32", 60.0, address="127.0.0.1")
    assert publisher.publish(weights(1), 1, 10**6, takers(engines)) == [None] * 3
    engines[1].process.kill()
    engines[1].process.join()
    problems = publisher.publish(weights(2), 2, 10**6, takers(engines))
    assert all(isinstance(problem, EngineGoneError) for problem in problems)
    left = [engines[0], engines[2]]
    # What they answered late belongs to the update that broke off; a new life would have a new pipe.
    fresh = [Engine(), Engine()]
    try:
        assert publisher.publish(weights(3), 3, 10**6, takers(fresh)) == [None] * 2
        assert all(arrived(engine)["c"] == [3.0] for engine in fresh)
    finally:
        for engine in (*fresh, *left):
            engine.process.kill()


def test_weights_that_do_not_fit_are_named(engines):
    publisher = WeightBroadcaster(SHAPES, "float32", 60.0, address="127.0.0.1")
    with pytest.raises(EngineError, match="no weight 'x'"):
        publisher.publish([("x", torch.zeros(1))], 1, 10**6, takers(engines))
