"""What training changes as named tensors, and how they are written into whole models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl_mt.errors import CheckpointError
from verl_mt.modeling import lora
from verl_mt.workers import sharded_checkpoint
from verl_mt.workers.optimizer import build_adamw
from verl_mt.workers.sharded_checkpoint import load_weights
from verl_mt.workers.state import (
    all_weights,
    copy_into,
    count_parameters,
    is_master,
    is_weight,
    live_tensors,
    master_of,
)


class Model(nn.Module):
    """A trained weight and another name for it, a frozen one, and buffers that are saved and that are not."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.trained = nn.Parameter(torch.ones(2, 3, dtype=dtype))
        self.tied = self.trained
        self.frozen = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("made", torch.ones(1), persistent=False)


def test_kinds_of_tensors_are_told_by_their_names():
    names = ["module.a.master", "optimizer.a.master", "optimizer.a.exp_avg", "optimizer.master"]
    assert [is_weight(name) for name in names] == [True, False, False, False]
    assert [is_master(name) for name in names] == [False, True, False, True]
    assert master_of("module.a.b") == "optimizer.a.b.master"


def test_weights_are_named_once_and_frozen_ones_and_saved_buffers_too():
    model = Model()
    found = all_weights(model)
    assert [*found] == ["trained", "frozen", "kept"]
    assert found["trained"].data_ptr() == model.trained.data_ptr() and not found["trained"].requires_grad
    assert count_parameters(model) == (10, 6)


@pytest.mark.parametrize("adapters", [True, False])
def test_live_tensors_are_weights_and_the_optimizers_state_of_trained_ones(adapters):
    model = Model(torch.bfloat16)
    if adapters:
        lora.set_lora(model, object())
    weights = ["module.trained"] if adapters else ["module.trained", "module.frozen", "module.kept"]
    assert [*live_tensors(model)] == weights
    optimizer = build_adamw([model.trained], lr=1e-3)
    found = live_tensors(model, optimizer)
    assert [*found] == weights + [f"optimizer.trained.{name}" for name in ("exp_avg", "exp_avg_sq", "step", "master")]
    assert found["optimizer.trained.exp_avg"] is optimizer.state[model.trained]["exp_avg"]
    assert found["module.trained"].data_ptr() == model.trained.data_ptr()


def test_whole_tensors_are_written_in_place_and_in_the_precision_that_is_there():
    live = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": nn.Parameter(torch.zeros(1))}
    copy_into(live, {"b": torch.tensor([2.5]), "a": torch.tensor([1.0, 1.001])})
    assert live["a"].tolist() == [1.0, 1.0] and live["b"].item() == 2.5


@pytest.mark.parametrize(
    ("given", "number", "first"),
    [
        ({"a": (2,)}, 1, "b"),
        ({"a": (2,), "b": (1,), "z": (1,)}, 1, "z"),
        ({"a": (3,), "b": (2,)}, 2, "a"),
        ({}, 2, "a"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(given, number, first):
    live = {"a": torch.zeros(2), "b": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=rf"{number} tensors differ, among them {first}\."):
        copy_into(live, {name: torch.ones(shape) for name, shape in given.items()})


# Weights of a checkpoint for a whole model


def saved_tensors(master: float | None = 1.001):
    weights = {"trained": torch.full((2, 3), 1.0), "frozen": torch.full((4,), 2.0), "kept": torch.full((1,), 3.0)}
    found = {f"module.{name}": value.bfloat16() for name, value in weights.items()}
    if master is not None:
        found |= {"optimizer.trained.master": torch.full((2, 3), master), "optimizer.trained.exp_avg": torch.ones(2, 3)}
    return found


@pytest.mark.parametrize(
    ("dtype", "master", "expected"),
    [(torch.float32, 1.001, 1.001), (torch.float32, None, 1.0), (torch.bfloat16, 1.5, 1.0)],
)
def test_a_model_in_float32_gets_exact_weights_where_there_are_some(tmp_path, dtype, master, expected):
    model = Model(dtype)
    with torch.no_grad():
        model.trained.zero_()
    load_weights(model, {"actor": {"tensors": saved_tensors(master)}}, tmp_path)
    assert torch.equal(model.trained, torch.full((2, 3), expected, dtype=dtype))
    assert model.frozen.tolist() == [2.0] * 4 and model.kept.tolist() == [3.0] and model.made.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_shards_weights_are_read_and_then_exact_ones(monkeypatch, tmp_path, dtype):
    read = []
    monkeypatch.setattr(sharded_checkpoint, "stored_shapes", lambda folder: dict.fromkeys(saved_tensors()))
    monkeypatch.setattr(sharded_checkpoint, "load_shards", lambda part, folder: read.append(([*part], folder)))
    load_weights(Model(dtype), {"actor": {}}, tmp_path)
    expected = [(["module.trained", "module.frozen", "module.kept"], tmp_path)]
    assert read == expected + ([(["optimizer.trained.master"], tmp_path)] if dtype == torch.float32 else [])


def test_adapters_other_than_the_checkpoints_are_refused(monkeypatch, tmp_path):
    asked = []

    def other(saved, own):
        asked.append((saved, own))
        raise CheckpointError("other adapters")

    monkeypatch.setattr(sharded_checkpoint, "require_same", other)
    with pytest.raises(CheckpointError, match="other adapters"):
        load_weights(Model(), {"actor": {"tensors": {}, "lora": {"rank": 4}}}, tmp_path)
    assert asked == [({"rank": 4}, None)]
