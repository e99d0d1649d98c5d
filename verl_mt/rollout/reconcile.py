"""From the messages that a scheduler wants the model to read next to the ledger: go on, extend, cut back or begin anew.

What was sampled is never encoded again. Compared with the conversation as it was recorded, a scheduler's messages may

- add messages behind it: a new turn;
- leave it as it is, or add text to the last assistant message: the model goes on inside that message;
- cut the last assistant message back and put other text behind what stays: the tokens kept are a prefix of the
  recorded ones, the rest is cut and counted;
- differ anywhere else: history was rewritten, and a new record begins with the new messages as its prompt.

A scheduler may also hand in the ids of the last turn (`response_token_ids`), which then decide where it was cut and
what was put behind it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from verl_mt.chat.token_diff import common_prefix
from verl_mt.data.conversation import Message
from verl_mt.data.trajectory import TrajectoryRecord, TurnSpan
from verl_mt.errors import LedgerError
from verl_mt.rollout.session import RolloutSession
from verl_mt.rollout.token_text import Decode, num_tokens_spelling

logger = logging.getLogger(__name__)

_said: set[str] = set()
_NOT_SHOWN = ("loss",)
"""Keys of a message that no template reads."""


def take_over(
    session: RolloutSession,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    ids: Sequence[int] | None = None,
) -> None:
    """Queue what the next turn is to read. Call before `session.generate`.

    Args:
        messages: the whole conversation; a last assistant message is unfinished, the model goes on inside it. An empty
            one (ms-swift's placeholder for the answer to come) counts as absent.
        tools: the schemas that the prompt shows.
        ids: of the last turn, as the scheduler wants them recorded.

    Raises:
        LedgerError: `ids` for a turn of a history that was rewritten.
    """
    wanted = copy.deepcopy(_without_placeholder(list(messages)))
    old = session.messages
    last = len(old) - 1
    same_tools = list(tools or []) == session.trajectory.tools
    spoke = old[last]["role"] == "assistant"
    if (
        not same_tools
        or (not spoke and len(wanted) > len(old))
        or not _same(wanted[:last], old[:last])
        or len(wanted) <= last
    ):
        _rewrite(session, wanted, tools, ids)
        return
    extra = wanted[last + 1 :]
    if _same(wanted[last : last + 1], old[last:]):
        if spoke and (ids is not None or not extra):
            _reopen(session, str(old[last]["content"] or ""), ids, goes_on=not extra)
    elif not spoke or not _edit(session, wanted[last], ids, goes_on=not extra):
        _rewrite(session, wanted, tools, ids)
        return
    _add(session, extra)
    keep_loss_flags(session, wanted)


def keep_loss_flags(session: RolloutSession, messages: Sequence[Message]) -> None:
    """`loss: False` of a message takes what the model wrote there out of the loss."""
    for place, message in enumerate(messages[: len(session.messages)]):
        if message.get("loss") is None:
            continue
        session.messages[place] = {**session.messages[place], "loss": bool(message["loss"])}
        if not message["loss"] and place in session.message_rounds:
            wanted = session.message_rounds[place]
            spans = [s for s in session.record.turns if s.kind == "assistant" and session.rounds[s.turn - 1] == wanted]
            cleared = session.record.clear_mask([p for s in spans for p in range(s.start, s.end)])
            session.count("masked_tokens", cleared)


def clear_bits(session: RolloutSession, start: int, ids: Sequence[int], mask: Sequence[int]) -> None:
    """Take tokens of the last turn, which begins at `start`, out of the loss.

    Raises:
        LedgerError: not as many bits as ids, or a bit set on an id that the engine did not sample there.
    """
    where = session.trajectory.trajectory_id
    if len(mask) != len(ids):
        raise LedgerError(
            f"{where}: response_loss_mask has {len(mask)} entries for {len(ids)} response_token_ids; "
            "both must have the same length"
        )
    record = session.record
    shared = common_prefix(list(ids), record.token_ids[start:])
    foreign = [j for j in range(shared, len(ids)) if mask[j]]
    if foreign:
        raise LedgerError(
            f"{where}: response_loss_mask sets {len(foreign)} bits (the first at {foreign[0]}) on response_token_ids "
            f"that the engine did not sample (all behind the first {shared}); they have no log-prob, set them to 0"
        )
    cleared = record.clear_mask([start + j for j in range(shared) if not mask[j]])
    session.count("masked_tokens", cleared)


def _without_placeholder(messages: list[Message]) -> list[Message]:
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
        return messages[:-1]
    return messages


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    def shown(message: Message) -> Message:
        return {k: v for k, v in message.items() if v is not None and k not in _NOT_SHOWN}

    return [shown(m) for m in one] == [shown(m) for m in other]


def _rewrite(
    session: RolloutSession,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    ids: Sequence[int] | None,
) -> None:
    if ids is not None:
        recorded = session.record.token_ids[_last_turn(session) :]
        if list(ids) != recorded:
            raise LedgerError(
                f"{session.trajectory.trajectory_id}: step() rewrote the history and returned {len(ids)} "
                f"response_token_ids that are not the {len(recorded)} sampled ones; the turn stays as it was sampled: "
                "return its own token_ids, or none"
            )
    session.rewrite(messages, tools or [])


def _add(session: RolloutSession, extra: Sequence[Message]) -> None:
    if not extra:
        return
    begun = extra[-1] if extra[-1]["role"] == "assistant" else None
    session.extend(extra[:-1] if begun else extra)
    if begun:
        session.prefill(str(begun["content"]))


def _edit(session: RolloutSession, message: Message, ids: Sequence[int] | None, *, goes_on: bool) -> bool:
    """The last assistant message has another text: cut, append. False if it is no continuation but a rewriting."""
    content, old = message.get("content"), session.messages[-1]["content"]
    if message["role"] != "assistant" or not isinstance(content, str) or not isinstance(old, str):
        return False
    if not goes_on and not content.startswith(old):
        return False
    prefix, record, chat = session.message_prefix, session.record, session.context.chat
    start = session.message_start
    if ids is not None:
        keep = _last_turn(session) + common_prefix(list(ids), record.token_ids[_last_turn(session) :])
        behind = list(ids[keep - _last_turn(session) :])
        keep = min(keep, _end_of_text(session))
        shown = prefix + chat.decode(record.token_ids[start:keep])
        if not behind and content.startswith(shown):
            behind = chat.continuation_ids(content[len(shown) :]) if content != shown else []
        elif shown + chat.decode(behind) != content:
            _say_once(session, shown + chat.decode(behind), content)
        session.reopen(content, keep=keep, ids=behind)
        return True
    if not content.startswith(prefix):
        return False
    kept, rest = spelled(chat.decode, record.token_ids[start : _end_of_text(session)], content[len(prefix) :])
    if kept == 0:
        return False
    session.reopen(content, keep=start + kept, ids=chat.continuation_ids(rest))
    return True


def _say_once(session: RolloutSession, spelled: str, content: str) -> None:
    """Ids and text of a message differ: the model reads the ids."""
    session.count("differing_response_ids", 1)
    if "differs" not in _said:
        _said.add("differs")
        at = common_prefix(spelled, content)
        logger.warning(
            "%s: response_token_ids spell another text than the message has (%r where it says %r): the model reads the "
            "ids. Said once; rollout/differing_response_ids counts them",
            session.trajectory.trajectory_id,
            spelled[at : at + 60],
            content[at : at + 60],
        )


def _reopen(session: RolloutSession, content: str, ids: Sequence[int] | None, *, goes_on: bool) -> None:
    """Keep what `ids` and the last turn share, put the rest of `ids` behind it.

    Where the message goes on, the end of turn that was sampled is no end: it is cut, like everything that is not kept.
    """
    record, start, end = session.record, _last_turn(session), _end_of_text(session)
    if ids is None:
        session.reopen(content, keep=end, ids=[])
        return
    shared = common_prefix(list(ids), record.token_ids[start:])
    keep, behind = start + shared, list(ids[shared:])
    if not goes_on and not behind and keep == len(record.token_ids):
        return
    session.reopen(content, keep=min(keep, end) if goes_on or behind else keep, ids=behind)


def spelled(decode: Decode, ids: Sequence[int], text: str) -> tuple[int, str]:
    """How many leading ids spell a beginning of the text, and what is left of it behind them."""
    count = num_tokens_spelling(decode, ids, text)
    return count, text[len(decode(ids[:count])) :]


def _last_turn(session: RolloutSession) -> int:
    spans = [span for span in session.record.turns if span.kind == "assistant"]
    return spans[-1].start if spans else len(session.record.token_ids)


def _end_of_text(session: RolloutSession) -> int:
    """The record's end, without the end of turn that was sampled."""
    record = session.record
    ended = record.sampled[-1:] == [1] and record.token_ids[-1] in session.context.chat.end_token_ids
    return len(record.token_ids) - int(ended)


@dataclass(frozen=True)
class Alignment:
    """Where the tokens of a record are in a Sample."""

    places: list[int | None]
    """Per token of the record: its index in the tokens; None in text that they spell in other ids. Shorter than
    the record where they end inside the last turn."""
    used: int
    """How many of the tokens they are; the rest follows the last turn."""


def align(
    tokens: Sequence[int], record: TrajectoryRecord, decode: Decode, *, wanted: Sequence[int] | None = None
) -> Alignment:
    """Find a record in the tokens of a Sample. Of the last sampled turn they may hold a beginning only.

    Args:
        wanted: for each of the last `len(wanted)` tokens, whether it is to be trained; None = nobody says.

    Raises:
        LedgerError: names the first token that is another one.
    """
    bits = None if wanted is None or len(wanted) > len(tokens) else [0] * (len(tokens) - len(wanted)) + list(wanted)
    places: list[int | None] = []
    at, last = 0, max((k for k, span in enumerate(record.turns) if span.kind == "assistant"), default=-1)
    for number, span in enumerate(record.turns):
        ids = record.token_ids[span.start : span.end]
        here = list(tokens[at : at + len(ids)])
        if here == ids:
            places += range(at, at + len(ids))
            at += len(ids)
            continue
        if span.kind == "assistant":
            kept = next((k for k, i in enumerate(here) if i != ids[k]), len(here))
            # What follows in the Sample is the function's own where it says so; else it passes for the model's.
            more = any(bits[at + kept :]) if bits is not None else at + kept < len(tokens)
            if number == last and not more and (kept or any(record.sampled[: span.start])):
                return Alignment([*places, *range(at, at + kept)], at + kept)
            raise _differs(tokens, at, span, ids, decode)
        # A tokenizer writes one placeholder for an image of which the engine reads many.
        spelling = _squeezed(decode) if span.kind == "prompt" and record.media else decode
        width = _width_of_text(tokens, at, ids, _next_sampled(record, number), spelling)
        if width is None:
            raise _differs(tokens, at, span, ids, decode)
        places += [None] * len(ids)
        at += width
    return Alignment(places, at)


def _next_sampled(record: TrajectoryRecord, number: int) -> list[int]:
    """Ids of the sampled turn that follows span `number`."""
    for span in record.turns[number + 1 :]:
        if span.kind == "assistant" and span.end > span.start:
            return record.token_ids[span.start : span.end]
    return []


def _width_of_text(
    tokens: Sequence[int], at: int, ids: Sequence[int], following: Sequence[int], decode: Decode
) -> int | None:
    """How many of the tokens from `at` spell the same text as `ids`, before the sampled turn that follows."""
    text = _without_space(decode(ids))
    if not following:
        return len(tokens) - at if _without_space(decode(tokens[at:])) == text else None
    head = list(following[: len(tokens) - at])
    for end in range(at, len(tokens)):
        if tokens[end] != following[0] or list(tokens[end : end + len(following)]) != head[: len(tokens) - end]:
            continue
        if _without_space(decode(tokens[at:end])) == text:
            return end - at
    return None


def _squeezed(decode: Decode) -> Decode:
    """`decode` of ids of which runs of one and the same count once."""

    def spell(ids: Sequence[int]) -> str:
        return decode([token for token, _ in groupby(ids)])

    return spell


def _without_space(text: str) -> str:
    """Some tokenizers swallow white space at their control tokens, or put one before every text (Phi-3)."""
    return "".join(text.split())


def _differs(tokens: Sequence[int], at: int, span: TurnSpan, ids: Sequence[int], decode: Decode) -> LedgerError:
    offset = next((k for k, i in enumerate(ids) if at + k >= len(tokens) or tokens[at + k] != i), 0)
    got = tokens[at + offset] if at + offset < len(tokens) else None
    shown = "nothing" if got is None else f"{got} ({decode([got])!r})"
    if span.kind == "assistant":
        what = (
            f"the engine sampled {ids[offset]} ({decode([ids[offset]])!r}) in turn {span.turn}; sampled tokens must be "
            "the engine's: take them from meta_info.output_token_logprobs (return_logprob=True), never from a tokenizer"
        )
    else:
        what = f"the engine read {ids[offset]} ({decode([ids[offset]])!r}), and the text there is not the same either"
    return LedgerError(f"sample.tokens[{at + offset}] is {shown}, but {what}")
