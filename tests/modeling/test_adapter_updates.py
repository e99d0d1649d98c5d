"""LoRA: which engines get adapters in place of merged weights, and what is sent to them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from lora_toys import adapted, small_model
from safetensors.torch import load

from verl_mt.config.actor import ModelConfig
from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.engines.base import Receiver
from verl_mt.errors import ConfigError, EngineError, EngineGoneError
from verl_mt.extensions.cluster.replicas.adapters import AdapterPublisher, AdapterShape, adapter_shape
from verl_mt.extensions.cluster.sglang.options import SGLangOptions
from verl_mt.extensions.cluster.vllm import options as of_vllm
from verl_mt.extensions.cluster.vllm.options import VLLMOptions
from verl_mt.modeling.lora import adapter_of
from verl_mt.workers.weight_sync import LiveWeights

REPO = Path(__file__).parents[2]


def options_of(name: str = "sglang", *, rank: int = 8, model=None, **rollout):
    config = ActorRolloutRefConfig(
        model=ModelConfig(lora_rank=rank, **(model or {})), rollout=RolloutConfig(name=name, **rollout)
    )
    kind = {"sglang": SGLangOptions, "vllm": VLLMOptions}[name]
    return kind.from_config(config, end_token_ids=[1], max_model_len=384, seed=3)


@pytest.fixture(autouse=True)
def no_gpu_and_a_vllm(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(of_vllm, "python_of", lambda keys: "python")
    monkeypatch.setattr(of_vllm, "_found", lambda python: None)


def test_engines_of_a_run_take_adapters_and_are_told_their_size(caplog):
    caplog.set_level(logging.INFO, logger="verl_mt.start")
    arguments = options_of(rank=9).engine_arguments()
    assert {"enable_lora": True, "max_lora_rank": 9, "lora_backend": "torch_native"}.items() <= arguments.items()
    assert {"q_proj", "down_proj"} < set(arguments["lora_target_modules"])
    assert options_of("vllm", rank=9).arguments()["engine"].items() >= {"max_lora_rank": 16, "max_loras": 1}.items()
    assert options_of("vllm", rank=512).arguments()["engine"]["max_lora_rank"] == 512
    assert "LoRA: engines get the adapters at each update, 0.4 MB" in caplog.text


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_without_lora_or_if_you_say_so_engines_get_all_weights_and_nothing_is_said(caplog, name):
    for options in (options_of(name, rank=0), options_of(name, lora_updates="merged")):
        assert options.adapters is None and "enable_lora" not in str(vars(options))
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("sglang", {"servers": ["http://127.0.0.1:1"]}, "you started the servers"),
        ("vllm", {"weight_transport": "disk"}, "weight_transport=disk writes whole models"),
        ("sglang", {"launch_servers": 1}, "launch_servers without Ray starts HTTP servers"),
        ("vllm", {"rank": 513}, "rank 512 at most, and model.lora_rank is 513"),
        (
            "sglang",
            {"model": {"lora_target_modules": ["layers.0.self_attn.q_proj"]}},
            "and these are of model.layers.0",
        ),
        ("sglang", {"model": {"lora_target_modules": ["q_proj", "o_proj"]}}, "only where q_proj and v_proj both have"),
        ("sglang", {"model": {"lora_target_modules": ["up_proj"]}}, "only beside those of gate_proj"),
    ],
)
def test_where_an_engine_takes_none_it_gets_merged_weights_and_one_line_says_why(caplog, name, words, reason):
    caplog.set_level(logging.INFO, logger="verl_mt.start")
    assert options_of(name, **words).adapters is None
    (line,) = caplog.messages
    assert line.startswith("LoRA: engines get merged weights at each update: ") and reason in line
    with pytest.raises(ConfigError, match=r"lora_updates=adapters: .*\. Set lora_updates=merged"):
        options_of(name, lora_updates="adapters", **words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({}, "free_cache_engine=True frees the base weights"),
        ({"free_cache_engine": False}, "no float32"),
        ({"free_cache_engine": False, "model": {"dtype": "bfloat16"}}, ""),
    ],
)
def test_on_a_gpu_the_base_weights_have_to_stay_and_kernels_have_16_bits(monkeypatch, words, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reason in options_of("sglang", lora_updates="merged", **words).merges_adapters(8)
    assert bool(reason) == (options_of("sglang", **words).adapters is None)


def test_an_engine_that_stacks_layers_gets_adapters_of_those_that_it_fills_in():
    for targets in (["q_proj", "v_proj"], ["gate_proj"], ["o_proj", "down_proj"], ["all-linear"]):
        assert options_of("sglang", model={"lora_target_modules": targets}).adapters is not None
    assert options_of("vllm", model={"lora_target_modules": ["up_proj"]}).adapters is not None


def test_other_architectures_get_adapters_only_if_you_ask(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="verl_mt.start")
    monkeypatch.setattr("verl_mt.extensions.cluster.replicas.options.ARCHITECTURES", {"LlamaForCausalLM"})
    assert options_of("vllm").adapters is None and "Qwen3ForCausalLM is none of LlamaForCausalLM" in caplog.messages[0]
    assert options_of("vllm", lora_updates="adapters").adapters is not None


def test_an_argument_that_the_key_decides_is_refused():
    for name in ("sglang", "vllm"):
        with pytest.raises(ConfigError, match=r"enable_lora come from other keys .*\.lora_updates"):
            options_of(name, engine_kwargs={"enable_lora": True})


def test_models_whose_layers_have_other_names_in_engines_are_merged():
    config = ModelConfig(lora_rank=4)
    assert isinstance(adapter_shape(config, small_model()), AdapterShape)
    phi = small_model("Phi3", pad_token_id=0)
    assert "these are of gate_up_proj, qkv_proj" in adapter_shape(config, phi)
    phi.config.vision_config = object()
    assert "vision tower" in adapter_shape(config, phi)


def test_the_bytes_of_the_adapter_reach_each_engine_in_its_dtype():
    policy = adapted(small_model())
    live = LiveWeights(policy, adapters=True)
    shape = adapter_shape(ModelConfig(lora_rank=4), small_model())
    assert {name: tuple(tensor.shape) for name, tensor in live} == shape.weights
    assert live.num_bytes == shape.num_bytes(torch.float32)
    told = []

    def takes(name, body, timeout_s):
        told.append((name, body, timeout_s))

    def is_gone(name, body, timeout_s):
        raise EngineGoneError("gone")

    publisher = AdapterPublisher(shape.weights, "bfloat16", 5.0, shape.config, address="")
    problems = publisher.publish(live, 7, 1, [Receiver(takes), Receiver(is_gone)])
    assert problems[0] is None and str(problems[1]) == "gone"
    ((name, body, timeout_s),) = told
    assert (name, body["weight_version"], timeout_s) == ("load_adapter", "7", 5.0)
    assert json.loads(json.dumps(body["config"])) == body["config"] and body["config"]["lora_alpha"] == 16
    got = load(body["adapter"])
    for name, tensor in adapter_of(policy).named():
        assert torch.equal(got[name], tensor.bfloat16())
    with pytest.raises(EngineError, match="has no weight 'other'"):
        publisher.publish([("other", torch.zeros(1))], 8, 1, [Receiver(takes)])


def test_the_table_of_the_page_is_what_the_benchmark_prints(monkeypatch):
    import runpy

    monkeypatch.syspath_prepend(REPO / "benchmarks")
    page, command = (
        (REPO / "docs" / "scaling.md").read_text(),
        runpy.run_path(str(REPO / "benchmarks/adapter_bytes.py")),
    )
    for update in command["updates"]():
        assert command["row"](update) in page
