"""Whole runs over Ray workers: the numbers of one process, a killed worker, another number of ranks."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal

import pytest
import torch

from verl_mt.config.compose import compose
from verl_mt.data.requests import GenerationRequest, SamplingParams, VersionSpan
from verl_mt.errors import WorkerError
from verl_mt.extensions.cluster.workers.ray_group import RayWorkerGroup
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.restarts import run_to_the_end

pytestmark = pytest.mark.ray
STEPS = 3
SMALL = [
    "data.train_batch_size=4", "data.train_max_samples=64", "data.val_max_samples=4",
    "actor_rollout_ref.rollout.n=4", "trainer.logger=[]",
    f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", "trainer.val_before_train=False",
    "trainer.num_threads=1", "trainer.save_freq=1", "actor_rollout_ref.rollout.response_length=64",
]  # fmt: skip


def trainer_for(folder, *overrides):
    return build_trainer(compose([*SMALL, f"trainer.default_local_dir={folder}", *overrides]))


def ray_trainer(folder, ranks, *overrides):
    placement = ["trainer.placement=ray", f"trainer.n_workers_per_node={ranks}", "trainer.device=cpu"]
    return trainer_for(folder, *placement, *overrides)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lose_rank_0_in_the_second_step(trainer):
    original, pids = trainer.workers.update, trainer.workers.worker_pids

    def update(batch):
        if trainer.step_number == 1:
            os.kill(pids[0], signal.SIGKILL)
        return original(batch)

    trainer.workers.update = update
    with pytest.raises(WorkerError, match=r"rank 0 \(process \d+ on .*\) of 2 died while updating the policy"):
        trainer.fit()


def test_a_run_that_loses_a_worker_stops_and_goes_on_with_fewer(cluster, tmp_path):
    lose_rank_0_in_the_second_step(ray_trainer(tmp_path / "run", 2))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    resumed = ray_trainer(tmp_path / "run", 1)
    assert resumed.step_number == 1
    resumed.fit()

    straight = trainer_for(tmp_path / "inline")
    straight.fit()
    on_ray, inline = metrics(tmp_path / "run"), metrics(tmp_path / "inline")
    assert [line["step"] for line in on_ray] == [line["step"] for line in inline] == [1, 2, 3]
    for one, other in zip(on_ray, inline):
        assert one["rollout/logprob_diff_max"] < 1e-4
        for name in ("reward/mean", "actor/num_updates", "actor/lr"):
            assert one[name] == other[name]
    for name in ("actor/grad_norm", "actor/entropy"):
        assert on_ray[0][name] == pytest.approx(inline[0][name], rel=1e-3)
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def loses_rank_0(monkeypatch, in_updates):
    """Updates of these numbers, counted over all lives of the run, lose rank 0."""
    original, number = RayWorkerGroup.update, iter(range(100))

    def update(self, batch):
        if next(number) in in_updates:
            os.kill(self.worker_pids[0], signal.SIGKILL)
        return original(self, batch)

    monkeypatch.setattr(RayWorkerGroup, "update", update)


def restarting(folder, most):
    placement = ["trainer.placement=ray", "trainer.n_workers_per_node=2", "trainer.device=cpu"]
    more = [*placement, "trainer.deterministic=True", f"trainer.max_restarts={most}"]
    return run_to_the_end(compose([*SMALL, f"trainer.default_local_dir={folder}", *more]))


@pytest.mark.release  # the same bits in tests/trainer/test_restarts.py, over Ray in engines/sglang/test_live_kills.py
def test_a_run_that_loses_a_rank_begins_again_by_itself_with_the_same_bits(cluster, tmp_path, monkeypatch):
    restarting(tmp_path / "straight", 0)
    loses_rank_0(monkeypatch, {1})
    restarting(tmp_path / "lost", 1)
    for name in ("metrics.jsonl", "hf/model.safetensors"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "lost" / name).read_bytes()


@pytest.mark.release  # without Ray in tests/trainer/test_restarts.py
def test_a_loss_too_many_ends_the_run(cluster, tmp_path, monkeypatch):
    loses_rank_0(monkeypatch, {1, 2})
    with pytest.raises(WorkerError, match=r"rank 0 .* died while updating") as raised:
        restarting(tmp_path / "run", 1)
    assert "trainer.max_restarts=1" in raised.value.__notes__[0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]


MOVES = [
    "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "actor_rollout_ref.actor.entropy_coeff=1e-3",
]  # fmt: skip
"""In every step, also in one whose groups are all right or all wrong."""
SHARED_ROWS = (
    "actor_rollout_ref.actor.param_offload=True",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.actor.fsdp_size=1",
)


@pytest.mark.release  # shared rows in test_ray_group.py, engines with the ranks' weights in test_live_replicas.py
@pytest.mark.sglang
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
@pytest.mark.parametrize(
    "over_ranks",
    [(), SHARED_ROWS],
    ids=["", "shared rows, weights away during rollouts"],
)
def test_ranks_send_their_weights_to_a_real_engine(cluster, tmp_path, over_ranks):
    """After every update the engine's log-probs are those of the ranks' new weights, and far from those before."""
    trainer = ray_trainer(tmp_path / "run", 2, "actor_rollout_ref.rollout.name=sglang", *MOVES, *over_ranks)
    push, differences = trainer.weights.push, []
    modules = [copy.deepcopy(trainer.workers.policy_module)]

    def push_and_probe(version):
        push(version)
        modules.append(copy.deepcopy(trainer.workers.policy_module))
        prompt = trainer.val_prompts[0].ids
        ask = GenerationRequest(prompt, SamplingParams(max_new_tokens=40), f"probe {version}", "probe")
        said = trainer.stream.call(trainer.engine.generate(ask))
        assert said.version_spans == [VersionSpan(version, len(said.token_ids))]
        differences.append([worst_difference(module, prompt, said) for module in modules[-2:]])

    trainer.weights.push = push_and_probe
    trainer.fit()
    assert len(differences) == STEPS
    assert all(from_new < 1e-4 < 1e-3 < from_old for from_old, from_new in differences), differences
    for line in metrics(tmp_path / "run"):
        assert line["rollout/logprob_diff_max"] < 1e-4


@torch.no_grad()
def worst_difference(module, prompt, said):
    table = torch.log_softmax(module(torch.tensor([prompt + said.token_ids])).logits[0].float(), -1)
    own = table[len(prompt) - 1 : -1].gather(1, torch.tensor(said.token_ids)[:, None])[:, 0]
    return float((own - torch.tensor(said.log_probs)).abs().max())
