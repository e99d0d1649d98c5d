"""Device memory that changes hands, with the calls really made: on a CPU SGLang accepts them, and they free nothing."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from engine_models import request
from live import ROLLOUT, ROUNDING, START_S, Lab, Loop, without_end, worst_difference

from verl_mt.config.compose import compose
from verl_mt.extensions.cluster.sglang.engine import SGLangEngine
from verl_mt.trainer.build import build_trainer
from verl_mt.workers.weight_sync import weight_update_for

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Every engine says that it frees memory, as a colocated one does where there is a GPU."""
    make = SGLangEngine.__init__

    def made(engine, options):
        make(engine, options)
        engine.capabilities = replace(engine.capabilities, frees_memory=True)

    monkeypatch.setattr(SGLangEngine, "__init__", made)


def trained(tmp_path, *, killed_after: int | None = None) -> list[dict]:
    """Metrics of three steps, or of those before the trainer was lost."""
    words = [
        ROLLOUT + "name=sglang",
        ROLLOUT + f"engine_timeout_s={START_S}",
        "data.train_batch_size=4",
        "data.train_max_samples=64",
        ROLLOUT + "n=4",
        ROLLOUT + "response_length=64",
    ]
    words += ["data.val_files=null", "trainer.total_training_steps=3", "trainer.save_freq=1"]
    words += [f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.logger=[console]"]
    trainer = build_trainer(compose(words))
    step = trainer.step

    def step_or_die():
        if trainer.step_number == killed_after:
            raise RuntimeError("lost")
        return step()

    trainer.step = step_or_die
    with pytest.raises(RuntimeError, match="lost") if killed_after is not None else nullcontext():
        trainer.fit()
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_from_its_checkpoint_without_losing_its_engine(as_on_a_gpu, tmp_path):
    assert len(trained(tmp_path, killed_after=1)) == 1
    steps = trained(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["engine/restarts"] for step in steps] == [0] * 3
    assert max(step["rollout/logprob_diff_max"] for step in steps) <= 1e-4


def test_a_request_that_nobody_waits_for_any_more_does_not_end_the_engine(as_on_a_gpu, lab: Lab, run: Loop):
    engine = lab.engine()
    try:
        run(engine.start())
        pids, prompt = engine.pids, lab.prompts[0].ids

        async def leave_one_behind():
            with without_end(engine):
                asking = asyncio.ensure_future(engine.generate(request(prompt, max_new_tokens=200)))
                await asyncio.sleep(0.5)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await engine.release_memory()

        run(leave_one_behind())
        run(engine.resume_memory())
        run(engine.apply(weight_update_for(engine.capabilities, lab.module, 1)))
        output = run(engine.generate(request(prompt, max_new_tokens=8)))
        assert worst_difference(lab.module, prompt, output) < ROUNDING
        assert engine.pids == pids and engine.metrics()["engine/restarts"] == 0
    finally:
        run(engine.close())
