"""The engine of docs/your_own_engine.md with several replicas, whose places are in this process here;
test_ray_own_engine.py has real ones, beside real ranks."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch
from code_blocks import REPO, blocks_of

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.config_paths import TINY_MODEL, resolve_model_path
from verl_mt.data.requests import GenerationRequest, SamplingParams
from verl_mt.engines import build, check
from verl_mt.engines.base import EngineHost, EngineSetup, FromRanks
from verl_mt.errors import ConfigError, EngineError
from verl_mt.plugins import load_object

pytestmark = pytest.mark.slow  # loads models


class Here(EngineHost):
    """What it holds is called on a loop of its own where a rank asks, as in another process."""

    num_ranks, on_gpu, devices = 1, False, ()

    def __init__(self, rank: int):
        self.name, self.rank, self.made = f"rank {rank}", rank, None

    async def make(self, path, *args):
        self.made = load_object(path, what="a replica")(*args)

    async def call(self, method, *args):
        return await getattr(self.made, method)(*args)

    def caller(self):
        return lambda method, *args, timeout_s: asyncio.run(self.call(method, *args))

    async def end(self):
        self.made = None


@pytest.fixture
def setup(tmp_path, monkeypatch) -> EngineSetup:
    for block in blocks_of(REPO / "docs" / "your_own_engine.md"):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_engine", "my_replicas"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    config = ActorRolloutRefConfig(rollout=RolloutConfig(name="my_replicas.py:MyReplicas"))
    check(config, TrainerConfig(placement="ray", n_workers_per_node=2, device="cpu"))
    with pytest.raises(ConfigError, match=r"MyReplicas needs trainer\.placement=ray"):
        check(config, TrainerConfig())
    return EngineSetup(config, None, frozenset({0}), None, 64, False, seed=0, hosts=(Here(0), Here(1)))


def asked(session: str, number: int) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    return GenerationRequest([5, 6, 7 + number], sampling, request_id=f"{session}{number}", session_id=session)


def test_conversations_are_spread_and_stay_and_all_replicas_take_an_update(setup, run_async):
    engine = build(setup)
    weights = {name: p.detach().clone() for name, p in load_model().named_parameters()}
    weights = {name: torch.zeros_like(p) if name == "model.norm.weight" else p for name, p in weights.items()}

    async def publish(receivers, publisher, arguments):
        give = load_object(publisher, what="a publisher")(*arguments, address="127.0.0.1").publish
        return await asyncio.to_thread(give, iter(weights.items()), 1, 1024, receivers)

    async def go():
        await engine.start()
        before = [await engine.generate(asked(session, k)) for session in "abc" for k in range(2)]
        await engine.apply(FromRanks(1, publish))
        after = [await engine.generate(asked(session, 0)) for session in "ab"]
        await engine.close()
        return before, after

    before, after = run_async(go())
    assert [one.replica for one in before] == ["rank 0"] * 2 + ["rank 1"] * 2 + ["rank 0"] * 2
    assert {span.version for one in before for span in one.version_spans} == {0}
    assert engine.version == 1 and {span.version for one in after for span in one.version_spans} == {1}
    # Without the last norm all logits are 0, and every token as likely as any other.
    even = -torch.log(torch.tensor(float(load_model().config.vocab_size))).item()
    assert all(abs(log_prob - even) < 1e-4 for one in after for log_prob in one.log_probs)
    assert any(abs(log_prob - even) > 0.1 for one in before for log_prob in one.log_probs)
    assert all(host.made is None for host in setup.hosts)


def test_what_a_replica_refuses_is_the_update_s_error(setup, run_async):
    engine = build(setup)

    async def publish(receivers, publisher, arguments):
        return [None, EngineError("not that shape")]

    async def go():
        with pytest.raises(EngineError, match="not that shape"):
            await engine.apply(FromRanks(1, publish))

    run_async(go())
    assert engine.version == 0


def load_model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve_model_path(TINY_MODEL))
