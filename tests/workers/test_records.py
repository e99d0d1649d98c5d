"""However a trajectory is cut into records, it is trained once and with the same weight."""

from __future__ import annotations

import pytest
import torch
from actor_toys import VOCAB, fill_advantages
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_jobs import one_update

from verl_mt.algorithms.aggregate import MODES
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.workers.sharding import ALONE

Turn = tuple[list[int], list[int], list[float]]
"""(what the environment said before it, sampled ids, their log-probs)."""


def one_record(turns: list[Turn]) -> list[TrajectoryRecord]:
    """All turns in one stream."""
    record = TrajectoryRecord()
    for number, (given_ids, ids, log_probs) in enumerate(turns, 1):
        record.append_given(given_ids, kind="prompt" if number == 1 else "observation", turn=number - 1)
        record.append_sampled(ids, log_probs, [0] * len(ids), turn=number)
    return [record]


def cut_records(turns: list[Turn], cuts: list[int]) -> list[TrajectoryRecord]:
    """A new record begins with each turn in `cuts`: everything before is its prompt, which is seen and not trained."""
    starts = [0, *cuts]
    records = []
    for first, end in zip(starts, [*cuts, len(turns)]):
        seen = [i for given_ids, ids, _ in turns[:first] for i in given_ids + ids]
        record = TrajectoryRecord()
        record.append_given(seen + turns[first][0], kind="prompt", turn=first)
        for number, (given_ids, ids, log_probs) in enumerate(turns[first:end], first + 1):
            if number > first + 1:
                record.append_given(given_ids, kind="observation", turn=number - 1)
            record.append_sampled(ids, log_probs, [0] * len(ids), turn=number)
        records.append(record)
    return records


def batch_of(conversations: list[list[Turn]], rewards: list[float], split: list[list[int]] | None):
    trajectories = []
    for k, (turns, reward) in enumerate(zip(conversations, rewards)):
        records = one_record(turns) if split is None else cut_records(turns, split[k])
        trajectories.append(
            Trajectory(f"t{k}", "p", "p", f"t{k}", records=records, reward=reward, stop_reason=StopReason.FINISHED)
        )
    batch = col.build_batch(trajectories, pad_token_id=0)
    fill_advantages(batch)
    return batch


TOKENS = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=4)


@st.composite
def conversations_and_cuts(draw):
    conversations, cuts = [], []
    for _ in range(draw(st.integers(2, 3))):
        turns = [
            (draw(TOKENS), ids := draw(TOKENS), [-3.0 - 0.1 * k for k in range(len(ids))])
            for _ in range(draw(st.integers(1, 4)))
        ]
        conversations.append(turns)
        cuts.append(sorted(draw(st.sets(st.integers(1, len(turns) - 1)))) if len(turns) > 1 else [])
    rewards = draw(st.permutations([1.0, 0.0, 0.25]))[: len(conversations)]
    return conversations, cuts, rewards


@pytest.mark.cap("C20", "C91")
@given(conversations_and_cuts())
def test_every_sampled_token_is_trained_exactly_once(drawn):
    conversations, cuts, rewards = drawn
    whole, split = batch_of(conversations, rewards, None), batch_of(conversations, rewards, cuts)
    for k, turns in enumerate(conversations):
        sampled = [i for _, ids, _ in turns for i in ids]
        for batch in (whole, split):
            rows = batch[col.TRAJECTORY_INDEX] == k
            assert batch[col.INPUT_IDS][rows][batch[col.LOSS_MASK][rows]].tolist() == sampled


@pytest.mark.slow
@pytest.mark.cap("C20", "C21", "C91")
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=6, deadline=None)
@given(drawn=conversations_and_cuts(), old=st.sampled_from(["auto", "always"]), max_rows=st.sampled_from([None, 1]))
def test_no_split_changes_the_gradient(mode, drawn, old, max_rows):
    """In every aggregation mode, on-policy and against the sampler's log-probs (ratios far from 1)."""
    conversations, cuts, rewards = drawn
    kwargs = {"loss_agg_mode": mode, "grad_clip": 0.0, "use_sampler_log_probs": old, "ppo_micro_batch_size": max_rows}
    whole = one_update(ALONE, batch_of(conversations, rewards, None), **kwargs)
    split = one_update(ALONE, batch_of(conversations, rewards, cuts), **kwargs)
    assert len(whole["gradients"]) == len(split["gradients"])
    torch.testing.assert_close(split["gradients"], whole["gradients"], atol=5e-6, rtol=1e-4)
    assert split["metrics"]["actor/loss"] == pytest.approx(whole["metrics"]["actor/loss"], abs=1e-5)
