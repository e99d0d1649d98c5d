"""Engines of ours start without weights where an update brings all of them, and a start says how far it is."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from engine_models import request
from fake_client import FakeClient, FakeEngine, answer, until

from verl_mt.config.compose import compose
from verl_mt.engines.base import FromRanks, TensorBuckets, WeightPublisher
from verl_mt.engines.lock_step import LockStepEngine
from verl_mt.errors import ConfigError, EngineError
from verl_mt.extensions.cluster import start_log
from verl_mt.extensions.cluster.replicas import engine as replicated
from verl_mt.extensions.cluster.replicas.clients import EMPTY
from verl_mt.extensions.cluster.replicas.model_shape import model_shape
from verl_mt.extensions.cluster.replicas.weight_sender import PublishesHere
from verl_mt.extensions.cluster.sglang import engine as engine_module
from verl_mt.extensions.cluster.sglang.options import SGLangOptions, other_sampling

OPTIONS = SGLangOptions("verl_mt://tiny", 100, end_token_ids=frozenset({3}), timeout_s=600.0)


@pytest.fixture(autouse=True)
def no_sglang_needed(monkeypatch):
    monkeypatch.setattr(engine_module, "require_sglang", lambda: None)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="verl_mt.start")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "verl_mt.start"]


def stop_at_once(body):
    return answer([3], "stop", matched=3)


def update(version, receivers_of=None):
    """From ranks that have nothing to send."""

    async def publish(receivers, publisher, arguments):
        return [None] * len(receivers)

    return FromRanks(version, publish)


def test_an_engine_without_weights_answers_only_after_the_first_update_and_so_do_its_later_lives(run_async, lines):
    async def go():
        engine = LockStepEngine(FakeEngine(stop_at_once))
        assert await engine.start_without_weights()
        assert engine.lives[0].starts_empty
        with pytest.raises(EngineError, match=r"has no weights yet: call apply\(\)"):
            await engine.engine.generate(request([5]))
        await engine.apply(update(0))
        assert (await engine.engine.generate(request([5]))).finish_reason == "stop"
        engine.lives[0].give_up("killed")
        before = len(engine.calls)
        await until(lambda: engine.metrics()["engine/restarts"] == 1)
        assert engine.lives[1].starts_empty
        assert engine.engine.names()[before:][:3] == ["start", "pause_generation", "begin_weight_update"]
        assert (await engine.engine.generate(request([5]))).finish_reason == "stop"
        await engine.close()

    run_async(go())
    assert lines()[0] == "starting SGLang: 1 engine" and lines()[1].startswith("SGLang: 1 of 1 engines ready after")
    assert lines()[2:] == ["SGLang: weights sent to 1 engine"]


def test_who_only_starts_an_engine_gets_one_that_has_read_the_files(run_async):
    async def go():
        engine = FakeEngine(stop_at_once)
        await engine.start()
        assert not engine.lives[0].starts_empty
        assert not await engine.start_without_weights(), "it has started"
        assert (await engine.generate(request([5]))).finish_reason == "stop"
        await engine.close()

    run_async(go())


@pytest.mark.parametrize(
    ("options", "unsent", "line"),
    [
        ({"transport": "disk"}, frozenset(), None),
        ({"engine_kwargs": {"load_format": "auto"}}, frozenset(), None),
        ({"servers": ("http://127.0.0.1:1",)}, frozenset(), None),
        ({}, None, None),
        (
            {},
            frozenset({"mtp.fc.weight", "model.visual.x"}),
            "reads the model's files: 2 weights, such as model.visual.x",
        ),
    ],
    ids=["weights by files", "user's choice", "somebody's server", "files that say nothing", "weights that stay"],
)
def test_files_are_read_where_updates_bring_less_than_they_hold(run_async, monkeypatch, lines, options, unsent, line):
    found = replace(model_shape("verl_mt://tiny"), unsent=unsent)
    monkeypatch.setattr(replicated, "model_shape", lambda *args, **more: found)

    async def go():
        engine = FakeEngine(stop_at_once, options=replace(OPTIONS, **options))
        assert not await engine.start_without_weights()
        assert not engine.lives[0].starts_empty
        assert (await engine.generate(request([5]))).finish_reason == "stop"
        await engine.close()

    run_async(go())
    assert line is None or any(line in said for said in lines())


def test_the_first_update_does_not_wait_for_an_engine_whose_start_failed(run_async, monkeypatch, lines):
    may_start = asyncio.Event()

    class Slow(FakeClient):
        """The second engine fails, and its next life takes as long as the test likes."""

        number = 0

        async def start(self, timeout_s):
            Slow.number += 1
            if Slow.number == 2:
                raise ConfigError("port taken")
            if Slow.number > 2:
                await may_start.wait()
            await super().start(timeout_s)

    monkeypatch.setattr("verl_mt.extensions.cluster.replicas.replica._RETRY_S", 0.01)

    async def go():
        engine = FakeEngine(stop_at_once, num_replicas=2, make=Slow)
        assert await engine.start_without_weights()
        first = update(0)
        await asyncio.wait_for(engine.apply(first), 10)
        assert engine.metrics()["rollout/replicas"] == 1
        assert (await engine.generate(request([5]))).replica == "engine 0"
        may_start.set()
        await until(lambda: engine.metrics()["rollout/replicas"] == 2)
        assert [replica.holds for replica in engine._replicas] == [first, first]
        await engine.close()

    run_async(go())
    assert lines()[0] == "starting SGLang: 2 engines" and "SGLang: weights sent to 1 engine" in lines()


def test_a_long_start_says_again_and_again_how_far_it_is(run_async, monkeypatch, lines):
    monkeypatch.setattr(start_log, "_EVERY_S", 0.02)
    goes_on = asyncio.Event()

    class Starts:
        def __init__(self, waits):
            self.waits = waits

        async def start(self):
            if self.waits:
                await goes_on.wait()

    async def go():
        started = asyncio.ensure_future(start_log.start_all([Starts(False), Starts(True)], "SGLang"))
        await until(lambda: len(lines()) > 4)
        assert {line.rpartition(" after ")[0] for line in lines()[1:]} == {"SGLang: 1 of 2 engines ready"}
        goes_on.set()
        assert await started == [None, None]

    run_async(go())
    assert lines()[-1].startswith("SGLang: 2 of 2 engines ready after")
    with start_log.phase("loading the model on 2 Ray worker(s)"):
        deadline = time.monotonic() + 60
        while not lines()[-1].startswith("loading the model on 2 Ray worker(s): not done after"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


FIRST_LINE = """
import sys
from verl_mt.config.compose import compose
from verl_mt.extensions.cluster.start_log import show
show(compose(sys.argv[1:]))
assert "torch" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["actor_rollout_ref.rollout.name=sglang"],
            "verl_mt: starting with rollout.name=sglang, trainer.placement=inline",
        ),
        (["trainer.placement=ray"], "verl_mt: starting with rollout.name=local, trainer.placement=ray"),
        ([], ""),
        (["trainer.placement=ray", "trainer.logger=[]"], ""),
    ],
)
def test_the_first_line_comes_before_torch_is_imported_and_only_where_a_start_takes_long(overrides, line):
    done = subprocess.run([sys.executable, "-c", FIRST_LINE, *overrides], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == line


LONG_START = """
import time
from verl_mt.config.compose import compose
from verl_mt.extensions.cluster import start_log
start_log._EVERY_S = 0.05
start_log.show(compose(["trainer.placement=ray"]))
time.sleep(0.5)
start_log.start_log.info("joining")
time.sleep(0.5)
"""


@pytest.mark.slow
def test_the_first_line_is_followed_by_others_until_the_next_phase_begins():
    done = subprocess.run([sys.executable, "-c", LONG_START], capture_output=True, text=True)
    first, *again, last = done.stderr.splitlines()
    assert first.startswith("verl_mt: starting") and last == "verl_mt: joining"
    assert {text.rpartition(" after ")[0] for text in again} == {
        "verl_mt: reading configuration, rows and model: not done"
    }


def test_the_user_may_not_ask_for_random_weights_and_names_the_argument_that_has_the_files_read():
    assert [name for name, _ in other_sampling(EMPTY)] == ["load_format"]
    assert not [*other_sampling({"load_format": "auto"})]
    assert compose(
        ["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.engine_kwargs={load_format: auto}"]
    )


@pytest.mark.parametrize("fails", [False, True])
def test_memory_that_weights_were_gathered_in_is_given_back_before_the_engine_takes_its_cache(
    run_async, monkeypatch, fails
):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))

    class Publisher(WeightPublisher):
        def __init__(self, *args, **more):
            pass

        def publish(self, *args):
            calls.append("published")
            if fails:
                raise RuntimeError("no memory")
            return [None]

        def close(self):
            pass

    async def go():
        here = PublishesHere()
        told = await here.publish(Publisher, (), TensorBuckets(1, []), [None], "")
        await here.close()
        return told

    (problem,) = run_async(go())
    assert calls == ["published", "given back"] and (problem is not None) == fails
