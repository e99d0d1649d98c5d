"""However a trajectory is split into records, it weighs the same: every sampled token once, and the same gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from actor_toys import VOCAB, fill_advantages, tiny_policy, worker
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def conversation(turns: list[tuple[int, int]], prompt: int, seed: int) -> TrajectoryRecord:
    """(sampled, given) numbers of tokens per turn."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(1, VOCAB, (count,), generator=generator).tolist()

    record = TrajectoryRecord()
    record.append_given(tokens(prompt), kind="prompt", turn=0)
    for number, (sampled, observed) in enumerate(turns, start=1):
        record.append_sampled(tokens(sampled), [-1.0] * sampled, [0] * sampled, turn=number)
        record.append_given(tokens(observed), kind="observation", turn=number)
    return record


def split_at(record: TrajectoryRecord, turns: set[int]) -> list[TrajectoryRecord]:
    records = [copy.deepcopy(record)]
    for turn in sorted(turns):
        start = next(s.start for s in records[-1].turns if s.kind == "assistant" and s.turn == turn)
        records[-1:] = records[-1].split(start)
    return records


def gradient(groups: list[list[tuple[float, list[TrajectoryRecord]]]], mode: str) -> torch.Tensor:
    trajectories = [
        Trajectory(f"t{g}.{s}", f"p{g}", f"p{g}", f"t{g}.{s}", records=records, reward=reward,
                   stop_reason=StopReason.FINISHED)
        for g, group in enumerate(groups)
        for s, (reward, records) in enumerate(group)
    ]  # fmt: skip
    batch = col.build_batch(trajectories, pad_token_id=0)
    assert batch is not None
    fill_advantages(batch)
    actor = worker(tiny_policy(), lr=1.0, grad_clip=0.0, loss_agg_mode=mode)
    found: list[torch.Tensor] = []
    actor.optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([p.grad.flatten() for p in actor.module.parameters()]))
    )
    actor.update(batch)
    return found[0]


@st.composite
def trajectories(draw):
    turns = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=2, max_size=4))
    places = draw(st.sets(st.integers(2, len(turns)), min_size=1))
    return conversation(turns, draw(st.integers(1, 4)), draw(st.integers(0, 99))), places


@pytest.mark.cap("C20")
@given(trajectories())
@settings(max_examples=30, deadline=None)
def test_every_sampled_token_is_trained_exactly_once(case):
    record, places = case
    records = split_at(record, places)
    assert len(records) == len(places) + 1
    for part in records:
        part.check()
        assert part.token_ids == record.token_ids[: len(part.token_ids)]
    trained = [(p, t) for r in records for p, (t, bit) in enumerate(zip(r.token_ids, r.loss_mask)) if bit]
    assert trained == [(p, t) for p, (t, bit) in enumerate(zip(record.token_ids, record.sampled)) if bit]


@pytest.mark.slow
@pytest.mark.cap("C91", "C20")
@pytest.mark.parametrize("mode", MODES)
@given(trajectories())
@settings(max_examples=8, deadline=None)
def test_a_split_changes_no_gradient_whatever_the_loss_is_averaged_over(mode, case):
    record, places = case
    others = [(0.0, [conversation([(2, 1), (1, 0)], 2, 7)]), (1.0, [conversation([(3, 0)], 2, 8)])]
    whole = gradient([[(1.0, [record]), others[0]], [others[1], others[0]]], mode)
    split = gradient([[(1.0, split_at(record, places)), others[0]], [others[1], others[0]]], mode)
    assert whole.abs().max() > 0
    assert torch.allclose(whole, split, atol=1e-5 * float(whole.abs().max()), rtol=1e-4)
