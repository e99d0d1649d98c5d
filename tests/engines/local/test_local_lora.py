"""The local engine over a module with low-rank adapters says what the merged model says."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from engine_models import engine_of, make_model, plain_log_probs, random_ids, request

from verl_mt.config.actor import ModelConfig
from verl_mt.engines.base import InPlace
from verl_mt.modeling.lora import add_adapters, without_adapters

pytestmark = pytest.mark.slow  # models


def adapted(architecture):
    model = add_adapters(make_model(architecture), ModelConfig(lora_rank=4), seed=0)
    shake(model, 1)
    return model


@torch.no_grad()
def shake(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


async def turns(model, prompts, **sampling):
    async with engine_of(model, max_prefill_tokens=33) as engine:
        return await asyncio.gather(*[engine.generate(request(p, max_new_tokens=20, **sampling)) for p in prompts])


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2"])
def test_greedy_tokens_and_log_probs_are_those_of_the_merged_model(architecture, run_async):
    model = adapted(architecture)
    merged = without_adapters(model)
    prompts = [random_ids(length, seed) for seed, length in enumerate([3, 40, 17, 29])]
    with_adapters, plain = (run_async(turns(m, prompts)) for m in (model, merged))
    base = run_async(turns(make_model(architecture), prompts))
    for prompt, one, other in zip(prompts, with_adapters, plain):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=1e-5)
        expected = plain_log_probs(merged, prompt, one.token_ids)
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, atol=1e-5, rtol=1e-5)
    assert [o.token_ids for o in base] != [o.token_ids for o in with_adapters], "the adapters change what is said"


@pytest.mark.slow
def test_new_adapters_are_what_the_next_turn_is_sampled_with(run_async):
    model = adapted("Qwen3")
    prompt = random_ids(12, 5)

    async def go():
        async with engine_of(model) as engine:
            before = await engine.generate(request(prompt, "s"))
            shake(model, 2)
            await engine.apply(InPlace(1))
            return before, await engine.generate(request(prompt, "s"))

    before, after = run_async(go())
    expected = plain_log_probs(without_adapters(copy.deepcopy(model)), prompt, after.token_ids)
    torch.testing.assert_close(torch.tensor(after.log_probs), expected, atol=1e-5, rtol=1e-5)
    assert before.log_probs != after.log_probs
