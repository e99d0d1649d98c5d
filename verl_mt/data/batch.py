"""The training batch: a TensorDict with one row per record, and the table of its columns.

No other file spells a column name. Shape suffixes: `B` rows (records), `T` tokens of the longest row, `N`
trajectories. Rows are right-padded. Position t of a log-prob column holds log p(token t | tokens < t). Ids
travel with every row; nothing is ever regrouped by position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.media import MediaInput
from verl_mt.data.trajectory import Trajectory
from verl_mt.errors import DataError, LedgerError

INPUT_IDS = "input_ids"
"""int64 [B, T]; the pad token beyond a row's end."""
ATTENTION_MASK = "attention_mask"
"""bool [B, T]; the row's own tokens."""
SAMPLED = "sampled"
"""bool [B, T]; the engine produced the token in this rollout."""
LOSS_MASK = "loss_mask"
"""bool [B, T]; the token is trained."""
ROLLOUT_LOG_PROBS = "rollout_log_probs"
"""float32 [B, T]; by the sampler, 0 where nothing was sampled."""
OLD_LOG_PROBS = "old_log_probs"
"""float32 [B, T]; by the trainer's policy before this batch's first update; NaN in rows not computed."""
REF_LOG_PROBS = "ref_log_probs"
"""float32 [B, T]; by the frozen reference policy."""
POLICY_VERSIONS = "policy_versions"
"""int64 [B, T]; version of the weights that sampled the token, -1 elsewhere."""
AGES = "ages"
"""int32 [B, T]; steps between the weights that sampled the token and those that the batch trains, 0 where nothing was
sampled; only with `trainer.max_staleness` above 0."""
CORRECTION = "rollout_correction"
"""float32 [B, T]; factor of each token's loss, where one was decided over the whole batch."""
CLIPPED = "clipped"
"""float32 [B, T]; above 0 where the policy loss of a token had no gradient in some pass of the update (clipped, or left
out by a correction) though it has an advantage; NaN where the row did not pass."""
ADVANTAGES = "advantages"
"""float32 [B, T]; 0 outside the loss mask."""
VALUES = "values"
"""float32 [B, T]; the critic's, of the state that each token of the loss mask was chosen in; 0 elsewhere."""
RETURNS = "returns"
"""float32 [B, T]; what the critic learns to predict; 0 outside the loss mask."""
TOKEN_REWARDS = "token_rewards"
"""float32 [B, T]; the reward that each token of the loss mask earned, a KL penalty included; filled in with the
advantages where these are per token."""
TURN_REWARDS = "turn_rewards"
"""float32 [B, T]; the part of a trajectory's reward that belongs to single turns, on each one's last sampled token;
only where there is such (`reward.placement=turn`)."""
REWARDS = "rewards"
"""float32 [B]; the trajectory's reward, the same on all its records."""
GREEDY_REWARDS = "greedy_rewards"
"""float32 [B]; that of the greedy answer to the same prompt, NaN where that failed; only where one was sampled."""
TRAJECTORY_INDEX = "trajectory_index"
"""int64 [B]; 0..N-1, trajectory ids in order of first appearance."""
GROUP_INDEX = "group_index"
"""int64 [B]; the same of group ids."""
PROMPT_INDEX = "prompt_index"
"""int64 [B]; the same of prompt ids."""
EXECUTION_INDEX = "execution_index"
"""int64 [B]; rows that share it weigh in the loss as one sequence; only where trajectories share an execution."""
RECORD_INDEX = "record_index"
"""int64 [B]; place of the record in its trajectory."""
HAS_LOG_PROBS = "has_log_probs"
"""bool [B]; False where a text-only engine gave no log-probs."""
TRAJECTORY_ID = "trajectory_id"
GROUP_ID = "group_id"
PROMPT_ID = "prompt_id"
DATA_SOURCE = "data_source"

REWARD_PARTS = "reward_parts"
"""Non-tensor column: one `RowRewards` per row."""
MEDIA = "media"
"""Non-tensor column, only where a record has images or videos: one `RowMedia` per row."""

ID_COLUMNS = (TRAJECTORY_ID, GROUP_ID, PROMPT_ID, DATA_SOURCE, REWARD_PARTS)
"""Non-tensor columns that no worker reads."""

_REWARD_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class RowMedia:
    """The images and videos of a row, in order. `start` counts in the row."""

    inputs: tuple[MediaInput, ...] = ()


@dataclass(frozen=True)
class RowRewards:
    """The numbers that a row's reward is made of, by name."""

    parts: dict[str, float]


def split_trainable(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """Those that a batch takes (completed or truncated, with a token in the loss), and those it skips."""
    kept = [t for t in trajectories if t.trainable]
    return kept, [t for t in trajectories if not t.trainable]


def build_batch(trajectories: Sequence[Trajectory], *, pad_token_id: int) -> TensorDict | None:
    """One row per record of every trainable trajectory, in their order. The others are skipped.

    Args:
        trajectories: scored. Several with one id (a loop that returned its records one by one) are one
            trajectory.
        pad_token_id: fills `input_ids` beyond a row's end.

    Returns:
        All columns of the table but those that training fills in (log-probs of policies, advantages, values, returns,
        token rewards). None if nothing is trainable.

    Raises:
        DataError: a trajectory without reward, or one id with different rewards, groups or prompts.
        LedgerError: a record whose columns do not fit, or whose first token is in the loss (nothing comes
            before it).
    """
    rows: list[tuple[Trajectory, TrajectoryRecord]] = []
    first: dict[str, Trajectory] = {}
    record_index: list[int] = []
    num_records: dict[str, int] = {}
    for trajectory in split_trainable(trajectories)[0]:
        _check_same(first.setdefault(trajectory.trajectory_id, trajectory), trajectory)
        for record in trajectory.records:
            rows.append((trajectory, record))
            place = num_records.get(trajectory.trajectory_id, 0)
            _check_record(record, f"trajectory {trajectory.trajectory_id!r}, record {place}")
            record_index.append(place)
            num_records[trajectory.trajectory_id] = place + 1
    if not rows:
        return None
    records = [record for _, record in rows]
    owners = [trajectory for trajectory, _ in rows]
    lengths = [len(record.token_ids) for record in records]
    ids: dict[str, list[str]] = {
        TRAJECTORY_ID: [t.trajectory_id for t in owners],
        GROUP_ID: [t.group_id for t in owners],
        PROMPT_ID: [t.prompt_id for t in owners],
        DATA_SOURCE: [t.data_source for t in owners],
    }
    columns: dict[str, Any] = {
        INPUT_IDS: _pad([r.token_ids for r in records], np.int64, pad_token_id),
        ATTENTION_MASK: torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None],
        SAMPLED: _pad([r.sampled for r in records], np.bool_, False),
        LOSS_MASK: _pad([r.loss_mask for r in records], np.bool_, False),
        ROLLOUT_LOG_PROBS: _pad([r.rollout_log_probs for r in records], np.float32, 0.0),
        POLICY_VERSIONS: _pad([r.policy_versions for r in records], np.int64, -1),
        REWARDS: torch.tensor([first[t.trajectory_id].reward for t in owners], dtype=torch.float32),
        TRAJECTORY_INDEX: _factorise(ids[TRAJECTORY_ID]),
        GROUP_INDEX: _factorise(ids[GROUP_ID]),
        PROMPT_INDEX: _factorise(ids[PROMPT_ID]),
        RECORD_INDEX: torch.tensor(record_index, dtype=torch.int64),
        HAS_LOG_PROBS: torch.tensor([r.has_log_probs for r in records], dtype=torch.bool),
    }
    batch = TensorDict(columns, batch_size=[len(rows)])
    for name, values in ids.items():
        batch[name] = NonTensorStack(*values)
    _add_what_some_have(batch, rows)
    return batch


def _add_what_some_have(batch: TensorDict, rows: Sequence[tuple[Trajectory, TrajectoryRecord]]) -> None:
    """Columns that stand in a batch only if a row has something to put there; and the parts of rewards."""
    batch[REWARD_PARTS] = NonTensorStack(*(RowRewards(owner.reward_parts) for owner, _ in rows))
    if any(owner.turn_rewards for owner, _ in rows):
        batch[TURN_REWARDS] = _turn_rewards(rows, batch[SAMPLED])
    if any(owner.greedy_reward is not None for owner, _ in rows):
        greedy = [math.nan if owner.greedy_reward is None else owner.greedy_reward for owner, _ in rows]
        batch[GREEDY_REWARDS] = torch.tensor(greedy, dtype=torch.float32)
    if any(owner.execution_id is not None for owner, _ in rows):
        # A prefix each, so that a trajectory's id is never taken for an execution's.
        names = [f"t {o.trajectory_id}" if o.execution_id is None else f"e {o.execution_id}" for o, _ in rows]
        batch[EXECUTION_INDEX] = _factorise(names)
    if any(record.media for _, record in rows):
        batch[MEDIA] = NonTensorStack(*(RowMedia(tuple(record.media)) for _, record in rows))


def weighed_together(batch: TensorDict) -> Tensor:
    """int64 [B]: rows of one number weigh in the loss as one sequence."""
    own: Tensor = batch[TRAJECTORY_INDEX]
    return batch.get(EXECUTION_INDEX, own)


def media_of(batch: TensorDict) -> list[RowMedia] | None:
    """One entry per row. None where no row of the batch has any."""
    if MEDIA not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return None
    return list(batch[MEDIA])


def reward_parts(batch: TensorDict, names: Sequence[str]) -> Tensor:
    """[N, K]: the named numbers of each trajectory's reward, in the order of `trajectory_rewards`.

    Raises:
        DataError: a trajectory's reward function did not return one of them. Says what it returned.
    """
    rows = first_rows(batch).tolist()
    all_parts, ids = list(batch[REWARD_PARTS]), list(batch[TRAJECTORY_ID])
    for row in rows:
        missing = [name for name in names if name not in all_parts[row].parts]
        if missing:
            raise DataError(
                f"trajectory {ids[row]!r}: its reward has no {', '.join(missing)}. It has "
                f"{', '.join(sorted(all_parts[row].parts)) or 'no parts'}: return a dict with these keys"
            )
    return torch.tensor([[all_parts[row].parts[name] for name in names] for row in rows], dtype=torch.float32)


def trajectory_rewards(batch: TensorDict) -> tuple[Tensor, Tensor]:
    """(rewards_N, group_index_N) of the batch's trajectories in order of `trajectory_index`: each counts
    once, however many records it has."""
    rows_N = first_rows(batch)
    return batch[REWARDS][rows_N], batch[GROUP_INDEX][rows_N]


def first_rows(batch: TensorDict) -> Tensor:
    """int64 [N]: a row of each trajectory, in order of `trajectory_index`."""
    index_B = batch[TRAJECTORY_INDEX]
    values, place_B = torch.unique(index_B, return_inverse=True)
    rows = torch.arange(len(index_B), device=index_B.device)
    start = torch.full((len(values),), len(index_B), dtype=torch.int64, device=index_B.device)
    return start.scatter_reduce(0, place_B, rows, "amin")


def expand_to_tokens(batch: TensorDict, values_N: Tensor) -> Tensor:
    """[B, T]: a trajectory's value on every token of its loss mask, on all its records. 0 elsewhere.

    Args:
        batch: made by `build_batch`.
        values_N: one value per trajectory, in the order of `trajectory_rewards`.

    Raises:
        DataError: not as many values as trajectories.
    """
    _, place_B = torch.unique(batch[TRAJECTORY_INDEX], return_inverse=True)
    expected = int(place_B.max()) + 1 if len(place_B) else 0
    if values_N.shape != (expected,):
        raise DataError(f"got values of shape {tuple(values_N.shape)} for a batch of {expected} trajectories")
    return values_N[place_B].unsqueeze(1) * batch[LOSS_MASK].to(values_N.dtype)


def per_record(batch: TensorDict) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """(trajectory id, record index) -> what training computed for each of the record's tokens.

    The arrays (float32) are as long as the record and 0 outside the loss mask. A column that the batch lacks, or that
    was not computed for a row (NaN), is absent.
    """
    names = [name for name in (ADVANTAGES, OLD_LOG_PROBS, CLIPPED) if name in batch.keys()]  # noqa: SIM118 - iterates over its rows
    mask_BT = batch[ATTENTION_MASK]
    lengths = mask_BT.sum(1).tolist()
    values = {name: batch[name].cpu().numpy() for name in names}
    computed = {name: (~(torch.isnan(batch[name]) & mask_BT).any(1)).tolist() for name in names}
    keys = zip(batch[TRAJECTORY_ID], batch[RECORD_INDEX].tolist())
    return {
        key: {name: values[name][row, : lengths[row]] for name in names if computed[name][row]}
        for row, key in enumerate(keys)
    }


def _turn_rewards(rows: Sequence[tuple[Trajectory, TrajectoryRecord]], sampled_BT: Tensor) -> Tensor:
    """[B, T]: every turn's reward on the last token of it that was sampled; where nothing of it is left (a scheduler
    cut it), on the last one before it. What has no token at all is left to the trajectory's last one."""
    placed = torch.zeros(sampled_BT.shape)
    ends: dict[str, list[tuple[int, int, int]]] = {}
    for row, (trajectory, record) in enumerate(rows):
        for span in record.turns:
            here = sampled_BT[row, span.start : span.end].nonzero()
            if len(here):
                end = span.start + int(here[-1])
                ends.setdefault(trajectory.trajectory_id, []).append((span.turn, row, end))
    for trajectory in {id(t): t for t, _ in rows}.values():
        for turn, reward in trajectory.turn_rewards.items():
            before = [end for end in ends.get(trajectory.trajectory_id, []) if end[0] <= turn]
            if before:
                _, row, position = max(before)
                placed[row, position] += reward
    return placed


def _pad(rows: Sequence[Sequence[Any]], dtype: type, filler: float) -> Tensor:
    padded: np.ndarray = np.full((len(rows), max(map(len, rows))), filler, dtype)
    for place, row in zip(padded, rows):
        place[: len(row)] = row
    return torch.from_numpy(padded)


def _factorise(ids: Sequence[str]) -> Tensor:
    places: dict[str, int] = {}
    return torch.tensor([places.setdefault(i, len(places)) for i in ids], dtype=torch.int64)


def _check_same(first: Trajectory, other: Trajectory) -> None:
    if other.reward is None:
        raise DataError(
            f"trajectory {other.trajectory_id!r} (stop reason {other.stop_reason}) has no reward. "
            "Score every trajectory before building a batch, or mark it failed"
        )
    assert first.reward is not None
    if not abs(first.reward - other.reward) <= _REWARD_TOLERANCE:
        raise DataError(
            f"inconsistent rewards for trajectory {other.trajectory_id!r}: {first.reward} and "
            f"{other.reward}. All records of one trajectory share one reward"
        )
    for name in ("group_id", "prompt_id"):
        if getattr(first, name) != getattr(other, name):
            raise DataError(
                f"trajectory {other.trajectory_id!r} appears with {name} {getattr(first, name)!r} "
                f"and {getattr(other, name)!r}. An id belongs to one of each"
            )


def _check_record(record: TrajectoryRecord, where: str) -> None:
    try:
        record.check()
    except LedgerError as error:
        raise LedgerError(f"{where}: {error}") from error
    if any(record.loss_mask[:1]):
        raise LedgerError(f"{where}: its first token is in the loss, but no token comes before it to predict it from")
