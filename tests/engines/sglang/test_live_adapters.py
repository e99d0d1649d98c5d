"""LoRA: real engines get the base weights once, and the adapters alone at each update."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_models import request
from live import EACH_VLLM_IN_RELEASE, ROLLOUT, ROUNDING, Lab, metrics_of, without_end, words_of, worst_difference
from ray_machines import disconnect

from verl_mt.config.actor import ModelConfig
from verl_mt.config.compose import compose
from verl_mt.modeling.lora import add_adapters
from verl_mt.trainer.build import build_trainer
from verl_mt.workers.weight_sync import weight_update_for

pytestmark = pytest.mark.parametrize("name", EACH_VLLM_IN_RELEASE)  # mark.sglang, mark.vllm
RANK = 8


@pytest.fixture(scope="module")
def policy(lab: Lab) -> Any:
    return add_adapters(copy.deepcopy(lab.module), ModelConfig(lora_rank=RANK), seed=0)


def trained(policy: Any, version: int) -> Any:
    """The policy with other adapters."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 * min(version, 1))
    return policy


def test_each_update_is_the_adapter_and_what_the_engine_computes_is_the_policy(lab, run, policy, name):
    engine = lab.engine(name=name, model=(f"lora_rank={RANK}",))
    bytes_of_adapter = sum(p.nbytes for n, p in policy.named_parameters() if ".lora_" in n)
    unusual = [list(range(20 + k, 90 + k)) for k in range(4)]  # of usual ones the shipped model is certain

    async def pushed(version: int) -> None:
        update = weight_update_for(engine.capabilities, trained(policy, version), version)
        await engine.apply(update)
        assert update.tensors.num_bytes == bytes_of_adapter

    async def differences(version: int, temperature: float = 1.0) -> tuple[float, float]:
        """From the policy, and from the base model."""
        found, words = [], {"temperature": temperature, "max_new_tokens": 24}
        # The same prompts each time: a cache of another version would show.
        outputs = await asyncio.gather(*(engine.generate(request(prompt, **words)) for prompt in unusual))
        for prompt, output in zip(unusual, outputs):
            assert [span.version for span in output.version_spans] == [version]
            found.append([worst_difference(module, prompt, output, temperature) for module in (policy, lab.module)])
        return tuple(map(max, zip(*found)))

    async def of_a_turn_that_meets_an_update() -> float:
        asked = asyncio.ensure_future(engine.generate(request(unusual[0], max_new_tokens=200)))
        await asyncio.sleep(0.5)
        await pushed(6)
        output = await asked
        assert [span.version for span in output.version_spans] == [5, 6]
        at = output.version_spans[0].num_tokens
        late = replace(output, token_ids=output.token_ids[at:], log_probs=output.log_probs[at:])
        return worst_difference(policy, unusual[0] + output.token_ids[:at], late)

    try:
        assert run(engine.start_without_weights()), "it has the base weights, and waits for the adapters"
        run(pushed(0))
        assert max(run(differences(0))) < ROUNDING, "new adapters are the base model"
        for version in range(1, 6):
            run(pushed(version))
            from_policy, from_base = run(differences(version, temperature=version % 2))
            assert from_policy < ROUNDING and from_base > 0.1
        with without_end(engine):
            assert run(of_a_turn_that_meets_an_update()) < ROUNDING, "all of its text is computed with the new one"
        engine._replicas[0].serving.give_up("a test ended it")
        assert run(differences(6))[0] < ROUNDING, "base and adapter came again"
    finally:
        run(engine.close())


@pytest.mark.release
@pytest.mark.ray
def test_separate_engines_of_a_run_get_the_adapters_from_the_rank(tmp_path, monkeypatch, caplog, name):
    disconnect()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    caplog.set_level("INFO", logger="verl_mt.start")
    words = [
        "trainer.placement=ray", ROLLOUT + "nnodes=1", ROLLOUT + "n_workers_per_node=1", "trainer.device=cpu",
        f"actor_rollout_ref.model.lora_rank={RANK}", "actor_rollout_ref.actor.optim.lr=2e-3", "data.train_batch_size=4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "actor_rollout_ref.actor.skip_zero_advantage=False",
        ROLLOUT + "n=4", "data.val_files=null", "data.train_max_samples=64", "trainer.total_training_steps=4",
        "trainer.num_threads=1", "trainer.logger=[console]", "trainer.save_freq=-1", "trainer.export_at_end=False",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    trainer = build_trainer(compose([*words, *words_of(name)]))
    try:
        assert trainer.engine.capabilities.takes_adapters
        trainer.fit()
        assert trainer.weights.trainer_bytes == 0
    finally:
        trainer.close()
    lines = metrics_of(tmp_path / "run")
    assert "LoRA: engines get the adapters at each update, 0.3 MB" in caplog.messages
    assert [line["step"] for line in lines] == [1, 2, 3, 4], "the fourth samples with the third update"
    assert lines[0]["actor/grad_norm"] > 0, "later updates send other adapters than the base model's zeros"
    assert max(line["rollout/logprob_diff_max"] for line in lines) <= ROUNDING
