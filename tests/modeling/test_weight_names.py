"""Weights have the names and shapes of their checkpoint: where it is loaded, on other ranks, in engines."""

from __future__ import annotations

import json
import re

import pytest
import torch
from model_families import MULTIMODAL, TEXT, write
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2Model

from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.replicas.model_shape import model_shape
from verl_mt.modeling.load import empty_causal_lm, load_causal_lm, meta_causal_lm, tensors_in_checkpoint
from verl_mt.modeling.weights import named_weights

FAST = ("Qwen3Moe", "Qwen3_5", "Qwen3_5Moe", "Qwen2_5_VL", "Qwen3VL", "Mistral3", "Glm4v")


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in named_weights(model)}


def held_by(folder):
    return {name: tuple(tensor.shape) for name, tensor in tensors_in_checkpoint(str(folder)).items()}


def rewrite(folder, change):
    """The same checkpoint with other tensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in FAST else pytest.mark.slow, id=family)
        for family in (*TEXT, *MULTIMODAL)
    ],
)
def test_all_ranks_and_engines_have_the_names_and_shapes_of_the_checkpoint(family, tmp_path):
    folder = write(family, tmp_path)
    attention = {"attn_implementation": "eager"}  # which all families have
    loaded = shapes_of(load_causal_lm(str(folder), **attention))
    assert loaded == shapes_of(empty_causal_lm(str(folder), **attention))
    shape = model_shape(str(folder))
    assert loaded == shape.weights and list(loaded) == list(shape.weights)
    held = held_by(folder)
    assert loaded.items() <= held.items()
    # Qwen3.5's text model loads no vision tower.
    assert held.keys() - loaded.keys() == shape.unsent
    assert {name.split(".")[1] for name in shape.unsent} == ({"visual"} if family.startswith("Qwen3_5") else set())


@pytest.mark.slow
def test_experts_keep_the_form_in_which_their_files_have_them(tmp_path):
    """Makers of mixtures write each expert, or all of a layer in one tensor: transformers reads both."""
    folder = write("Qwen3_5Moe", tmp_path)
    assert any(".experts.0." in name for name in model_shape(str(folder)).weights)

    def stack(tensors):
        experts = {name: tensors.pop(name) for name in [*tensors] if ".experts." in name}
        for layer in sorted({name.partition(".experts.")[0] for name in experts}):
            of = {
                part: torch.stack([experts[f"{layer}.experts.{number}.{part}_proj.weight"] for number in range(4)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([of["gate"], of["up"]], dim=1)
            tensors[f"{layer}.experts.down_proj"] = of["down"]
        return tensors

    rewrite(folder, stack)
    shape = model_shape(str(folder))
    assert shape.has_experts and not any(re.search(r"\.experts\.\d", name) for name in shape.weights)
    assert shapes_of(load_causal_lm(str(folder))) == shape.weights


def test_what_a_checkpoint_has_beside_the_model_is_never_sent(tmp_path):
    """Qwen3.5's files have a head that predicts several tokens, which nobody here trains."""
    folder = write("Qwen3_5", tmp_path)
    rewrite(folder, lambda tensors: {**tensors, "mtp.fc.weight": torch.zeros(4, 4)})
    assert "mtp.fc.weight" in model_shape(str(folder)).unsent


def test_a_sharded_checkpoint_says_what_all_of_its_files_hold(tmp_path):
    folder = write("Qwen3Moe", tmp_path)
    before = held_by(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert held_by(folder) == before == model_shape(str(folder)).weights


def test_files_without_the_prefix_of_the_models_body_fit(tmp_path):
    """GPT-2's makers wrote them so, with masks as well; SGLang and vLLM take names with and without."""
    GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    rewrite(tmp_path, lambda held: held | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)})
    shape = model_shape(str(tmp_path))
    assert "h.0.ln_1.weight" in held_by(tmp_path) and "transformer.h.0.ln_1.weight" in shape.weights
    assert shape.unsent == {"transformer.h.0.attn.bias"}


def test_an_update_that_would_not_fit_the_files_is_refused_before_anything_starts(tmp_path):
    folder = write("Qwen2", tmp_path)
    rewrite(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    with pytest.raises(ConfigError) as refused:
        model_shape(str(folder))
    text = str(refused.value)
    assert "Updates would send model.embed_tokens.weight [1024, 128] (the files have no such weight)" in text
    assert "and 23 more" in text and "rollout.name=local" in text


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0" + b'{"a": 1}', b"\x05\0\0\0\0\0\0\0{abc}"])
def test_a_damaged_header_is_refused(tmp_path, content):
    folder = write("Qwen2", tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"its \*\.safetensors cannot be read .* copy or download"):
        meta_causal_lm(str(folder))


def test_files_that_are_no_safetensors_say_nothing(tmp_path):
    folder = write("Qwen2", tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert tensors_in_checkpoint(str(folder)) == {}
    assert "model.embed_tokens.weight" in model_shape(str(folder)).weights
