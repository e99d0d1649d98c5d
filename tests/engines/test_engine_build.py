"""From the config to an engine."""

from __future__ import annotations

import pytest
from engine_models import request

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.engines import build
from verl_mt.errors import ConfigError


def made(model, max_model_len=64, **config):
    return build(
        ActorRolloutRefConfig(rollout=RolloutConfig(**config)),
        model,
        end_token_ids=[3],
        decode=None,
        max_model_len=max_model_len,
        deterministic=False,
        seed=0,
    )


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
        ({"engine_kwargs": {"x": 1}}, "engine_kwargs: the local engine takes none, got .*x"),
        ({"tensor_model_parallel_size": 2}, "one rank, got 2"),
        ({"dtype": "bfloat16"}, "which are float32; got bfloat16"),
    ],
)
def test_what_an_engine_does_not_take_is_refused(qwen3, config, message):
    with pytest.raises(ConfigError, match=message):
        made(qwen3, **config)


def test_local_without_the_actors_module_or_beyond_its_positions_is_refused(qwen3):
    with pytest.raises(ConfigError, match="actor's own module, but got NoneType"):
        made(None)
    with pytest.raises(ConfigError, match="max_model_len=257 is more than the model's 256"):
        made(qwen3, max_model_len=257)
