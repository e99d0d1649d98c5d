"""Text families on a real vLLM: it starts without weights, and has those of the trainer after the first update.

Qwen3.5's text model is trained without its vision tower, which the engine reads from the files. `test_weight_names.py`
compares names and shapes of the other models with a vision tower.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from live import ROLLOUT, Loop, vllm_python, worst_difference
from model_families import TEXT, write

from verl_mt import engines
from verl_mt.config.compose import compose
from verl_mt.data.requests import GenerationRequest, SamplingParams
from verl_mt.engines.base import EngineSetup
from verl_mt.errors import ConfigError
from verl_mt.modeling.load import load_causal_lm
from verl_mt.workers.weight_sync import weight_update_for

pytestmark = [pytest.mark.vllm, pytest.mark.release]
ROUNDING = 1e-3
START_S = 900.0
"""A start takes 40 s alone, and ten times that on a machine that others use."""
VISION = ("Qwen3_5", "Qwen3_5Moe")
UNKNOWN = r"architectures \[.*\] failed to be inspected"
NOT_STARTED = {
    "Qwen3Next": "Chunked prefill is required for mamba cache mode 'align'",
    "DeepseekV3": "expect weight to be bfloat16, float16",
    "Qwen3_5": UNKNOWN,
    "Qwen3_5Moe": UNKNOWN,
}
"""Family -> what vLLM 0.32's CPU build says where it does not start it. It computes linear attention in bfloat16 alone,
and caches its prefixes only where prompts are computed in parts. On a processor with AMX it has no latent attention
in float32. Its class of Qwen3.5 imports torchvision, which the build has not."""
PROMPT = [5, 17, 200, 31, 8, 99, 140, 77]


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_a_family_samples_with_the_weights_of_the_first_update(family, tmp_path):
    folder, run = write(family, tmp_path), Loop()
    model = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.model.tokenizer_path=verl_mt://tiny"]
    words = ["name=vllm", f"python={vllm_python()}", f"engine_timeout_s={START_S}", "max_num_seqs=8", "dtype=float32"]
    config = compose([*model, *(ROLLOUT + word for word in words)]).actor_rollout_ref
    setup = EngineSetup(
        config, None, end_token_ids=frozenset({1}), decode=None, max_model_len=256, deterministic=False, seed=0
    )  # fmt: skip
    engine = engines.build(setup)
    module = load_causal_lm(str(folder), attn_implementation="eager")
    with torch.no_grad():
        for parameter in module.parameters():  # other weights than those of the files
            parameter.mul_(1.1)
    try:
        try:
            assert run(engine.start_without_weights(), START_S) == (family in TEXT)
        except ConfigError as error:
            named = re.search(r"; log (\S+);", str(error))
            said = str(error) + (Path(named[1]).read_text(errors="replace") if named else "")
            why = family in NOT_STARTED and re.search(NOT_STARTED[family], said)
            if not why:
                raise
            pytest.skip(f"vLLM does not start {family}: {why[0]}")
        run(engine.apply(weight_update_for(engine.capabilities, module, 0)))
        asked = GenerationRequest(PROMPT, SamplingParams(max_new_tokens=12, temperature=1.0), "request", "session")
        assert worst_difference(module, PROMPT, run(engine.generate(asked))) < ROUNDING
    finally:
        run(engine.close())
