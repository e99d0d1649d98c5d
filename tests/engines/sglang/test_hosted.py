"""Engines beside ranks, with hosts on paper: who gets weights, and what becomes of those who do not."""

from __future__ import annotations

import asyncio

import pytest
from engine_models import request
from fake_client import FakeClient, answer, until

from verl_mt.engines.base import EngineHost, FromRanks
from verl_mt.errors import EngineError, EngineGoneError
from verl_mt.extensions.cluster.replicas.processes import ProcessGroup
from verl_mt.extensions.cluster.sglang import engine as engine_module
from verl_mt.extensions.cluster.sglang.engine import SGLangEngine
from verl_mt.extensions.cluster.sglang.options import SGLangOptions

pytestmark = pytest.mark.slow  # event loops, deadlines


@pytest.fixture(autouse=True)
def no_sglang_needed(monkeypatch):
    monkeypatch.setattr(engine_module, "require_sglang", lambda: None)


class There(FakeClient):
    """What a host makes: the engine's own client, on paper."""

    async def launch(self, empty, *earlier):
        self.empty = empty
        self.earlier = earlier
        return ProcessGroup("here", len(earlier) + 7, None)

    async def end(self, lost):
        self.lost = lost
        await self.stop()


class Host(EngineHost):
    """Makes it in this process; each life is a new one."""

    def __init__(self, number, beside=True):
        self.name, self.num_ranks, self.devices = f"rank {number}", 1, () if beside else None
        self.rank, self.on_gpu = number if beside else None, False
        self.lives, self.made_with = [], []

    async def make(self, path, arguments, environment):
        assert path.endswith("ColocatedClient")
        self.made_with.append((arguments, environment))
        self.lives.append(There(lambda body: answer([3], "stop", matched=3), []))

    async def call(self, method, *args):
        if not self.lives:
            raise EngineGoneError("nothing runs there")
        return await getattr(self.lives[-1], method)(*args)

    def caller(self):
        return self

    async def end(self):
        pass

    def names(self):
        return [name for name, _ in self.lives[-1].calls]


class Ranks:
    """What a worker group does for `FromRanks`: `problems` of this update by the host's name."""

    def __init__(self):
        self.handed: list[list[str]] = []
        self.publishers: list[str] = []
        self.problems: dict[str, Exception] = {}

    def update(self, version):
        async def publish(receivers, publisher, arguments):
            names = [receiver.call.ask.name for receiver in receivers]
            self.handed.append(names)
            self.publishers.append(publisher.rpartition(".")[2])
            return [self.problems.pop(name, None) for name in names]

        return FromRanks(version, publish)


def engine_of(num_hosts, *, beside=True):
    hosts = tuple(Host(number, beside) for number in range(num_hosts))
    options = SGLangOptions("verl_mt://tiny", 100, end_token_ids=frozenset({3}), timeout_s=600.0, hosts=hosts)
    return SGLangEngine(options), hosts


def test_all_replicas_get_an_update_in_one_pass_of_the_ranks(run_async):
    async def go():
        engine, hosts = engine_of(3)
        ranks = Ranks()
        await engine.start()
        assert engine.capabilities.transports == {"from_ranks", "tensor_buckets", "disk"}
        # Equal engines with equal seeds would sample the same; no GPU means none of those that the machine may have.
        assert len({host.made_with[0][0]["random_seed"] for host in hosts}) == 3
        assert all(host.made_with[0][1] == {"CUDA_VISIBLE_DEVICES": ""} for host in hosts)
        await engine.apply(ranks.update(1))
        assert ranks.handed == [["rank 0", "rank 1", "rank 2"]] and engine.version == 1
        wanted = ["start", "pause_generation", "begin_weight_update", "end_weight_update", "continue_generation"]
        assert [host.names() for host in hosts] == [wanted] * 3
        await engine.close()

    run_async(go())


def test_engines_on_devices_of_their_own_get_one_broadcast_and_keep_their_memory(run_async):
    async def go():
        engine, hosts = engine_of(2, beside=False)
        ranks = Ranks()
        await engine.start()
        # What their process sees is theirs.
        assert all(host.made_with[0][1] == {} for host in hosts)
        await engine.apply(ranks.update(1))
        assert (ranks.handed, ranks.publishers) == ([["rank 0", "rank 1"]], ["WeightBroadcaster"])
        assert not engine._options.takes_turns and not engine.capabilities.frees_memory
        await engine.close()

    run_async(go())


def test_a_replica_that_goes_away_in_an_update_gets_it_in_its_next_life_and_the_others_serve(run_async):
    async def go():
        engine, hosts = engine_of(2)
        ranks = Ranks()
        await engine.start()
        ranks.problems["rank 1"] = EngineGoneError("killed between two buckets")
        await engine.apply(ranks.update(1))
        assert ranks.handed == [["rank 0", "rank 1"], ["rank 1"]]
        assert len(hosts[1].lives) == 2 and "broke off" in hosts[1].lives[0].lost
        # Who held the first engine may not have been able to end it: the next is told which it was.
        assert [life.earlier for life in hosts[1].lives] == [(), (ProcessGroup("here", 7, None),)]
        assert engine.pids == [7, 8]
        assert all(replica.holds is not None for replica in engine._replicas)
        assert engine.metrics()["engine/restarts"] == 1
        await engine.close()

    run_async(go())


def test_weights_that_do_not_fit_are_an_error_and_no_replica_serves_a_part_of_them(run_async):
    async def go():
        engine, hosts = engine_of(2)
        ranks = Ranks()
        await engine.start()
        ranks.problems["rank 0"] = EngineError("weight update: the model has no weight 'x'")
        with pytest.raises(EngineError, match="no weight 'x'"):
            await engine.apply(ranks.update(1))
        assert hosts[0].lives[0].gone.is_set() and not hosts[1].lives[0].gone.is_set()
        await engine.close()

    run_async(go())


def test_a_request_at_an_engine_that_is_lost_is_told_and_the_next_life_answers(run_async):
    async def go():
        engine, hosts = engine_of(1)
        await engine.start()
        hosts[0].lives[0].script = lambda body: None
        asking = asyncio.ensure_future(engine.generate(request([5])))
        await until(lambda: "generate" in hosts[0].names())
        hosts[0].lives[0].give_up("killed by signal 9")
        with pytest.raises(EngineGoneError, match="killed by signal 9"):
            await asking
        assert (await engine.generate(request([5]))).token_ids == [3] and len(hosts[0].lives) == 2
        await engine.close()

    run_async(go())
