"""The recipe that made the shipped model still makes one."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import warm_start
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_mt.config_paths import TINY_MODEL, resolve_model_path
from verl_mt.tiny.problems import generate

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny"
SHIPPED = Path(resolve_model_path(TINY_MODEL))


@pytest.mark.slow
def test_the_recipe_builds_a_checkpoint_with_the_shipped_tokenizer(tmp_path):
    command = [sys.executable, str(RECIPE / "build.py"), "--steps", "3", "--out", str(tmp_path)]
    options = ["--eval-problems", "2", "--threads", "1"]
    done = warm_start.run(command + options, capture_output=True, text=True, check=True)
    assert "stopped after 3 steps" in done.stdout and "held out, greedy: accuracy" in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in SHIPPED.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (SHIPPED / name).read_text(), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == 886_144


@pytest.mark.slow
def test_the_builds_sampler_finds_the_tokens_that_generate_finds(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    import demonstrations
    import solver

    tokenizer, model = AutoTokenizer.from_pretrained(SHIPPED), AutoModelForCausalLM.from_pretrained(SHIPPED)
    stream = generate(5, "val")
    prompts = [
        tokenizer.apply_chat_template(
            demonstrations.prompt_messages(next(stream)),
            tools=demonstrations.tool_schemas(),
            add_generation_prompt=True,
            return_dict=False,
        )
        for _ in range(6)
    ]
    rendered = partial(demonstrations.render, tokenizer)
    before, after = solver.observation_frame(demonstrations.demonstration(next(stream)), rendered)
    observation = tokenizer.encode(before + "12" + after, add_special_tokens=False)
    with torch.no_grad():
        decoder = solver.Decoder(model, len(prompts), tokenizer.pad_token_id, tokenizer.eos_token_id)
        first = decoder.turn(prompts, 0.0, torch.Generator())
        second = decoder.turn([observation] * len(prompts), 0.0, torch.Generator())
    for prompt, turn, last in zip(prompts, first, second):
        for given, expected in ((prompt, turn), (prompt + turn + observation, last)):
            ids = model.generate(torch.tensor([given]), max_new_tokens=48, do_sample=False)[0, len(given) :]
            assert ids.tolist() == expected
