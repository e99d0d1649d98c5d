"""From what a generate function returned to trajectories: one per Sample, each checked against its conversation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from verl_mt.data.sample import Sample, fill_from_record
from verl_mt.data.trajectory import Status, StopReason, Trajectory
from verl_mt.errors import LedgerError, UserCodeError, value_text
from verl_mt.rewards.contract import InvalidScore, as_scores
from verl_mt.rollout.conversations import Conversation, Conversations
from verl_mt.rollout.sample_check import adopt, align

log = logging.getLogger(__name__)

_LOST = (Status.ABORTED, Status.FAILED)


async def settle(result: Any, given: Sample, conversations: Conversations, path: str) -> list[Trajectory]:
    """The trajectories of one call.

    Args:
        result: a Sample, or a list of Samples; None in a list is a worker that failed, and is dropped.
        given: the Sample that the function was called with, to say what came back instead of one.
        path: the function, for errors.

    Raises:
        UserCodeError: no Sample came back.
        LedgerError: a Sample that does not fit what the engine sampled; names the numbers.
    """
    samples = _samples(result, path)
    if not isinstance(result, list) and samples[0].status in _LOST:
        return [_lost(samples[0], conversations.main.trajectory, conversations)]
    outcome, unmatched, lost = [], list(conversations.items), 0
    for position, sample in enumerate(samples):
        where = f"generate function {path}{_which(position, samples)}"
        found = conversations.conversation_of(sample, unmatched)
        if found is None and sample.status in _LOST:
            lost += 1
            continue
        conversation = found or _refuse(sample, unmatched, conversations, where)
        unmatched.remove(conversation)
        outcome.append(await _kept(sample, conversation, conversations, where))
    if not outcome:
        raise UserCodeError(
            f"generate function {path}: all {len(samples)} Samples were given up ({lost} without tokens)"
        )
    dropped = (len(result) - len(samples) if isinstance(result, list) else 0) + lost
    for name, count in (("dropped_samples", dropped), ("unreturned_conversations", len(unmatched))):
        if count:
            outcome[0].counters[name] = count
    return outcome


def _samples(result: Any, path: str) -> list[Sample]:
    items = [s for s in result if s is not None] if isinstance(result, list) else [result]
    for item in items:
        if not isinstance(item, Sample):
            raise UserCodeError(
                f"generate function {path} returned {type(item).__name__}, expected a Sample or a list of Samples "
                "(verl_mt.rollout.custom_generate.Sample)"
            )
    if not items:
        raise UserCodeError(f"generate function {path} returned no Sample: {value_text(result)}")
    if len(set(map(id, items))) < len(items):
        raise LedgerError(f"generate function {path} returned the same Sample object twice; copy.deepcopy it per agent")
    for position, item in enumerate(items):
        try:
            item.check_types()
        except LedgerError as error:
            raise LedgerError(f"generate function {path}{_which(position, items)}: {error}") from None
    return items


def _which(position: int, samples: Sequence[Sample]) -> str:
    return f", Sample {position} of {len(samples)}" if len(samples) > 1 else ""


async def _kept(sample: Sample, conversation: Conversation, conversations: Conversations, where: str) -> Trajectory:
    session = conversation.session
    trajectory = session.trajectory
    if sample.status in _LOST:
        return _lost(sample, trajectory, conversations)
    try:
        adopt(sample, trajectory, session.context.chat.decode)
        _take_reward(sample, trajectory)
    except LedgerError as error:
        raise LedgerError(f"{where}: {error}") from error
    trajectory.stop_reason = _stop_reason(sample.status, trajectory.stop_reason or session.cut_reason)
    _place(sample, trajectory)
    if session is not conversations.main:
        await session.finish()
    return trajectory


def _lost(sample: Sample, trajectory: Trajectory, conversations: Conversations) -> Trajectory:
    """Given up by the function: what was sampled stays for people to look at, nothing is scored or trained."""
    trajectory.stop_reason = StopReason.ABORTED if sample.status is Status.ABORTED else StopReason.ERROR
    trajectory.error = trajectory.error or f"the generate function set sample.status = {sample.status.value}"
    log.warning("%s: the generate function gave it up (%s)", trajectory.trajectory_id, sample.status.value)
    if any(record.sampled for record in trajectory.records):
        fill_from_record(sample, trajectory.records[-1])
    sample.turn_texts = list(trajectory.turn_texts)
    _place(sample, trajectory)
    return trajectory


def _place(sample: Sample, trajectory: Trajectory) -> None:
    """Its ids: agents of one episode share prompt and episode; those of one role are compared with each other."""
    role = sample.metadata.get("role")
    if role is not None:
        trajectory.group_id = f"{trajectory.prompt_id}/{role}"
    sample.status = trajectory.status
    sample.session_id = trajectory.trajectory_id
    trajectory.sample = sample


def _take_reward(sample: Sample, trajectory: Trajectory) -> None:
    if sample.reward is None:
        return
    try:
        trajectory.reward_parts = as_scores(sample.reward, "of the generate function")
    except InvalidScore as error:
        raise LedgerError(f"sample.reward: {error}") from None
    trajectory.reward = trajectory.reward_parts["score"]


def _stop_reason(status: Status, known: StopReason | None) -> StopReason:
    """The function decides whether it is done; a limit that was hit says why it was cut."""
    cut = known is not None and known.status is Status.TRUNCATED
    if status is Status.TRUNCATED:
        return known if cut and known is not None else StopReason.TRUNCATED
    if status is Status.PENDING and cut:
        assert known is not None
        return known
    return StopReason.SCHEDULER


def _refuse(sample: Sample, unmatched: list[Conversation], conversations: Conversations, where: str) -> Conversation:
    """Say what is wrong with a Sample that no conversation fits.

    Raises:
        LedgerError: always.
    """
    if not conversations.items:
        raise LedgerError(
            f"{where}: it has {len(sample.tokens)} tokens, but the function never asked the engine (post to "
            "http://{args.sglang_router_ip}:{args.sglang_router_port}/generate)"
        )
    sample.check_lengths()
    if not unmatched:
        raise LedgerError(
            f"{where}: the function returned more Samples than it had conversations with the engine "
            f"({len(conversations.items)}); every Sample is one of them, and each is returned once"
        )
    problems = []
    for conversation in unmatched:
        try:
            align(sample, conversation.session.record, conversation.session.context.chat.decode)
        except LedgerError as error:
            problems.append((conversation.number, str(error)))
    shown = "; ".join(f"conversation {number}: {text}" if len(problems) > 1 else text for number, text in problems[:3])
    raise LedgerError(f"{where}: its tokens are not the engine's. {shown}")
