"""A scheduler that cuts back, goes on and rewrites, on a real colocated SGLang."""

from __future__ import annotations

from dataclasses import replace

import pytest
from live import Lab
from mixed_scheduler import Mixed
from parity import compare

from verl_mt.data.batch import ROLLOUT_LOG_PROBS, SAMPLED, build_batch
from verl_mt.extensions.compat.schedulers.driver import SchedulerDriver

pytestmark = pytest.mark.sglang


@pytest.mark.cap("C15", "C16", "C17", "C20")
def test_records_and_log_probs_are_those_of_the_local_engine_and_of_the_trainer(colocated, lab: Lab, run):
    limits = replace(lab.local.context.limits, max_assistant_turns=6, response_length=400, max_tokens_per_turn=40)
    context = replace(lab.local.context, limits=limits)
    scheduled = replace(lab, local=replace(lab.local, context=context, driver=SchedulerDriver(Mixed())))
    prompts = lab.prompts[:40]
    expected = run(scheduled.roll_out(lab.local.context.engine, prompts, "greedy", temperature=0.0))
    found = run(scheduled.roll_out(colocated, prompts, "greedy", temperature=0.0))
    result = compare(lab.module, expected, found)
    print(result)
    assert not result.differences and len(result.ties) <= 3, result

    sampled = run(scheduled.roll_out(colocated, prompts, "sampled"))
    trajectories = [t for group in sampled for t in group.trajectories]
    assert sum(len(t.records) > 1 for t in trajectories) > 20
    assert sum(t.counters.get("cut_tokens", 0) > 0 for t in trajectories) > 20
    batch = build_batch(trajectories, pad_token_id=0)
    own = lab.workers.compute_log_probs(batch)
    assert float((own - batch[ROLLOUT_LOG_PROBS])[batch[SAMPLED]].abs().max()) <= 1e-4
