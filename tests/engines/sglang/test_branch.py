"""Replicas as a rollout worker asks them: on paper, in the process of the engine that keeps them."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from engine_models import request
from fake_client import until
from test_hosted import Host, Ranks

from verl_mt.errors import EngineError, EngineGoneError
from verl_mt.extensions.cluster.sglang import engine as engine_module
from verl_mt.extensions.cluster.sglang.engine import SGLangEngine
from verl_mt.extensions.cluster.sglang.options import SGLangOptions
from verl_mt.plugins import load_object

pytestmark = pytest.mark.slow  # event loops, deadlines


@pytest.fixture(autouse=True)
def no_sglang_needed(monkeypatch):
    monkeypatch.setattr(engine_module, "require_sglang", lambda: None)


class FarHost(Host):
    """It can be asked from another event loop, too."""

    async def later(self, method, *args):
        return await self.call(method, *args)

    def generated(self):
        return sum(name == "generate" for life in self.lives for name, _ in life.calls)


def engine_of(num_hosts, **more):
    hosts = tuple(FarHost(number) for number in range(num_hosts))
    options = SGLangOptions("verl_mt://tiny", 100, end_token_ids=frozenset({3}), timeout_s=600.0, hosts=hosts, **more)
    return SGLangEngine(options), hosts


async def branch_of(engine, worker=0):
    made = pickle.loads(pickle.dumps(engine.branch()))
    branch = load_object(made.path, what="a branch")(*made.args, worker)
    branch.say = engine.hear
    branch.hear(engine.news())
    await branch.start()
    return branch


async def ask(branch, name, prompt=(5, 6, 7)):
    branch.open_session(name, 0)
    try:
        return await branch.generate(request(list(prompt), name))
    finally:
        branch.close_session(name)


def test_branches_ask_the_replicas_themselves_and_each_begins_with_another(run_async):
    async def go():
        engine, hosts = engine_of(2)
        await engine.start()
        branches = [await branch_of(engine, worker) for worker in range(2)]
        outputs = [await ask(branch, "a") for branch in branches]
        assert [output.replica for output in outputs] == ["rank 0", "rank 1"]
        # The prompt once before its samples, then the sample.
        assert [host.generated() for host in hosts] == [2, 2]
        assert [output.token_ids for output in outputs] == [[3], [3]]
        with pytest.raises(EngineError, match="not from a rollout worker"):
            await branches[0].apply(Ranks().update(1))
        for branch in branches:
            await branch.close()
        assert engine.metrics()["rollout/replicas"] == 2, "they are not the branches' to end"
        await engine.close()

    run_async(go())


def test_a_branch_asks_the_replicas_that_serve_and_finds_one_that_comes_later(run_async):
    async def go():
        engine, _ = engine_of(2)
        await engine.start()
        version, endpoints = engine.news()
        made = pickle.loads(pickle.dumps(engine.branch()))
        branch = load_object(made.path, what="a branch")(*made.args, 1)
        branch.say = engine.hear
        branch.hear((version, (endpoints[0], None)))
        await branch.start()
        assert (await ask(branch, "a")).replica == "rank 0"
        branch.hear(engine.news())
        await until(lambda: all(replica.is_ready for replica in branch._replicas))
        assert (await ask(branch, "b", (8, 9))).replica == "rank 1"
        assert branch.metrics()["engine/restarts"] == 0
        await branch.close()
        await engine.close()

    run_async(go())


def test_a_branch_hears_of_new_weights_and_forgets_what_caches_held(run_async):
    async def go():
        engine, _ = engine_of(2)
        await engine.start()
        branch = await branch_of(engine)
        await ask(branch, "a")
        assert branch.version == 0 and branch._router._begun
        before = engine.news()
        await engine.apply(Ranks().update(1))
        assert engine.news() != before
        branch.hear(engine.news())
        assert branch.version == 1 and not branch._router._begun
        await branch.close()
        await engine.close()

    run_async(go())


def test_a_replica_that_its_engine_lost_is_asked_again_in_its_next_life(run_async):
    async def go():
        engine, hosts = engine_of(1)
        await engine.start()
        branch = await branch_of(engine)
        hosts[0].lives[0].script = lambda body: None
        asked = asyncio.ensure_future(ask(branch, "a"))
        await until(lambda: hosts[0].generated() == 1)
        hosts[0].lives[0].give_up("killed")
        with pytest.raises(EngineGoneError):
            await asked
        await until(lambda: len(hosts[0].lives) == 2 and engine.metrics()["rollout/replicas"] == 1)
        branch.hear(engine.news())
        assert (await ask(branch, "b")).token_ids == [3]
        await branch.close()
        await engine.close()

    run_async(go())


def test_what_only_a_branch_finds_gone_its_engine_is_told(run_async):
    """A server that somebody starts anew has lost its weights, and the engine has not asked it anything."""

    async def go():
        engine, hosts = engine_of(2)
        await engine.start()
        branch = await branch_of(engine)

        async def broken(method, *args):
            raise EngineGoneError("connection refused")

        hosts[0].later, later = broken, hosts[0].later
        with pytest.raises(EngineGoneError, match="connection refused"):
            await ask(branch, "a")
        hosts[0].later = later
        await until(lambda: engine.metrics()["engine/restarts"] == 1)
        assert (await ask(branch, "b")).replica == "rank 1", "the other one meanwhile"
        branch.hear(engine.news())
        await until(lambda: branch.metrics()["rollout/replicas"] == 2)
        await branch.close()
        await engine.close()

    run_async(go())


def test_an_engine_at_the_other_end_of_this_processs_socket_has_no_branch():
    options = SGLangOptions("verl_mt://tiny", 100, end_token_ids=frozenset({3}), timeout_s=600.0)
    assert SGLangEngine(options).branch() is None
