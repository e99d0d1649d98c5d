"""What is trained of a model that sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vision_toys import vision_model

from verl_mt.config.actor import ModelConfig
from verl_mt.errors import ConfigError
from verl_mt.modeling.lora import add_adapters, freeze_vision, is_adapter, is_vision


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_a_frozen_vision_tower_and_its_projector_keep_their_weights():
    model = vision_model()
    every = trained(model)
    freeze_vision(model)
    left = trained(model)
    assert every - left == {name for name in every if ".visual." in name} and any("merger" in n for n in every - left)
    assert any("language_model" in name for name in left)


@pytest.mark.parametrize("frozen", [False, True])
def test_adapters_of_all_linear_layers_leave_a_frozen_vision_tower_alone(frozen):
    pytest.importorskip("peft")
    model = vision_model()
    config = ModelConfig(lora_rank=2, freeze_vision=frozen)
    add_adapters(model, config, seed=0)
    assert any(is_vision(name) for name in trained(model)) is not frozen
    assert all(is_adapter(name) for name in trained(model))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", True),
        ("model.vision_tower.layers.0.weight", True),
        ("model.multi_modal_projector.linear_1.weight", True),
        ("model.language_model.layers.0.mlp.up_proj.weight", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_vision_is_found_by_the_names_that_transformers_gives_it(name, found):
    assert is_vision(name) is found


def test_a_model_that_does_not_see_is_trained_whole():
    model = nn.Sequential(nn.Linear(2, 2))
    freeze_vision(model)
    assert all(parameter.requires_grad for parameter in model.parameters()) and torch.is_grad_enabled()


def test_a_vision_tower_of_an_unknown_name_is_not_trained_in_silence():
    model = nn.ModuleDict({"eye": nn.Linear(2, 2), "layers": nn.Linear(2, 2)})
    model.config = SimpleNamespace(vision_config=SimpleNamespace())
    with pytest.raises(ConfigError, match=r"freeze_vision: .*vision_config.*\(its parts are eye\.weight, .*visual"):
        freeze_vision(model)
