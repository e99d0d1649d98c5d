"""A policy with low-rank adapters reaches a real SGLang as merged weights."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_models import request
from live import ROUNDING, worst_difference

from verl_mt.config.actor import ModelConfig
from verl_mt.modeling.lora import add_adapters, without_adapters
from verl_mt.workers.weight_sync import weight_update_for

pytestmark = pytest.mark.sglang


def test_what_the_engine_computes_is_the_policy_with_its_adapters(colocated, lab, run):
    policy = add_adapters(copy.deepcopy(lab.module), ModelConfig(lora_rank=8), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    run(colocated.apply(weight_update_for(colocated.capabilities, policy, 7)))
    for number, prompt in enumerate(lab.prompts[:6]):
        ids = prompt.ids
        output = run(colocated.generate(request(ids, temperature=float(number % 2), max_new_tokens=40)))
        assert output.version_spans[0].version == 7
        assert worst_difference(policy, ids, output, float(number % 2)) < ROUNDING
        assert worst_difference(without_adapters(policy), ids, output, float(number % 2)) < ROUNDING
        assert worst_difference(lab.module, ids, output, float(number % 2)) > 1e-3
