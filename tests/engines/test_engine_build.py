"""From the config to an engine."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
from engine_models import request
from vision_toys import vision_model

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig, Config, TrainerConfig
from verl_mt.engines import build, check
from verl_mt.engines.base import EngineSetup, check_request
from verl_mt.errors import ConfigError, EngineError
from verl_mt.extensions.cluster.config import problems
from verl_mt.extensions.cluster.sglang.options import check_devices
from verl_mt.extensions.cluster.workers.ray_group import rank_environment


def made(model, max_model_len=64, trainer=None, **config):
    trainer = trainer or TrainerConfig()
    config = ActorRolloutRefConfig(rollout=RolloutConfig(**config))
    check(config, trainer)
    return build(EngineSetup(config, model, frozenset({3}), None, max_model_len, trainer.deterministic, seed=0))


def test_local_samples_from_the_module_it_was_given(qwen3, run_async):
    async def go():
        engine = made(qwen3, dtype="float32")
        output = await engine.generate(request([1, 2, 3]))
        await engine.close()
        return output

    assert len(run_async(go()).token_ids) >= 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "scripted"}, r"ScriptedEngine\(turns\)"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16: .*the actor's own weights, which are float32"),
        (
            {"name": "sglang", "trainer": TrainerConfig(deterministic=True)},
            "trainer.deterministic needs rollout.name=local",
        ),
        (
            {"trainer": TrainerConfig(placement="ray", device="cuda")},
            "name=local with .*on the CPU.*use sglang",
        ),
    ],
)
def test_what_an_engine_does_not_take_is_refused(qwen3, config, message):
    with pytest.raises(ConfigError, match=message):
        made(qwen3, **config)


def test_a_class_derived_from_the_text_engine_is_not_passed_over_for_a_model_that_sees(tmp_path):
    (tmp_path / "mine.py").write_text("from verl_mt.engines.local import LocalEngine\nclass Mine(LocalEngine): pass\n")
    with pytest.raises(ConfigError, match=r"mine.py:Mine: .* takes images, which Mine cannot .*Derive from .*Vision"):
        made(vision_model(), name=f"{tmp_path / 'mine.py'}:Mine")


def test_local_without_the_actors_module_or_beyond_its_positions_is_refused(qwen3):
    with pytest.raises(ConfigError, match="actor's own module, but got NoneType"):
        made(None)
    with pytest.raises(ConfigError, match="max_model_len=257 is more than the model's 256"):
        made(qwen3, max_model_len=257)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (request([]), "input_ids is empty"),
        (request([1] * 100), "100 input tokens leave none to sample within max_model_len=100"),
        (request([1, 50]), "vocabulary of 50"),
        (request([1], stop=("",)), "one is empty"),
        (request([1], stop=("x",)), "without `decode` cannot honour them"),
        (replace(request([1]), media={"inputs": (1,)}), "the engine serves text only, got media .'inputs'"),
    ],
)
def test_what_cannot_be_served_is_found_before_an_engine_sees_it(ask, message):
    with pytest.raises(EngineError, match=message):
        check_request(ask, "the engine", max_model_len=100, vocab_size=50, finds_stops=False)


@pytest.mark.parametrize(
    ("ranks", "rollout", "message"),
    [
        (3, {}, r"size=2 does not divide trainer\.n_workers_per_node=3: "),
        (4, {}, None),
        (3, {"servers": ["http://a:1"]}, None),
        (3, {"nnodes": 1, "n_workers_per_node": 2}, None),
    ],
)
def test_an_engine_of_more_devices_than_ranks_have_is_refused_whoever_wrote_it(ranks, rollout, message):
    trainer = TrainerConfig(placement="ray", n_workers_per_node=ranks)
    rollout = RolloutConfig(name="mine.py:Mine", tensor_model_parallel_size=2, **rollout)
    found = list(problems(Config(actor_rollout_ref=ActorRolloutRefConfig(rollout=rollout), trainer=trainer)))
    assert found == [] if message is None else [True for text in found if re.search(message, text)] == [True]


@pytest.mark.parametrize(
    ("gpus", "rollout", "message"),
    [
        (1, {}, r"size=2, but this machine has 1 GPU\(s\), .*: give at most 1, or .*servers"),
        (1, {"servers": ["http://a:1"]}, None),
        (2, {}, None),
        (0, {}, None),  # on the CPU
    ],
)
def test_an_engine_beside_the_trainer_of_more_devices_than_the_machine_has_is_refused(
    monkeypatch, gpus, rollout, message
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    rollout = RolloutConfig(name="sglang", tensor_model_parallel_size=2, **rollout)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        check_devices(rollout)


@pytest.mark.parametrize(
    ("rollout", "cumem", "nvls"),
    [
        ({"nnodes": 1}, "0", "0"),
        ({"servers": ["http://host:1"]}, "0", "0"),
        ({"launch_servers": 2, "engine_kwargs": {"enable_nccl_nvls": True}}, "0", "1"),
        ({"nnodes": 1, "engine_kwargs": {"enable_symm_mem": True}}, "1", "1"),
        ({}, None, None),
        ({"servers": ["http://host:1"], "weight_transport": "disk"}, None, None),
    ],
)
def test_ranks_have_the_nccl_variables_of_engines_that_they_broadcast_to(rollout, cumem, nvls):
    variables = rank_environment(RolloutConfig(name="sglang", **rollout), {"NCCL_DEBUG": "INFO", "SECRET": "x"})
    assert (variables.get("NCCL_CUMEM_ENABLE"), variables.get("NCCL_NVLS_ENABLE")) == (cumem, nvls)
    assert variables["NCCL_DEBUG"] == "INFO" and "SECRET" not in variables


def test_the_users_nccl_variables_stay_and_other_engines_need_none():
    rollout = RolloutConfig(name="sglang", nnodes=1)
    assert rank_environment(rollout, {"NCCL_CUMEM_ENABLE": "1"})["NCCL_CUMEM_ENABLE"] == "1"
    assert not [name for name in rank_environment(RolloutConfig(name="local"), {}) if name.startswith("NCCL_")]
