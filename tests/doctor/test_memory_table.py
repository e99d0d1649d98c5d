"""What the doctor says of a rank's memory, for eight models on eight devices and three offloads, and for the two runs
that were measured on a GPU (benchmarks/RESULTS.md). README.md's table is computed in the same way."""

from __future__ import annotations

import re

import pytest
import torch
from code_blocks import REPO
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from verl_mt.config.compose import compose
from verl_mt.extensions.inspection.doctor import resources
from verl_mt.extensions.inspection.doctor.findings import Subject
from verl_mt.extensions.inspection.doctor.resources import Demand

pytestmark = pytest.mark.slow  # models of 100 billion parameters, without weights

ACTOR = "actor_rollout_ref.actor."
OFFLOADS = {
    "none": (),
    "optimizer": (f"{ACTOR}optimizer_offload=True",),
    "both": (f"{ACTOR}optimizer_offload=True", f"{ACTOR}param_offload=True"),
}


def sizes(kind, width, intermediate, layers, heads, vocabulary, **more):
    """`heads`: of queries, and of keys and values."""
    return kind(
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=vocabulary,
        **{"tie_word_embeddings": False, "head_dim": 128, **more},
    )


QWEN = 151_936
MODELS = {
    "Qwen3-0.6B": sizes(Qwen3Config, 1024, 3072, 28, (16, 8), QWEN, tie_word_embeddings=True),
    "Qwen3-4B": sizes(Qwen3Config, 2560, 9728, 36, (32, 8), QWEN, tie_word_embeddings=True),
    "Qwen3-8B": sizes(Qwen3Config, 4096, 12288, 36, (32, 8), QWEN),
    "Qwen3-14B": sizes(Qwen3Config, 5120, 17408, 40, (40, 8), QWEN),
    "Qwen3-32B": sizes(Qwen3Config, 5120, 25600, 64, (64, 8), QWEN),
    "Llama-3.3-70B": sizes(LlamaConfig, 8192, 28672, 80, (64, 8), 128_256),
    "Qwen3-30B-A3B": sizes(
        Qwen3MoeConfig, 2048, 6144, 48, (32, 4), QWEN, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "GLM-4.5-Air": sizes(
        Glm4MoeConfig,
        4096,
        10944,
        46,
        (96, 8),
        151_552,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
}
# Billions of parameters; GB per GPU without and with `optimizer_offload`. For six models the GB were added up by hand
# beforehand (weights, gradients, gathered units, activations, 5 GB of contexts, buckets and graphs).
TABLE = {
    "Qwen3-0.6B": (0.60, 8.7, 7.8),
    "Qwen3-4B": (4.02, 21, 15),
    "Qwen3-8B": (8.19, 37, 24),
    "Qwen3-14B": (14.77, 56, 34),
    "Qwen3-32B": (32.76, 102, 53),
    "Llama-3.3-70B": (70.55, 205, 99),
    "Qwen3-30B-A3B": (30.53, 89, 41),
    "GLM-4.5-Air": (106.9, 299, 121),
}


def demand(config: PretrainedConfig, *words: str) -> Demand:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    dtype = "actor_rollout_ref.model.dtype=bfloat16"
    return Demand.of(Subject(compose([dtype, *words]), module=module))


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", MODELS)
def test_memory_of_eight_models_on_eight_gpus(name, offload):
    found = demand(
        MODELS[name],
        "trainer.placement=ray",
        "trainer.n_workers_per_node=8",
        "trainer.device=cuda",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"{ACTOR}ppo_max_token_len=16384",
        "data.train_batch_size=128",
        "data.max_prompt_length=4096",
        "actor_rollout_ref.rollout.response_length=4096",
        *OFFLOADS[offload],
    )
    billions, whole, offloaded = TABLE[name]
    assert found.peak_bytes / 1e9 == pytest.approx(whole if offload == "none" else offloaded, rel=0.05)
    # Weights of 2 bytes leave only for rollouts; moments and exact weights, 12 bytes, for good.
    away = {"none": 0, "optimizer": 12, "both": 14}[offload] * billions / 8
    assert found.host_bytes / 1e9 == pytest.approx(away, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "checkpointing", "measured"),
    [
        (sizes(Qwen2Config, 896, 4864, 24, (14, 2), QWEN, head_dim=64, tie_word_embeddings=True), False, 57),
        (sizes(Qwen2Config, 1536, 8960, 28, (12, 2), QWEN, tie_word_embeddings=True), True, 34),
    ],
)
def test_memory_of_an_update_that_was_measured_on_one_gpu(shape, checkpointing, measured):
    found = demand(
        shape,
        "trainer.device=cuda",
        "actor_rollout_ref.rollout.name=sglang",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={checkpointing}",
        f"{ACTOR}ppo_max_token_len=32768",
        "data.train_batch_size=128",
        "data.max_prompt_length=4096",
        "actor_rollout_ref.rollout.response_length=4096",
    )
    assert found.pass_bytes == found.reduce_bytes == 0, "one rank gathers nothing"
    without_engine = found.peak_bytes - found.other_bytes
    assert without_engine / 1e9 == pytest.approx(measured, rel=0.2), vars(found)


def test_a_run_that_does_not_fit_is_an_error_and_fits_with_an_offload(monkeypatch):
    words = [
        "trainer.placement=ray",
        "trainer.n_workers_per_node=8",
        "trainer.device=cuda",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.model.dtype=bfloat16",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    ]
    monkeypatch.setattr(resources, "device_memory", lambda subject: 80e9)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(MODELS["Qwen3-32B"])
    (refused,) = resources.memory(Subject(compose(words), module=module))
    assert refused.status == "error" and "optimizer_offload=True" in refused.fix
    (taken,) = resources.memory(Subject(compose([*words, *OFFLOADS["optimizer"]]), module=module))
    assert taken.status == "ok" and "49.1 GB of main memory" in taken.text


README = re.findall(r"(?m)^\| (\S+) \| (.*) \|$", (REPO / "README.md").read_text().partition("on my GPUs?")[2])
FITS = {name: cells.split(" | ") for name, cells in README if name in MODELS}
GPU_GB = 80


def on_gpus(name: str, gpus: int, *words: str) -> float:
    """GB of one of several GPUs with the settings that README.md names."""
    ranks = ("trainer.placement=ray", f"trainer.n_workers_per_node={gpus}") if gpus > 1 else ()
    found = demand(
        MODELS[name],
        "trainer.device=cuda",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"{ACTOR}ppo_max_token_len=16384",
        "data.train_batch_size=128",
        "data.max_prompt_length=4096",
        "actor_rollout_ref.rollout.response_length=4096",
        *ranks,
        *words,
    )
    return found.peak_bytes / 1e9


def as_written(gigabytes: float) -> str:
    return f"**{gigabytes:,.0f}**" if gigabytes <= 0.9 * GPU_GB else f"{gigabytes:,.0f}"


@pytest.mark.parametrize("name", FITS)
def test_the_readmes_table_of_models_that_fit_is_the_doctors(name):
    assert len(FITS) == 6
    adapters = on_gpus(name, 1, "actor_rollout_ref.model.lora_rank=32")
    whole = [[on_gpus(name, gpus, *OFFLOADS[kind]) for kind in ("none", "optimizer")] for gpus in (1, 2, 4, 8)]
    assert FITS[name] == [as_written(adapters), *(" / ".join(map(as_written, pair)) for pair in whole)]
