"""From what a generate function returned to trajectories: one per Sample, each checked against its conversation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from verl_mt.data.ledger import Ledger, TrajectoryRecord
from verl_mt.data.trajectory import Status, StopReason, Trajectory
from verl_mt.errors import LedgerError, UserCodeError, value_text
from verl_mt.extensions.compat.generate.align import Alignment, align
from verl_mt.extensions.compat.generate.args import COMPAT
from verl_mt.extensions.compat.generate.requests import CallConversations, RequestedConversation
from verl_mt.extensions.compat.rewards.slime import by_reward_key
from verl_mt.extensions.compat.slime_sample import Sample, check_unsupported, fill_from_record
from verl_mt.extensions.toolbox.editing.session import EditableSession
from verl_mt.rewards.contract import InvalidScore, as_scores

log = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""Between a log-prob as the engine gave it and as the function hands it back (it may have gone through float32)."""


async def settle(result: Any, conversations: CallConversations, path: str, args: Any = None) -> list[Trajectory]:
    """The trajectories of one call.

    Args:
        result: a Sample, or a list of Samples; None in a list is a worker that failed, and is dropped.
        path: the function, for errors.
        args: of the call; its `reward_key` names the score in a dict.

    Raises:
        UserCodeError: no Sample came back.
        LedgerError: a Sample that does not fit what the engine sampled; names the numbers.
    """
    samples = _samples(result, path)
    if not isinstance(result, list) and samples[0].status in COMPAT.given_up:
        return [_lost(samples[0], conversations.main.trajectory)]
    outcome, unmatched, lost = [], _divided(conversations, samples), 0
    for position, sample in enumerate(samples):
        where = f"generate function {path}{_which(position, samples)}"
        match = conversations.match(sample, unmatched)
        if match is None and sample.status in COMPAT.given_up | {Status.FAILED}:
            if not isinstance(result, list):
                return [_lost(sample, conversations.main.trajectory)]
            lost += 1
            continue
        if match is None:
            raise _mismatch(sample, unmatched, len(conversations.items), where)
        conversation, found = match
        unmatched.remove(conversation)
        if sample.status in COMPAT.given_up:
            outcome.append(_lost(sample, conversation.session.trajectory))
            continue
        try:
            _adopt(sample, conversation.session, found, args)
        except LedgerError as error:
            if sample.status is Status.FAILED:  # it gave up somewhere in the middle
                outcome.append(_lost(sample, conversation.session.trajectory))
                continue
            raise LedgerError(f"{where}: {error}") from error
        if conversation.session is not conversations.main:
            await conversation.session.finish()
        outcome.append(conversation.session.trajectory)
    if not outcome and all(sample.status in COMPAT.given_up for sample in samples):
        return [_lost(samples[0], conversations.main.trajectory)]
    if not outcome:
        raise UserCodeError(
            f"generate function {path}: all {len(samples)} Samples were dropped ({lost} without tokens)"
        )
    dropped = (len(result) - len(samples) if isinstance(result, list) else 0) + lost
    for name, count in (("dropped_samples", dropped), ("unreturned_conversations", len(unmatched))):
        if count:
            outcome[0].counters[name] = count
    return outcome


def _divided(conversations: CallConversations, samples: Sequence[Sample]) -> list[RequestedConversation]:
    """The conversations of a call; one of which several Samples hold different turns (a function that returns every
    step as a Sample, each with all before it as its prompt) in as many parts, so that each Sample has one."""
    result: list[RequestedConversation] = []
    for conversation in conversations.items:
        if len(samples) < 2 or len(conversation.session.record.assistant_turns) < 2:
            result.append(conversation)
            continue
        ranges = sorted(filter(None, (_own_turns(conversation, sample) for sample in samples)))
        if len(ranges) < 2 or any(after[0] < before[1] for before, after in pairwise(ranges)):
            result.append(conversation)
            continue
        parts = [_part(conversation, first, last) for first, last in ranges]
        held = {turn for first, last in ranges for turn in range(first, last)}
        spans = conversation.session.record.assistant_turns
        parts[0].session.count("discarded_tokens", sum(s.end - s.start for k, s in enumerate(spans) if k not in held))
        result += parts
    return result


def _own_turns(conversation: RequestedConversation, sample: Sample) -> tuple[int, int] | None:
    """Which of a conversation's assistant turns a Sample's response holds, `[first, last)`, where its tokens end with
    one of them; None where they do not."""
    record = conversation.session.record
    spans = record.assistant_turns
    begins = len(sample.tokens) - sample.response_length
    for last in range(len(spans), 0, -1):
        ids = record.token_ids[spans[last - 1].start : spans[last - 1].end]
        if list(sample.tokens[len(sample.tokens) - len(ids) :]) != ids:
            continue
        until = _copy_until(record, spans[last - 1].end)
        try:
            found = align(sample.tokens, until, conversation.session.context.chat.decode, wanted=sample.loss_mask)
        except LedgerError:
            continue
        if len(found.places) < len(until.token_ids):
            continue
        own = [k for k, span in enumerate(spans[:last]) if (found.places[span.start] or 0) >= begins]
        return (own[0], last) if own and own == list(range(own[0], last)) else None
    return None


def _copy_until(record: TrajectoryRecord, end: int) -> TrajectoryRecord:
    copy, _ = record.split(len(record.token_ids))
    copy.cut(end)
    return copy


def _part(conversation: RequestedConversation, first: int, last: int) -> RequestedConversation:
    """Some turns of a conversation as a new one, all before them its prompt. The part with the first turn keeps
    the trajectory's id."""
    session = conversation.session
    spans, whole = session.record.assistant_turns, session.trajectory
    record = _copy_until(session.record, spans[last - 1].end)
    if first:
        record = record.split(spans[first].start)[1]
    ends_in = whole.round_of(spans[last - 1].turn)
    place = next((p for p, number in session.message_rounds.items() if number == ends_in), None)
    before = spans[first].turn - 1
    own_rounds = whole.rounds[before : spans[last - 1].turn]
    part = Trajectory(
        whole.trajectory_id if not first else f"{whole.trajectory_id}.turn{first + 1}",
        whole.prompt_id, whole.group_id, whole.episode_id, whole.data_source, whole.row_index,
        source=whole.source, tools=whole.tools, num_turns=last - first, turn_texts=whole.turn_texts[first:last],
        replicas=whole.replicas[first:last],
        messages=whole.messages if place is None else whole.messages[: place + 1],
        rounds=[number - own_rounds[0] for number in own_rounds],
    )  # fmt: skip
    record.turns = [replace(span, turn=max(0, span.turn - before)) for span in record.turns]
    own = replace(session, trajectory=part, ledger=Ledger([record]), engine_session=whole.trajectory_id)
    part.records = own.ledger.records
    if last < len(spans):
        own.cut_reason = None
    return replace(conversation, session=own)


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
        raise LedgerError(f"generate function {path} returned the same Sample object twice. copy.deepcopy it per agent")
    if len(items) > 1 and any(getattr(item, COMPAT.execution) is None for item in items):
        _say_that_each_counts(path)
    for position, item in enumerate(items):
        try:
            item.check_types()
        except LedgerError as error:
            raise LedgerError(f"generate function {path}{_which(position, items)}: {error}") from None
    return items


@functools.cache
def _say_that_each_counts(path: str) -> None:
    log.warning(
        "generate function %s returns several Samples without %s: each weighs in the loss by itself. Give those of one "
        "execution the same number (sample.index), and they weigh as one",
        path, COMPAT.execution,
    )  # fmt: skip


def _which(position: int, samples: Sequence[Sample]) -> str:
    return f", Sample {position} of {len(samples)}" if len(samples) > 1 else ""


def _lost(sample: Sample, trajectory: Trajectory) -> Trajectory:
    """Dropped by the function: sampled tokens stay for people to look at, nothing is scored or trained."""
    trajectory.stop_reason = StopReason.ABORTED if sample.status is Status.ABORTED else StopReason.ERROR
    trajectory.error = trajectory.error or f"the generate function set sample.status = {sample.status.value}"
    log.warning("%s: the generate function gave it up (%s)", trajectory.trajectory_id, sample.status.value)
    if any(record.sampled for record in trajectory.records):
        fill_from_record(sample, trajectory.records[-1])
    sample.turn_texts = list(trajectory.turn_texts)
    place(sample, trajectory)
    return trajectory


def place(sample: Sample, trajectory: Trajectory) -> None:
    """Its ids: agents of one episode share prompt and episode; those of one role are compared with each other; those of
    one execution weigh as one."""
    role = sample.metadata.get("role")
    if role is not None:
        trajectory.group_id = f"{trajectory.prompt_id}/{role}"
    if sample.status is not Status.FAILED:  # a reward function may look at that; the trajectory is trained all the same
        sample.status = trajectory.status
    sample.session_id = trajectory.trajectory_id
    execution = getattr(sample, COMPAT.execution)
    if execution is None:
        setattr(sample, COMPAT.execution, sample.index)
    else:  # numbers of samples begin anew with each rollout of a step
        trajectory.execution_id = f"{trajectory.prompt_id.rpartition('.')[0]}/{execution}"
    trajectory.sample = sample


def _stop_reason(status: Status, known: StopReason | None) -> StopReason:
    """The function decides whether it is done; a limit that was hit says why it was cut."""
    cut = known if known is not None and known.status is Status.TRUNCATED else None
    if status is Status.TRUNCATED:
        return cut or StopReason.TRUNCATED
    return cut or StopReason.SCHEDULER if status is Status.PENDING else StopReason.SCHEDULER


def _mismatch(sample: Sample, unmatched: list[RequestedConversation], num_asked: int, where: str) -> LedgerError:
    """What is wrong with a Sample that no conversation fits."""
    if not num_asked:
        return LedgerError(
            f"{where}: it has {len(sample.tokens)} tokens, but the function never asked the engine (post to "
            "http://{args.sglang_router_ip}:{args.sglang_router_port}/generate)"
        )
    sample.check_lengths()
    if not unmatched:
        return LedgerError(
            f"{where}: the function returned more Samples than it had conversations with the engine "
            f"({num_asked}); every Sample is one of them, and each is returned once"
        )
    problems = []
    for conversation in unmatched:
        try:
            conversation.align(sample)
        except LedgerError as error:
            problems.append((conversation.number, str(error)))
    shown = "; ".join(f"conversation {number}: {text}" if len(problems) > 1 else text for number, text in problems[:3])
    return LedgerError(f"{where}: its tokens are not the engine's. {shown}")


def _adopt(sample: Sample, session: EditableSession, found: Alignment, args: Any) -> None:
    """Verify a Sample against the record that its tokens were found in, clear what it masked, fill it from the record,
    and end the trajectory with the Sample's reward and status.

    Counted on the trajectory: `cut_tokens` (sampled, and left out by the function), `masked_tokens` (sampled, and taken
    out of the loss), `masked_observation_tokens` (not sampled, and wanted in it), `unread_tokens` (behind the last
    turn).

    Raises:
        LedgerError: lengths that do not fit, log-probs that are not the engine's, a reward that is no score; names
            position and numbers.
    """
    trajectory, record = session.trajectory, session.record
    check_unsupported(sample)
    sample.check_lengths()
    first = len(sample.tokens) - sample.response_length
    _check_response(sample, record, found, first)
    trained = sum(record.loss_mask)
    cut = sum(record.sampled[len(found.places) :])
    counts = {
        "cut_tokens": cut,
        "masked_observation_tokens": _mask(sample, record, found, first),
        "unread_tokens": len(sample.tokens) - found.used,
    }
    if sample.remove_sample:
        record.clear_mask(list(range(len(record.token_ids))))
    counts["masked_tokens"] = trained - sum(record.loss_mask) - cut
    for name, count in counts.items():
        session.count(name, count)
    if counts["masked_observation_tokens"]:
        log.warning(
            "%s: loss_mask is 1 on %d tokens that the engine did not sample; they are not trained",
            trajectory.trajectory_id,
            counts["masked_observation_tokens"],
        )
    fill_from_record(sample, record)
    sample.turn_texts = list(trajectory.turn_texts)
    if sample.reward is not None:
        try:
            trajectory.reward_parts = as_scores(by_reward_key(sample.reward, args), "of the generate function")
        except InvalidScore as error:
            raise LedgerError(f"sample.reward: {error}") from None
        trajectory.reward = trajectory.reward_parts["score"]
    trajectory.stop_reason = _stop_reason(sample.status, trajectory.stop_reason or session.cut_reason)
    if sample.status is Status.FAILED:
        session.count("failed_samples_trained", 1)
    place(sample, trajectory)


def _check_response(sample: Sample, record: TrajectoryRecord, found: Alignment, first: int) -> None:
    """Sampled tokens are in the response, and their log-probs are the engine's."""
    for position, place in enumerate(found.places):
        if not record.sampled[position]:
            continue
        assert place is not None
        if place < first:
            raise LedgerError(
                f"response_length is {sample.response_length}, so the response begins at token {first} of "
                f"{len(sample.tokens)}, but the engine sampled token {place} already"
            )
        if sample.rollout_log_probs is None or (sample.loss_mask is not None and not sample.loss_mask[place - first]):
            continue  # a token that the function does not train may have a filler
        said, known = sample.rollout_log_probs[place - first], record.rollout_log_probs[position]
        if not abs(said - known) <= _TOLERANCE * max(1.0, abs(known)):
            raise LedgerError(
                f"rollout_log_probs[{place - first}] is {said}, but the engine gave {known} for that token. Take both "
                "from the same item of meta_info.output_token_logprobs"
            )


def _mask(sample: Sample, record: TrajectoryRecord, found: Alignment, first: int) -> int:
    """Clear what the function cleared or left out; how many tokens it wanted trained that were not sampled.

    Raises:
        LedgerError: it wants tokens trained that come behind everything the engine sampled.
    """
    clear = list(range(len(found.places), len(record.token_ids)))
    wanted = 0
    if sample.loss_mask is not None:
        behind = sum(sample.loss_mask[max(found.used - first, 0) :])
        if behind:
            raise LedgerError(
                f"loss_mask is 1 on {behind} of the {len(sample.tokens) - found.used} tokens behind the engine's last. "
                "The engine did not sample them"
            )
        sampled = {p: k for k, p in enumerate(found.places) if p is not None and record.sampled[k]}
        clear += [k for p, k in sampled.items() if not sample.loss_mask[p - first]]
        wanted = sum(sample.loss_mask) - sum(sample.loss_mask[p - first] for p in sampled)
    record.clear_mask(clear)
    return wanted
