"""What the local engine refuses, how it fails, and what it leaves behind."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from engine_models import PROMPT, VOCAB, assert_exact, engine_of, make_model, random_ids, request

from verl_mt.engines.base import InPlace
from verl_mt.errors import EngineError, EngineGoneError


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (request(random_ids(256, 0)), "256 input tokens leave none to sample within max_model_len=256"),
        (request([]), "input_ids is empty"),
        (request([5, VOCAB]), f"vocabulary of {VOCAB}"),
        (request([5], stop=("x",)), "without `decode`"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(qwen3, run_async, ask, message):
    async def go():
        async with engine_of(qwen3) as engine:
            with pytest.raises(EngineError, match=message):
                await engine.generate(ask)
            assert len((await engine.generate(request(PROMPT))).token_ids) == 8

    run_async(go())


class Breaks(torch.nn.Module):
    """Raises at its k-th forward pass."""

    def __init__(self, model, at):
        super().__init__()
        self.module, self.config, self.left = model, model.config, at

    def forward(self, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory")
        return self.module(**kwargs)


def test_a_failure_in_the_engine_thread_reaches_everyone(qwen3, run_async):
    async def go():
        async with engine_of(Breaks(qwen3, at=3), max_num_seqs=2) as engine:
            tasks = [engine.generate(request(random_ids(5, i))) for i in range(5)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(r, EngineGoneError) and "out of memory" in str(r) for r in results)
            assert isinstance(results[0].__cause__, RuntimeError)
            for call in (engine.generate(request(PROMPT)), engine.pause(), engine.abort("x"), engine.apply(InPlace(1))):
                with pytest.raises(EngineGoneError, match="out of memory"):
                    await call
            engine.close_session("anything")

    run_async(go())


def test_close_ends_waiting_requests_is_idempotent_and_leaves_no_thread(qwen3, run_async):
    before = set(threading.enumerate())

    async def go():
        async with engine_of(qwen3) as engine:
            await engine.pause()
            task = asyncio.ensure_future(engine.generate(request(PROMPT)))
            await asyncio.sleep(0.02)
            await engine.close()
            await engine.close()
            with pytest.raises(EngineGoneError, match="closed"):
                await task
            with pytest.raises(EngineGoneError, match="closed"):
                await engine.generate(request(PROMPT))

    run_async(go())
    assert not [t for t in set(threading.enumerate()) - before if "engine" in t.name]


def test_the_actors_module_is_left_as_it_was(run_async):
    model = make_model(seed=4)
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    implementation = model.config._attn_implementation

    async def go():
        async with engine_of(model) as engine:
            assert_exact(model, PROMPT, await engine.generate(request(PROMPT)))
            assert [m.training for m in model.modules()] == modes

    run_async(go())
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(p.grad, g) and p.requires_grad for p, g in zip(model.parameters(), gradients))
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()


def test_logits_that_are_not_finite_fail_the_request_and_spare_later_ones(run_async):
    model = make_model(seed=5)

    async def go():
        async with engine_of(model) as engine:
            weight = model.model.layers[0].self_attn.v_proj.weight.data
            good = weight.clone()
            weight.fill_(float("nan"))
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate(request(PROMPT))
            weight.copy_(good)
            await engine.apply(InPlace(1))
            assert_exact(model, PROMPT, await engine.generate(request(PROMPT)))

    run_async(go())


def test_released_memory_comes_back_by_itself(qwen3, run_async):
    async def go():
        async with engine_of(qwen3) as engine:
            first = await engine.generate(request(PROMPT, "s"))
            cache = engine._batcher.slots.cache
            assert cache.num_bytes > 0
            await engine.release_memory()
            assert cache.num_bytes == 0
            await engine.resume_memory()
            second = await engine.generate(request(PROMPT, "s"))
            assert second.token_ids == first.token_ids

    run_async(go())
