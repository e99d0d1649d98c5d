"""A float32 checkpoint trained in bfloat16: the optimizer's exact weights begin at the file's values, so that small
updates reach the policy from the first one on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from actor_toys import REWARDS, make_batch, tiny_policy
from sharded_jobs import first_masters

from verl_mt.config.actor import ActorConfig, CriticConfig, ModelConfig, OptimConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.modeling.exact import take_exact
from verl_mt.modeling.load import load_causal_lm
from verl_mt.workers.optimizer import state_of
from verl_mt.workers.setup import AlgorithmNeeds, Placement, WorkerSetup, load_workers
from verl_mt.workers.sharding import ALONE


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model, in float32 and in bfloat16."""
    parent, found = tmp_path_factory.mktemp("models"), {}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = parent / dtype
        model = load_of(tiny_policy())
        model.to(getattr(torch, dtype)).save_pretrained(found[dtype])
    return found


def load_of(model):
    fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict())
    return fresh


def setup_of(folder, *, dtype="bfloat16", lr=1e-6, ranks=1, **model):
    config = ActorRolloutRefConfig(
        model=ModelConfig(path=str(folder), dtype=dtype, **model),
        actor=ActorConfig(ppo_mini_batch_size=None, optim=OptimConfig(lr=lr, weight_decay=0.0)),
    )
    return WorkerSetup(config, 4, 4, "cpu", 0, Placement(n_workers_per_node=ranks))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_masters_begin_at_the_values_of_a_float32_checkpoint(folders, ranks, size):
    needs = AlgorithmNeeds(critic=CriticConfig(share_trunk=False))
    setup = replace(setup_of(folders["float32"], ranks=size), algorithm=needs)
    found = first_masters(ALONE, setup) if size == 1 else ranks(2)(first_masters, setup)[1]
    file = dict(tiny_policy().named_parameters())
    for who, called in (("ActorWorker", "model."), ("CriticWorker", "trunk.")):
        for name, exact in file.items():
            own = name.replace("model.", called)
            assert torch.equal(found[who][f"optimizer.{own}.master"], exact.detach())
            assert torch.equal(found[who][f"module.{own}"], exact.detach().to(torch.bfloat16))
    lost = [not torch.equal(exact.detach(), exact.detach().to(torch.bfloat16).float()) for exact in file.values()]
    assert any(lost)


def test_a_bfloat16_checkpoint_has_no_more_than_its_weights(folders):
    tensors = first_masters(ALONE, setup_of(folders["bfloat16"]))["ActorWorker"]
    for name in tensors:
        if name.startswith("module."):
            master = tensors[f"optimizer.{name.removeprefix('module.')}.master"]
            assert torch.equal(master, tensors[name].float())


def test_nothing_is_remembered_where_nobody_trains_it(folders):
    path = str(folders["float32"])
    for model in (
        load_causal_lm(path, dtype="bfloat16"),
        load_causal_lm(path, dtype="float32", exact=True),
        load_workers(setup_of(folders["float32"], lora_rank=2))[0].module,
    ):
        assert all(take_exact(parameter) is None for parameter in model.parameters())


def moved(folder, dtype):
    """Mean change of a weight by two updates."""
    actor, _, _ = load_workers(setup_of(folder, dtype=dtype, lr=1e-5))
    before = {name: t.float().clone() for name, t in actor.tensors().items()}
    for seed in range(2):
        actor.update(make_batch(REWARDS, seed=seed))
    after = actor.tensors()
    return torch.cat([(after[name].float() - before[name]).flatten() for name in before]).abs().mean().item()


@pytest.mark.slow
def test_small_updates_reach_a_bfloat16_policy_as_they_reach_a_float32_one(folders):
    """Two updates of 1e-5 each are less than half a step of bfloat16 for most weights: it is where in its rounding
    interval each one lies that lets the right share of them move."""
    full = moved(folders["float32"], "float32")
    assert 0.7 * full < moved(folders["float32"], "bfloat16") < 1.4 * full
    assert moved(folders["bfloat16"], "bfloat16") < 0.4 * full  # what it was from any checkpoint


def test_a_run_resumed_before_its_first_update_has_them_too(folders):
    actor, _, _ = load_workers(setup_of(folders["float32"]))
    saved = actor.state_dict()
    again, _, _ = load_workers(setup_of(folders["float32"]))
    again.load_state_dict(saved)
    name, parameter = next(iter(again.module.named_parameters()))
    assert torch.equal(state_of(again.optimizer, parameter)["master"], dict(tiny_policy().named_parameters())[name])


def test_the_actor_corrects_as_the_algorithm_says(folders):
    needs = AlgorithmNeeds(rollout_correction={"rollout_is": "token", "rollout_is_threshold": 1.7})
    actor, _, _ = load_workers(replace(setup_of(folders["float32"]), algorithm=needs))
    assert actor.loss.correction is not None and actor.loss.correction.options.rollout_is_threshold == 1.7
