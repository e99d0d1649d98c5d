"""What actor and critic have in common, around a module of two numbers: plans, steps, rates and where weights lie."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from actor_toys import hand_made
from torch import nn

from verl_mt.config.actor import OptimConfig
from verl_mt.data import batch as col
from verl_mt.errors import VerlMTError
from verl_mt.workers import sharded_checkpoint, trainable
from verl_mt.workers.optimizer import MasterAdamW
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.trainable import (
    HostWeights,
    Trainable,
    UpdatePlan,
    add_up_in_float32,
    num_mini_batches,
    offload,
    onload,
    steps_of_actor,
    updates_per_step,
)

PLAN = UpdatePlan(OptimConfig(lr=1.0, lr_warmup_steps=0), 1, None, True, 0.0, "actor_rollout_ref.actor")


def of(module: nn.Module | None = None, *, steps: int = 3, prompts: int | None = 5, seed: int = 0, **plan) -> Trainable:
    module = nn.Linear(2, 1, bias=False) if module is None else module
    return Trainable(module, replace(PLAN, **plan), total_steps=steps, train_batch_size=prompts, seed=seed)


# Numbers of steps, and their rates


@pytest.mark.parametrize(
    ("prompts", "size", "expected"),
    [(None, None, 1), (8, None, 1), (None, 2, 1), (8, 2, 4), (7, 2, 4), (9, 2, 5), (0, 2, 1), (1, 2, 1)],
)
def test_mini_batches_of_a_batch(prompts, size, expected):
    assert num_mini_batches(prompts, size) == expected
    assert updates_per_step(3, size, prompts) == 3 * expected


def test_an_actor_learns_in_the_steps_behind_the_warm_up_and_in_one_at_least():
    assert [steps_of_actor(10, warmup) for warmup in (0, 3, 9, 10, 12)] == [10, 7, 1, 1, 1]


def test_the_rate_of_each_mini_batch_of_each_batch():
    """Two epochs of three mini-batches in each of three steps: the rate falls by 1/18 with each."""
    linear = OptimConfig(lr=2.0, lr_warmup_steps=0, lr_scheduler_type="linear")
    worker = of(optim=linear, ppo_epochs=2, ppo_mini_batch_size=2)
    for batch, mini, step in ((0, 0, 0), (0, 2, 2), (0, 5, 5), (0, 6, 5), (0, 9, 5), (1, 0, 6), (2, 5, 17), (3, 0, 18)):
        worker._num_batches = batch
        expected = pytest.approx(2.0 * (1 - step / 18))
        assert worker._set_lr(mini) == expected and worker.optimizer.param_groups[0]["lr"] == expected


def test_warm_up_and_least_rate_reach_the_schedule():
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="linear", min_lr_ratio=0.5)
    worker = of(optim=optim, steps=4)
    found = []
    for worker._num_batches in range(5):
        found.append(worker._set_lr(0))
    assert found == [0.5, 1.0, 1.0, 0.75, 0.5]


def test_what_the_optimizer_is_told():
    worker = of(optim=OptimConfig(lr=0.5, betas=[0.7, 0.8], weight_decay=0.3))
    options = worker.optimizer.param_groups[0]
    assert (options["lr"], options["betas"], options["weight_decay"]) == (0.5, (0.7, 0.8), 0.3)
    frozen = nn.Linear(2, 1)
    frozen.bias.requires_grad_(False)
    assert of(frozen).optimizer.param_groups[0]["params"] == [frozen.weight]


@pytest.mark.parametrize(
    ("device", "offload", "moved"),
    [("meta", True, True), ("meta", False, False), ("cpu", True, False), ("cpu", False, False)],
)
def test_an_optimizers_state_is_moved_only_where_it_is_not_in_cpu_memory_already(caplog, device, offload, moved):
    with caplog.at_level(logging.WARNING):
        worker = of(nn.Linear(2, 1, device=device), optimizer_offload=offload)
    assert isinstance(worker.optimizer, MasterAdamW) == moved and worker.device.type == device
    assert any("optimizer_offload has nothing to move" in text for text in caplog.messages) == (offload and not moved)


# Mini-batches and the weights of their tokens


def rows_of(worker, prompts):
    return [rows.tolist() for rows in worker._mini_batches(torch.tensor(prompts))]


def test_without_a_shuffle_prompts_come_in_order():
    worker = of(shuffle=False, ppo_mini_batch_size=2, ppo_epochs=2)
    assert rows_of(worker, [5, 3, 5, 9]) == [[0, 1, 2], [3]] * 2
    assert rows_of(of(shuffle=False), [5, 3, 5, 9]) == [[0, 1, 2, 3]]
    assert rows_of(of(), []) == [[]]


def test_prompts_are_shuffled_only_where_there_are_several_mini_batches():
    worker = of(ppo_mini_batch_size=3, seed=4)
    before = worker._generator.get_state()
    assert rows_of(worker, [5, 3, 9]) == [[0, 1, 2]] and torch.equal(worker._generator.get_state(), before)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(4))
    prompts = torch.tensor([3, 5, 7, 9])
    expected = [sorted(order[:3].tolist()), order[3:].tolist()]
    assert [rows.tolist() for rows in worker.first_mini_batches(prompts)] == expected
    assert rows_of(worker, prompts.tolist()) == expected, "nothing was drawn"
    assert not torch.equal(worker._generator.get_state(), before)


@pytest.mark.parametrize(
    ("size", "rows", "mode", "expected"),
    [
        (2, [0, 1, 2, 3], "token-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 6, 0]),
        (2, [4], "token-mean", [0, 0, 0, 0, 0.5 * 1 / 2]),
        (2, [4, 0], "token-mean", [1 / 4, 0, 0, 0, 1 / 4]),
        (3, [4], "token-mean", [0, 0, 0, 0, 1 / 2]),
        (None, [4], "token-mean", [0, 0, 0, 0, 1 / 2]),
        (1, [0, 4], "token-mean", [1 / 4, 0, 0, 0, 1 / 4]),
        (2, [0, 1, 2, 3], "seq-mean-token-sum-norm", [1 / 24, 1 / 24, 1 / 24, 1 / 24, 0]),
        (2, [0, 1, 2, 3], "seq-mean-token-mean", [1 / 12, 1 / 6, 1 / 12, 1 / 3, 0]),
    ],
)
def test_a_last_mini_batch_of_fewer_prompts_weighs_less(size, rows, mode, expected):
    """Three prompts: of three rows, of one, and of one. Rows 0 and 2 weigh as one sequence."""
    batch = hand_made(
        [[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1]],
        prompt_index=[1, 1, 1, 2, 3],
        trajectory_index=[0, 1, 0, 2, 3],
    )
    if mode == "seq-mean-token-mean":
        batch[col.LOSS_MASK] = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 1, 1]]).bool()
    share = RankBatch.alone(batch)
    worker = of(ppo_mini_batch_size=size)
    found = worker._token_weights(share, torch.tensor(rows), mode=mode, norm_constant=8.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, batch[col.LOSS_MASK].float() * torch.tensor(expected)[:, None])


# One step


def stepping(**plan):
    worker = of(**plan)
    with torch.no_grad():
        worker.module.weight.zero_()
    return worker


def give_gradient(worker, *values):
    worker.module.weight.grad = torch.tensor([list(values)])


@pytest.mark.parametrize(("clip", "expected"), [(0.0, [3.0, 4.0]), (1.0, [0.6, 0.8]), (5.5, [3.0, 4.0])])
def test_a_gradient_is_clipped_to_its_norm(clip, expected):
    worker, seen = stepping(grad_clip=clip), []
    worker.optimizer.register_step_pre_hook(lambda *_: seen.append(worker.module.weight.grad.clone()))
    give_gradient(worker, 3.0, 4.0)
    norm = worker._step(torch.tensor(1.0))
    assert norm.item() == 5.0 and not norm.requires_grad and worker.num_updates == 1
    assert seen[0][0].tolist() == pytest.approx(expected, rel=1e-5)
    assert worker.module.weight.grad is None and worker.module.weight[0].tolist() == pytest.approx([-1.0, -1.0])


@pytest.mark.parametrize(("loss", "gradient"), [(math.inf, 1.0), (1.0, math.nan), (math.nan, math.nan)])
def test_what_is_not_finite_is_dropped_twice_and_a_good_step_makes_up_for_it(loss, gradient):
    worker = stepping()
    for bad_before in (2, 2, 3):
        for number in range(1, bad_before + 1):
            give_gradient(worker, gradient, 1.0)
            if number == 3:
                with pytest.raises(VerlMTError, match=r"3 updates in a row \(after 2 good ones\)"):
                    worker._step(torch.tensor(loss))
                return
            assert worker._step(torch.tensor(loss)) is None and worker.module.weight.grad is None
            assert worker.progress()["nonfinite_in_a_row"] == number
        before = worker.num_updates
        give_gradient(worker, 1.0, 1.0)
        assert worker._step(torch.tensor(1.0)) is not None
        assert worker.num_updates == before + 1 and worker.progress()["nonfinite_in_a_row"] == 0


class Checkpointed(nn.Linear):
    is_gradient_checkpointing = True


def test_only_a_module_that_recomputes_activations_trains_in_training_mode():
    for kind, training in ((nn.Linear, False), (Checkpointed, True)):
        module = nn.Sequential(kind(2, 1), nn.Dropout(0.5))
        module.is_gradient_checkpointing = training
        module[0].attention_dropout = 0.25
        worker = of(module.train())
        assert not module.training and (module[1].p == 0.0) == (module[0].attention_dropout == 0.0) == training
        with worker._training_mode():
            assert module.training == training
        assert not module.training
        with pytest.raises(KeyError), worker._training_mode():
            raise KeyError
        assert not module.training


def test_a_name_for_dropout_that_holds_no_number_stays():
    module = nn.Sequential(nn.Linear(2, 1))
    module.is_gradient_checkpointing, module[0].attention_dropout = True, None
    of(module)
    assert module[0].attention_dropout is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_of_low_precision_are_added_up_in_float32(dtype):
    parameter = nn.Parameter(torch.ones(1, dtype=dtype))
    add_up_in_float32(parameter)
    for factor in (256.0, 1.0):
        (parameter * torch.tensor(factor, dtype=dtype)).sum().backward()
    assert parameter.grad.dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
    assert parameter.grad.item() == 257.0, "256 in bfloat16"


# Where weights lie


def test_weights_that_were_offloaded_have_no_memory_and_come_back():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    before = {name: value.clone() for name, value in module.state_dict().items()}
    host = HostWeights(module)
    assert len(host._storages) == 3, "tied ones once"
    for _ in range(2):
        host.offload()
        assert [p.untyped_storage().nbytes() for p in module.parameters()] == [0, 0, 0]
    for _ in range(2):
        host.onload()
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        module[0].bias.fill_(9.0)
    host.offload()
    host.onload()
    assert module[0].bias.tolist() == [9.0, 9.0]


def test_memory_that_others_have_too_stays():
    shared = torch.frombuffer(bytearray(8), dtype=torch.float32)
    module = nn.Module()
    module.weight = nn.Parameter(shared)
    assert not shared.untyped_storage().resizable()
    host = HostWeights(module)
    host.offload()
    assert module.weight.tolist() == [0.0, 0.0]
    host.onload()
    assert module.weight.tolist() == [0.0, 0.0]


def test_the_devices_reserve_is_given_back_only_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("the weights are on the CPU"))
    HostWeights(nn.Linear(1, 1)).offload()


@pytest.mark.parametrize("offloads", [True, False])
def test_workers_are_onloaded_and_offloaded_where_they_may_be(offloads):
    worker = of(param_offload=offloads)
    assert worker.offloads == offloads
    offload(None, worker)
    assert (worker.module.weight.untyped_storage().nbytes() == 0) == offloads
    onload(worker, None)
    assert worker.module.weight.untyped_storage().nbytes() == 8


# State


def test_progress_is_taken_and_the_optimizer_begins_anew():
    first, second = stepping(ppo_mini_batch_size=1, seed=1), stepping(ppo_mini_batch_size=1, seed=2)
    give_gradient(first, 1.0, 1.0)
    first._step(torch.tensor(1.0))
    first._num_batches, first._nonfinite_in_a_row = 7, 2
    rows_of(first, [1, 2, 3])
    give_gradient(second, 1.0, 1.0)
    second._step(torch.tensor(1.0))
    second.load_progress(first.progress())
    assert not second.optimizer.state and (second.num_updates, second._num_batches) == (1, 7)
    assert second._nonfinite_in_a_row == 2
    assert rows_of(second, [1, 2, 3, 4, 5]) == rows_of(first, [1, 2, 3, 4, 5])


def test_before_the_first_update_only_weights_are_kept():
    worker = stepping()
    assert [*worker.tensors()] == ["module.weight"] and worker.tensors()["module.weight"].data_ptr() == (
        worker.module.weight.data_ptr()
    )
    worker.num_updates = 1
    assert {*worker.tensors()} == {"module.weight"} | {
        f"optimizer.weight.{n}" for n in ("exp_avg", "exp_avg_sq", "step")
    }
    state = worker.state_dict()
    assert {*state} == {*worker.progress(), "tensors"} and {*state["tensors"]} == {*worker.tensors()}


def test_a_checkpoint_is_whole_or_shards_of_its_worker(monkeypatch, tmp_path):
    read = []
    monkeypatch.setattr(sharded_checkpoint, "load_shards", lambda *args: read.append(args))
    saved, worker = stepping(), stepping()
    saved.num_updates = 1
    with torch.no_grad():
        saved.module.weight.fill_(3.0)
        saved.tensors()["optimizer.weight.step"].fill_(5.0)
    worker.load_checkpoint(saved.state_dict(), None, "critic")
    assert worker.module.weight.tolist() == [[3.0, 3.0]] and worker.num_updates == 1 and not read
    assert worker.tensors()["optimizer.weight.step"].item() == 5.0
    worker.load_checkpoint(saved.progress() | {"num_updates": 0}, tmp_path, "critic")
    ((tensors, folder, name),) = read
    assert [*tensors] == ["module.weight"] and (folder, name) == (tmp_path, "critic")


def test_onload_and_offload_ask_each_worker_once():
    calls = []

    class Worker:
        def onload(self):
            calls.append("onload")

        def offload(self):
            calls.append("offload")

    trainable.onload(Worker(), None, Worker())
    trainable.offload(None, Worker())
    assert calls == ["onload", "onload", "offload"]
