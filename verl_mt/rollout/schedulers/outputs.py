"""What a scheduler's own `run` returned, brought onto what the session recorded.

Each output is one record of the trajectory. It covers the turns of its response's record, up to that response, that no
earlier output covers. What none covers (candidates that `run` threw away) is taken out of the loss and counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

from verl_mt.data.checks import WrongValue, bits_of, bool_of, ids_of, is_nested, log_probs_of, messages_of
from verl_mt.data.conversation import Message
from verl_mt.data.requests import RolloutOutput
from verl_mt.data.trajectory import TrajectoryRecord, TurnSpan
from verl_mt.errors import LedgerError, value_text
from verl_mt.rollout.schedulers.conversation import Conversation


def take_outputs(conversation: Conversation, returned: Any) -> None:
    """Split records so that each output has one, apply masks and infos.

    Raises:
        UserCodeError: not outputs, or ids and masks that do not fit what was recorded (with both numbers).
    """
    outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
    wrong = [o for o in outputs if not isinstance(o, RolloutOutput)]
    if wrong or not outputs:
        got = value_text(wrong[0], 100) if wrong else "an empty list"
        raise conversation.error("run", f"it must return a RolloutOutput or a list of them, got {got}")
    last = 0
    for output in outputs:
        _check(conversation, output)
        turn = _turn_of(conversation, output)
        if turn <= last:
            raise conversation.error(
                "run", f"its outputs must end in turns of their own, in order; got turn {turn} after turn {last}"
            )
        if not output.whole:
            _take(conversation, output, last, turn)
        last = turn
        conversation.add_infos(output.rollout_infos, "run")
    if not any(output.whole for output in outputs):
        _discard_uncovered(conversation, {_turn_of(conversation, o) for o in outputs})


def _turn_of(conversation: Conversation, output: RolloutOutput) -> int:
    name = getattr(output.response, "id", None)
    known = conversation.choices.get(name) if isinstance(name, str) else None
    if known is None:
        got = value_text(output.response, 100)
        raise conversation.error("run", f"the response of an output must be one that infer_async returned, got {got}")
    return known[0]


def _check(conversation: Conversation, output: RolloutOutput) -> None:
    """The types of an output's fields; ids and masks become plain lists of the shape that they came in."""
    ids, mask = output.response_token_ids, output.response_loss_mask
    try:
        output.whole = bool_of(output.whole, "whole")
        if output.messages is not None:
            output.messages = messages_of(output.messages, "messages")
        if ids is not None:
            output.response_token_ids = _each(ids_of, ids, "response_token_ids")
        if mask is not None:
            output.response_loss_mask = _each(bits_of, mask, "response_loss_mask")
            if ids is not None and is_nested(ids) != is_nested(mask):
                raise WrongValue("response_loss_mask must be flat, or a list per turn, as response_token_ids is")
        num_ids, bits = len(_flat(output.response_token_ids)), _flat(output.response_loss_mask)
        if ids is not None:
            log_probs_of(output.rollout_logprobs, "rollout_logprobs", num_ids, num_ids if mask is None else sum(bits))
        elif output.rollout_logprobs is not None:
            raise WrongValue("rollout_logprobs needs response_token_ids; leave it out, the engine's own are recorded")
    except WrongValue as error:
        raise conversation.error("run", str(error)) from None


def _each(check: Callable[[Any, str], list[int]], value: Any, what: str) -> list[Any]:
    """A flat list, or one list per turn."""
    if not is_nested(value):
        return check(value, what)
    return [check(part, f"{what}[{place}]") for place, part in enumerate(value)]


def _flat(value: list[Any] | None) -> list[int]:
    return [item for part in value or () for item in (part if isinstance(part, list) else (part,))]


def _take(conversation: Conversation, output: RolloutOutput, after: int, turn: int) -> None:
    trajectory = conversation.session.trajectory
    place = next(k for k, r in enumerate(trajectory.records) if _span(r, turn) is not None)
    record = trajectory.records[place]
    own = [s for s in record.turns if s.kind == "assistant" and after < s.turn <= turn]
    if any(s.kind == "assistant" and s.turn <= after for s in record.turns):
        first, record = record.split(own[0].start)
        first.messages = first.messages or _seen(conversation, after)
        trajectory.records[place : place + 1] = [first, record]
        place += 1
    if output.messages is not None and place < len(trajectory.records):
        record.messages = copy.deepcopy(list(output.messages))
    if output.response_token_ids is None:
        if output.response_loss_mask is not None:
            raise conversation.error("run", "response_loss_mask needs response_token_ids of the same length")
        return
    try:
        _mask(conversation, record, own, output)
    except LedgerError as error:
        raise conversation.error("run", str(error)) from error


def _seen(conversation: Conversation, turn: int) -> list[Message]:
    """The messages up to a turn of the last record."""
    session = conversation.session
    places = [p for p, number in session.message_rounds.items() if number == session.rounds[turn - 1]]
    return copy.deepcopy(session.messages[: places[0] + 1]) if places else []


def _mask(conversation: Conversation, record: TrajectoryRecord, own: Sequence[TurnSpan], output: RolloutOutput) -> None:
    """Hold ids against the record, and clear the bits that the output's mask clears."""
    rounds = conversation.session.rounds
    stretches: dict[int, tuple[int, int]] = {}
    for span in own:
        start, _ = stretches.get(rounds[span.turn - 1], (span.start, 0))
        stretches[rounds[span.turn - 1]] = (start, span.end)
    ids, mask = output.response_token_ids or [], output.response_loss_mask
    if is_nested(ids):
        if len(ids) != len(stretches):
            raise LedgerError(f"response_token_ids has {len(ids)} lists for {len(stretches)} assistant messages")
        if mask is not None and [len(m) for m in mask] != [len(i) for i in ids]:
            raise LedgerError(
                f"response_loss_mask has lists of {[len(m) for m in mask]} entries for response_token_ids of "
                f"{[len(i) for i in ids]}"
            )
        ids, mask = _flat(ids), None if mask is None else _flat(mask)
    if mask is not None and len(mask) != len(ids):
        raise LedgerError(f"response_loss_mask has {len(mask)} entries for {len(ids)} response_token_ids")
    positions = [p for start, end in stretches.values() for p in range(start, end)]
    matched = _match(ids, [record.token_ids[p] for p in positions], conversation.session.context.chat.end_token_ids)
    if mask is None:
        return
    conversation.session.mask_given = True
    foreign = [j for j, p in matched.items() if mask[j] and not record.sampled[positions[p]]]
    if foreign:
        raise LedgerError(f"response_loss_mask sets {len(foreign)} bits on ids that the engine did not sample")
    cleared = record.clear_mask([positions[p] for j, p in matched.items() if not mask[j]])
    conversation.session.count("masked_tokens", cleared)


def _match(ids: Sequence[int], recorded: Sequence[int], ends: Collection[int]) -> dict[int, int]:
    """Place in `ids` -> place in `recorded`. An end of turn inside a message that went on is in `ids` only."""
    matched: dict[int, int] = {}
    for j, token in enumerate(ids):
        p = len(matched)
        if p < len(recorded) and recorded[p] == token:
            matched[j] = p
        elif token not in ends:
            break
    if len(matched) != len(recorded) or any(ids[j] not in ends for j in range(len(ids)) if j not in matched):
        raise LedgerError(
            f"response_token_ids has {len(ids)} ids where {len(recorded)} were recorded, and they differ behind the "
            f"first {len(matched)}: return the token_ids of the choices as they are"
        )
    return matched


def _discard_uncovered(conversation: Conversation, ends: Collection[int]) -> None:
    """Turns behind the last output of their record."""
    session = conversation.session
    for record in session.trajectory.records:
        covered = max((s.turn for s in record.turns if s.kind == "assistant" and s.turn in ends), default=0)
        lost = [p for s in record.turns if s.kind == "assistant" and s.turn > covered for p in range(s.start, s.end)]
        session.count("discarded_tokens", record.clear_mask(lost))


def _span(record: TrajectoryRecord, turn: int) -> TurnSpan | None:
    return next((s for s in record.turns if s.kind == "assistant" and s.turn == turn), None)
