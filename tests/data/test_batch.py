"""The table of batch columns: one row per record, ids with every row, one reward per trajectory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl_mt.data import batch as col
from verl_mt.data.media import MediaInput
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import DataError, LedgerError


def make_record(prompt: list[int], turns: list[tuple[list[int], list[int]]], lp: float = -0.5) -> TrajectoryRecord:
    """`turns` = (sampled ids, observation ids) of each assistant turn."""
    record = TrajectoryRecord()
    record.append_given(prompt, kind="prompt", turn=0)
    for turn, (sampled, observation) in enumerate(turns, 1):
        record.append_sampled(sampled, [lp] * len(sampled), [3] * len(sampled), turn=turn)
        if observation:
            record.append_given(observation, kind="observation", turn=turn)
    return record


def make_trajectory(name: str, group: str, reward: float | None, records: list[TrajectoryRecord]) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        prompt_id=group,
        group_id=group,
        episode_id=name,
        data_source="toy",
        records=records,
        reward=reward,
        stop_reason=StopReason.FINISHED,
    )


def build(trajectories: list[Trajectory], pad_token_id: int = 0) -> TensorDict:
    batch = col.build_batch(trajectories, pad_token_id=pad_token_id)
    assert batch is not None
    return batch


def two_turns() -> TrajectoryRecord:
    return make_record([1, 2, 3], [([10, 11], [50, 51, 52]), ([12], [])])


def test_a_row_holds_the_record_as_it_was_recorded_and_padding_behind_it():
    short = make_record([1], [([7], [])])
    batch = build(
        [make_trajectory("a", "g", 1.0, [two_turns()]), make_trajectory("b", "g", 0.0, [short])],
        pad_token_id=99,
    )
    assert batch.batch_size == torch.Size([2])
    assert batch[col.INPUT_IDS].tolist() == [
        [1, 2, 3, 10, 11, 50, 51, 52, 12],
        [1, 7, 99, 99, 99, 99, 99, 99, 99],
    ]
    assert batch[col.ATTENTION_MASK].sum(1).tolist() == [9, 2]
    assert batch[col.LOSS_MASK][0].tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True]
    assert torch.equal(batch[col.LOSS_MASK], batch[col.SAMPLED])
    assert batch[col.ROLLOUT_LOG_PROBS][1].tolist() == [0.0, -0.5] + [0.0] * 7
    assert batch[col.POLICY_VERSIONS][1].tolist() == [-1, 3] + [-1] * 7
    assert list(batch[col.TRAJECTORY_ID]) == ["a", "b"]
    assert batch[col.HAS_LOG_PROBS].tolist() == [True, True]


def test_pictures_are_in_the_batch_where_one_row_has_some():
    seen, blind = two_turns(), two_turns()
    picture = MediaInput("image", 1, 1, {})
    seen.media = [picture]
    batch = build([make_trajectory("a", "g", 1.0, [seen]), make_trajectory("b", "g", 0.0, [blind])])
    assert [row.inputs for row in col.media_of(batch)] == [(picture,), ()]


def test_indices_are_factorised_in_order_of_first_appearance():
    rows = [("z", "G2"), ("y", "G1"), ("x", "G2")]
    batch = build([make_trajectory(n, g, 0.0, [two_turns()]) for n, g in rows], pad_token_id=0)
    assert batch[col.TRAJECTORY_INDEX].tolist() == [0, 1, 2]
    assert batch[col.GROUP_INDEX].tolist() == [0, 1, 0]
    assert batch[col.PROMPT_INDEX].tolist() == [0, 1, 0]


def test_records_of_one_trajectory_share_its_index_and_count_once_among_the_rewards():
    forked = make_trajectory("a", "g", 1.0, [two_turns(), two_turns(), two_turns()])
    batch = build([forked, make_trajectory("b", "g", 0.0, [two_turns()])], pad_token_id=0)
    assert batch[col.TRAJECTORY_INDEX].tolist() == [0, 0, 0, 1]
    assert batch[col.RECORD_INDEX].tolist() == [0, 1, 2, 0]
    rewards, groups = col.trajectory_rewards(batch)
    assert rewards.tolist() == [1.0, 0.0]
    assert groups.tolist() == [0, 0]


@pytest.mark.cap("C21")
def test_different_rewards_inside_one_trajectory_id_are_an_error_that_names_it():
    parts = [make_trajectory("call-7", "g", reward, [two_turns()]) for reward in (1.0, 0.5)]
    with pytest.raises(DataError, match=r"inconsistent rewards for trajectory 'call-7'.*1\.0 and 0\.5"):
        col.build_batch(parts, pad_token_id=0)


@pytest.mark.cap("C21")
def test_several_parts_with_one_id_and_one_reward_are_one_trajectory():
    parts = [
        make_trajectory("a", "g", 1.0, [two_turns()]),
        make_trajectory("a", "g", 1.0 + 1e-7, [two_turns()]),
    ]
    batch = build(parts, pad_token_id=0)
    assert batch[col.TRAJECTORY_INDEX].tolist() == [0, 0]
    assert batch[col.RECORD_INDEX].tolist() == [0, 1]
    assert batch[col.REWARDS].tolist() == [1.0, 1.0]


def test_one_trajectory_id_in_two_groups_is_refused():
    parts = [make_trajectory("a", g, 1.0, [two_turns()]) for g in ("g", "h")]
    with pytest.raises(DataError, match="'a' appears with group_id 'g' and 'h'"):
        col.build_batch(parts, pad_token_id=0)


def test_failed_aborted_and_fully_masked_trajectories_are_skipped():
    failed = make_trajectory("f", "g", None, [two_turns()])
    failed.stop_reason = StopReason.ERROR
    masked = make_trajectory("m", "g", 1.0, [two_turns()])
    masked.records[0].clear_mask(list(range(9)))
    good = make_trajectory("a", "g", 1.0, [two_turns()])
    kept, skipped = col.split_trainable([failed, masked, good])
    assert ([t.trajectory_id for t in kept], len(skipped)) == (["a"], 2)
    assert list(build([failed, masked, good])[col.TRAJECTORY_ID]) == ["a"]


def test_nothing_trainable_is_no_batch():
    assert col.build_batch([], pad_token_id=0) is None


def test_what_training_computed_goes_back_to_each_record_in_its_length():
    forked = make_trajectory("a", "g", 1.0, [two_turns(), make_record([1], [([7], [])])])
    batch = build([forked])
    batch[col.ADVANTAGES] = col.expand_to_tokens(batch, torch.tensor([0.5]))
    batch[col.OLD_LOG_PROBS] = torch.full(batch[col.INPUT_IDS].shape, float("nan"))
    batch[col.OLD_LOG_PROBS][1] = -1.0
    table = {key: {name: v.tolist() for name, v in found.items()} for key, found in col.per_record(batch).items()}
    assert table["a", 0] == {"advantages": [0.0] * 3 + [0.5] * 2 + [0.0] * 3 + [0.5]}
    assert table["a", 1] == {"advantages": [0.0, 0.5], "old_log_probs": [-1.0, -1.0]}


@pytest.mark.parametrize(("missing", "kept"), [([], True), ([0], False), ([8], False), ([0, 8], False), ([9], True)])
def test_a_column_with_a_missing_number_of_a_token_is_absent(missing, kept):
    """Place 9 is padding: the record has 9 tokens."""
    longer = make_record([1], [([7], [5] * 9)])
    batch = build([make_trajectory("a", "g", 1.0, [two_turns()]), make_trajectory("b", "g", 1.0, [longer])])
    batch[col.OLD_LOG_PROBS] = torch.arange(22.0).view(2, 11)
    batch[col.OLD_LOG_PROBS][0, missing] = float("nan")
    found = {key: {name: v.tolist() for name, v in columns.items()} for key, columns in col.per_record(batch).items()}
    own = {"old_log_probs": [float(place) for place in range(9)]} if kept else {}
    assert found == {("a", 0): own, ("b", 0): {"old_log_probs": [float(11 + place) for place in range(11)]}}


def test_a_trajectory_without_reward_is_named():
    with pytest.raises(DataError, match=r"'a'.*has no reward"):
        col.build_batch([make_trajectory("a", "g", None, [two_turns()])], pad_token_id=0)


def test_a_nan_reward_is_never_equal_to_anything():
    with pytest.raises(DataError, match="inconsistent rewards"):
        col.build_batch([make_trajectory("a", "g", float("nan"), [two_turns()])], pad_token_id=0)


def test_a_first_token_in_the_loss_is_refused_because_nothing_predicts_it():
    with pytest.raises(LedgerError, match="trajectory 'a', record 0: its first token is in the loss"):
        col.build_batch([make_trajectory("a", "g", 1.0, [make_record([], [([5], [])])])], pad_token_id=0)


def test_a_broken_record_is_named():
    record = two_turns()
    record.loss_mask.pop()
    with pytest.raises(LedgerError, match="trajectory 'a', record 0: columns of one record differ"):
        col.build_batch([make_trajectory("a", "g", 1.0, [record])], pad_token_id=0)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_a_trajectorys_value_reaches_exactly_the_tokens_of_its_loss_mask(shape, seed):
    trajectories = [
        make_trajectory(f"t{i}", f"g{group}", float(i), [two_turns() for _ in range(records)])
        for i, (group, records) in enumerate(shape)
    ]
    batch = build(trajectories, pad_token_id=0)
    shuffled = batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))]
    rewards, groups = col.trajectory_rewards(shuffled)
    assert rewards.tolist() == [float(i) for i in range(len(shape))]
    names = [f"g{g}" for g, _ in shape]
    assert [[a == b for b in groups.tolist()] for a in groups.tolist()] == [[a == b for b in names] for a in names]
    tokens = col.expand_to_tokens(shuffled, rewards)
    for row, name in enumerate(shuffled[col.TRAJECTORY_ID]):
        assert tokens[row].tolist() == [float(name[1:]) * m for m in shuffled[col.LOSS_MASK][row].tolist()]


def test_expanding_the_wrong_number_of_values_is_refused():
    batch = build([make_trajectory("a", "g", 1.0, [two_turns()])], pad_token_id=0)
    with pytest.raises(DataError, match="for a batch of 1 trajectories"):
        col.expand_to_tokens(batch, torch.zeros(2))


def in_rows(*trajectories: Trajectory, **changes) -> TensorDict:
    """A batch of these, each changed by the values of its place."""
    for name, values in changes.items():
        for trajectory, value in zip(trajectories, values):
            setattr(trajectory, name, value)
    return build(list(trajectories))


def three(records: int = 1) -> list[Trajectory]:
    return [make_trajectory(name, "g", 1.0, [two_turns() for _ in range(records)]) for name in "abc"]


def test_columns_that_no_row_needs_are_not_in_the_batch():
    batch = in_rows(*three())
    some = {col.TURN_REWARDS, col.GREEDY_REWARDS, col.EXECUTION_INDEX, col.MEDIA}
    assert not some & set(batch.keys()) and col.media_of(batch) is None
    assert col.weighed_together(batch).tolist() == [0, 1, 2]
    assert [rewards.parts for rewards in batch[col.REWARD_PARTS]] == [{}, {}, {}]
    assert list(batch[col.DATA_SOURCE]) == ["toy"] * 3 and list(batch[col.PROMPT_ID]) == ["g"] * 3


def test_what_one_row_needs_is_in_the_batch_for_all():
    batch = in_rows(*three(), greedy_reward=[None, 0.0, None])
    assert [math.isnan(x) for x in batch[col.GREEDY_REWARDS].tolist()] == [True, False, True]
    assert batch[col.GREEDY_REWARDS][1] == 0.0 and batch[col.GREEDY_REWARDS].dtype == torch.float32
    batch = in_rows(*three(2), execution_id=["x", None, "x"])
    assert col.weighed_together(batch).tolist() == [0, 0, 1, 1, 0, 0]
    batch = in_rows(*three(), execution_id=["b", None, None])  # of that name there is a trajectory too
    assert batch[col.EXECUTION_INDEX].tolist() == [0, 1, 2]
    batch = in_rows(*three(), turn_rewards=[{}, {1: 0.5}, {}])
    assert batch[col.TURN_REWARDS].sum(1).tolist() == [0.0, 0.5, 0.0]


def test_a_turn_is_rewarded_on_its_last_sampled_token_or_the_last_one_before_it():
    """Positions 3 and 4 of the first record are turn 1, 8 is turn 2; turn 3 is in the second record, turn 4 nowhere."""
    late = TrajectoryRecord()
    late.append_given([1, 2], kind="prompt", turn=2)
    late.append_sampled([7, 8], [-0.5, -0.5], [3, 3], turn=3)
    batch = in_rows(
        make_trajectory("a", "g", 1.0, [two_turns(), late]),
        make_trajectory("b", "g", 1.0, [two_turns()]),
        turn_rewards=[{0: 64.0, 1: 1.0, 2: 2.0, 3: 4.0, 4: 8.0}, {2: 16.0}],
    )
    expected = torch.zeros(3, 9)
    expected[0, 4], expected[0, 8], expected[1, 3], expected[2, 8] = 1.0, 2.0, 4.0 + 8.0, 16.0
    assert torch.equal(batch[col.TURN_REWARDS], expected)


def test_a_turn_whose_last_tokens_were_not_sampled_is_rewarded_before_them():
    record = two_turns()
    record.sampled[4] = 0
    record.rollout_log_probs[4], record.policy_versions[4] = 0.0, -1
    batch = in_rows(make_trajectory("a", "g", 1.0, [record]), turn_rewards=[{1: 1.0}])
    assert batch[col.TURN_REWARDS].tolist() == [[0.0] * 3 + [1.0] + [0.0] * 5]


def test_parts_of_rewards_are_a_row_per_trajectory_in_the_order_of_their_names():
    batch = in_rows(
        *three(2), reward_parts=[{"x": 1.0, "y": 2.0}, {"y": 4.0, "x": 3.0}, {"x": 5.0, "y": 6.0, "z": 0.0}]
    )
    assert col.reward_parts(batch, ["y", "x"]).tolist() == [[2.0, 1.0], [4.0, 3.0], [6.0, 5.0]]
    with pytest.raises(DataError, match=r"'a': its reward has no z. It has x, y: return"):
        col.reward_parts(batch, ["x", "z"])
    with pytest.raises(DataError, match=r"'a': its reward has no z. It has no parts"):
        col.reward_parts(in_rows(*three()), ["z"])


def test_the_first_row_of_each_trajectory_is_found_in_any_order():
    batch = in_rows(*three(2))
    assert col.first_rows(batch).tolist() == [0, 2, 4]
    assert col.first_rows(batch[torch.tensor([5, 3, 0, 4, 2, 1])]).tolist() == [2, 1, 0]
    assert col.first_rows(batch[torch.tensor([4, 1])]).tolist() == [1, 0], "numbers may be missing"


def test_an_empty_batch_has_no_trajectories():
    empty = in_rows(*three())[:0]
    assert col.expand_to_tokens(empty, torch.zeros(0)).shape == (0, 9)
    with pytest.raises(DataError, match=r"shape \(1,\) for a batch of 0 trajectories"):
        col.expand_to_tokens(empty, torch.zeros(1))


def test_clipped_tokens_go_back_to_records_too():
    batch = in_rows(*three())
    batch[col.CLIPPED] = torch.arange(27.0).view(3, 9)
    assert col.per_record(batch)["b", 0]["clipped"].tolist() == list(range(9, 18))
    assert list(col.per_record(batch)) == [("a", 0), ("b", 0), ("c", 0)]


@pytest.mark.parametrize(
    ("other", "same"), [(1.0 + 9e-7, True), (1.0 - 9e-7, True), (1.0 + 2e-6, False), (0.999, False)]
)
def test_rewards_of_one_trajectory_may_differ_by_a_millionth(other, same):
    parts = [make_trajectory("a", "g", reward, [two_turns()]) for reward in (1.0, other)]
    if same:
        assert build(parts)[col.REWARDS].tolist() == [1.0, 1.0], "the first one's"
    else:
        with pytest.raises(DataError, match="inconsistent rewards"):
            build(parts)


def test_a_later_part_without_reward_or_of_another_prompt_is_refused():
    parts = [make_trajectory("a", "g", reward, [two_turns()]) for reward in (1.0, None)]
    with pytest.raises(DataError, match=r"'a'.*has no reward"):
        build(parts)
    parts[1].reward, parts[1].prompt_id = 1.0, "h"
    with pytest.raises(DataError, match="'a' appears with prompt_id 'g' and 'h'"):
        build(parts)


def test_the_place_of_a_broken_record_is_counted_over_all_parts():
    broken = two_turns()
    broken.loss_mask.pop()
    parts = [make_trajectory("a", "g", 1.0, [two_turns(), two_turns()]), make_trajectory("a", "g", 1.0, [broken])]
    with pytest.raises(LedgerError, match="trajectory 'a', record 2: columns"):
        build(parts)
