"""Whole multi-turn rollouts on a real SGLang and a real vLLM: the local engine's records, and on-policy training."""

from __future__ import annotations

import pytest
import torch
from live import BOTH, Lab
from parity import compare

from verl_mt.algorithms.advantages import by_name as advantage_estimators
from verl_mt.data.batch import ADVANTAGES, build_batch, expand_to_tokens, trajectory_rewards
from verl_mt.workers.weight_sync import WeightSync

pytestmark = BOTH  # mark.sglang, mark.vllm


@pytest.mark.cap("C15")
def test_greedy_records_are_those_of_the_local_engine(colocated, lab: Lab, run):
    expected = run(lab.greedy_of_local_engine())
    found = run(lab.roll_out(colocated, lab.prompts, "greedy", temperature=0.0))
    result = compare(lab.module, expected, found)
    print(result)
    assert result.num_retry_rows >= 20 and result.num_sampled >= 800, result
    assert not result.differences and len(result.ties) <= 1, result


def test_log_probs_stay_those_of_the_trainer_over_five_updates_of_a_multi_turn_run(colocated, lab: Lab, run):
    start = {name: tensor.clone() for name, tensor in lab.module.state_dict().items()}
    sync = WeightSync(colocated, lab.workers, lambda coroutine, while_waiting: run(coroutine))
    worst, moved = [], []
    try:
        for step in range(6):
            prompts = lab.prompts[8 * step : 8 * step + 8]
            groups = run(lab.roll_out(colocated, prompts, f"step{step}", n=4))
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            assert {v for t in trajectories for r in t.records for v in r.policy_versions} == {-1, step}
            batch = build_batch(trajectories, pad_token_id=0)
            rewards, group_index = trajectory_rewards(batch)
            batch[ADVANTAGES] = expand_to_tokens(batch, advantage_estimators["grpo"](rewards, group_index))
            sampled = batch["rollout_log_probs"] != 0
            before = lab.workers.compute_log_probs(batch)
            worst.append(float((before - batch["rollout_log_probs"])[sampled].abs().max()))
            lab.workers.update(batch)
            moved.append(float((lab.workers.compute_log_probs(batch) - before)[sampled].abs().max()))
            sync.push(step + 1)
    finally:
        lab.module.load_state_dict(start)
    assert max(worst) <= 1e-4, worst
    assert min(moved) > 1e-2, moved
    assert torch.isfinite(torch.tensor(moved)).all()
