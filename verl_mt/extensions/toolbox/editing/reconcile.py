"""What somebody else believes of a conversation, mapped to what is recorded of it.

The record is the truth: what was sampled is never encoded again, whatever a caller believes about tokens. Each driver
brings a belief of another kind:

- a scheduler: messages, and perhaps ids of its last turn (`take_messages`, `clear_bits`, `match_ids`);
- an agent: messages (`take_request`);
- a generate function: text or ids that it asks with (`spelled`).

Compared with the conversation as it was recorded, messages may

- add others behind it: a new turn;
- leave the last answer open, or add text to it: the model goes on inside it;
- cut the last answer back and put other text behind what stays: the tokens kept are a prefix of the recorded ones, the
  rest is cut and counted;
- differ anywhere else: history was rewritten, and a new record begins with the new messages as its prompt.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from verl_mt.chat.differences import common_prefix
from verl_mt.data.conversation import Message
from verl_mt.errors import LedgerError
from verl_mt.extensions.toolbox.editing.session import EditableSession
from verl_mt.rollout.token_text import Decode, num_tokens_spelling

logger = logging.getLogger(__name__)

_said: set[str] = set()
_NOT_SHOWN = ("loss",)
"""Keys of a message that no template reads."""


def take_messages(
    session: EditableSession,
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
    wanted = copy.deepcopy(list(messages))
    if wanted and wanted[-1]["role"] == "assistant" and not wanted[-1].get("content"):
        wanted.pop()
    old = session.messages
    last = len(old) - 1
    spoke = old[last]["role"] == "assistant"
    agreeing = _num_agreeing(wanted, old, _as_rendered)
    extra = wanted[last + 1 :]
    # Before the first answer there is no turn to put messages behind: they make another prompt.
    continues = _same_tools(tools, session) and agreeing >= last < len(wanted) and (spoke or not extra)
    if continues and agreeing == last:
        continues = spoke and _edit(session, wanted[last], ids, goes_on=not extra)
    elif continues and spoke and (ids is not None or not extra):
        _reopen(session, ids, goes_on=not extra)
    if not continues:
        _rewrite(session, wanted, tools, ids)
        return
    begun = extra[-1] if extra and extra[-1]["role"] == "assistant" else None
    if extra:
        session.extend(extra[:-1] if begun else extra)
    if begun:
        session.prefill(str(begun["content"]))
    keep_loss_flags(session, wanted)


def take_request(
    session: EditableSession,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    *,
    shown: Mapping[int, Message],
    likeness: Callable[[Message], object],
) -> bool:
    """Queue what an agent's request adds to the conversation, or begin a new record with what it says. Call before
    `session.generate`.

    A request goes on only behind a whole answer. One that repeats the history, or brings an answer that the model did
    not give, asks for another one: what was sampled stays in its own record, trained once, and the next answer has a
    record in the context in which it is sampled.

    Args:
        shown: place of an assistant message -> what the agent was shown instead.
        likeness: what must agree for two messages to be the same.

    Returns:
        Whether the conversation goes on in the same record.
    """
    known = [shown.get(place, message) for place, message in enumerate(session.messages)]
    new = messages[len(known) :]
    same = _same_tools(tools, session) and _num_agreeing(messages, known, likeness) == len(known)
    asked_again = not new and any(session.record.sampled)
    if not same or asked_again or any(m["role"] == "assistant" for m in new):
        session.rewrite(messages, tools)
        return False
    if new:
        session.extend(new)
    return True


def keep_loss_flags(session: EditableSession, messages: Sequence[Message]) -> None:
    """`loss: False` of a message takes what the model wrote there out of the loss."""
    for place, message in enumerate(messages[: len(session.messages)]):
        if message.get("loss") is None:
            continue
        session.messages[place] = {**session.messages[place], "loss": bool(message["loss"])}
        if not message["loss"] and place in session.message_rounds:
            wanted = session.message_rounds[place]
            spans = [s for s in session.record.assistant_turns if session.trajectory.round_of(s.turn) == wanted]
            cleared = session.record.clear_mask([p for s in spans for p in range(s.start, s.end)])
            session.count("masked_tokens", cleared)


def clear_bits(session: EditableSession, start: int, ids: Sequence[int], mask: Sequence[int]) -> None:
    """Take tokens of the last turn, which begins at `start`, out of the loss.

    Raises:
        LedgerError: not as many bits as ids, or a bit set on an id that the engine did not sample there.
    """
    where = session.trajectory.trajectory_id
    if len(mask) != len(ids):
        raise LedgerError(
            f"{where}: response_loss_mask has {len(mask)} entries for {len(ids)} response_token_ids. "
            "Both must have the same length"
        )
    record = session.record
    shared = common_prefix(ids, record.token_ids[start:])
    foreign = [j for j in range(shared, len(ids)) if mask[j]]
    if foreign:
        raise LedgerError(
            f"{where}: response_loss_mask sets {len(foreign)} bits (the first at {foreign[0]}) on response_token_ids "
            f"that the engine did not sample (all behind the first {shared}). They have no log-prob, set them to 0"
        )
    cleared = record.clear_mask([start + j for j in range(shared) if not mask[j]])
    session.count("masked_tokens", cleared)


def _num_agreeing(one: Sequence[Message], other: Sequence[Message], view: Callable[[Message], object]) -> int:
    """How many leading messages are the same, looked at through `view`."""
    return common_prefix([view(message) for message in one], [view(message) for message in other])


def _as_rendered(message: Message) -> Message:
    return {key: value for key, value in message.items() if value is not None and key not in _NOT_SHOWN}


def _same_tools(tools: Sequence[dict[str, Any]] | None, session: EditableSession) -> bool:
    return list(tools or ()) == session.trajectory.tools or _as_json(tools) == _as_json(session.trajectory.tools)


def _as_json(tools: Sequence[dict[str, Any]] | None) -> str:
    return json.dumps(list(tools or ()), sort_keys=True, default=str)


def _rewrite(
    session: EditableSession,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    ids: Sequence[int] | None,
) -> None:
    if ids is not None:
        recorded = session.record.token_ids[_last_turn(session) :]
        if list(ids) != recorded:
            raise LedgerError(
                f"{session.trajectory.trajectory_id}: step() rewrote the history and returned {len(ids)} "
                f"response_token_ids that are not the {len(recorded)} sampled ones. The turn stays as it was sampled: "
                "return its own token_ids, or none"
            )
    session.rewrite(messages, tools or [])


def _edit(session: EditableSession, message: Message, ids: Sequence[int] | None, *, goes_on: bool) -> bool:
    """The last assistant message has another text: cut it back, put the rest behind. False where that is another
    history: another first token, another role, or a turn that ended before it was changed."""
    # An answer that messages follow is finished: all of it must stay, or the model would go on from an answer that it
    # never gave. One that the model goes on in may be cut anywhere: what is left of it was sampled in this very place.
    content, old = message.get("content"), session.messages[-1]["content"]
    if message["role"] != "assistant" or not isinstance(content, str) or not isinstance(old, str):
        return False
    if not goes_on and not content.startswith(old):
        return False
    prefix, record, chat = session.message_prefix, session.record, session.context.chat
    start = session.message_start
    if ids is not None:
        turn = _last_turn(session)
        shared = common_prefix(ids, record.token_ids[turn:])
        # The end of turn that was sampled counts as shared, and is cut all the same: the message does not end there.
        keep, behind = min(turn + shared, _end_of_text(session)), list(ids[shared:])
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


def _say_once(session: EditableSession, spelled: str, content: str) -> None:
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


def _reopen(session: EditableSession, ids: Sequence[int] | None, *, goes_on: bool) -> None:
    """The last message reads as before: keep what `ids` and the last turn share, put the rest of `ids` behind it.

    Where the message goes on, the end of turn that was sampled is no end: it is cut, like everything that is not kept.
    """
    content = str(session.messages[-1]["content"] or "")
    record, start, end = session.record, _last_turn(session), _end_of_text(session)
    if ids is None:
        session.reopen(content, keep=end, ids=[])
        return
    shared = common_prefix(ids, record.token_ids[start:])
    keep, behind = start + shared, list(ids[shared:])
    if not goes_on and not behind and keep == len(record.token_ids):
        return
    session.reopen(content, keep=min(keep, end) if goes_on or behind else keep, ids=behind)


def match_ids(ids: Sequence[int], recorded: Sequence[int], ends: Collection[int]) -> dict[int, int]:
    """Place in `ids` -> place in `recorded`, where a scheduler put the ids of its turns together.

    An end of turn inside a message that went on is in `ids` only: it was sampled, and cut when the message went on.

    Raises:
        LedgerError: anything else differs; says how many and where.
    """
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


def spelled(decode: Decode, ids: Sequence[int], text: str) -> tuple[int, str]:
    """How many leading ids spell a beginning of the text, and what is left of it behind them."""
    count = num_tokens_spelling(decode, ids, text)
    return count, text[len(decode(ids[:count])) :]


def _last_turn(session: EditableSession) -> int:
    spans = session.record.assistant_turns
    return spans[-1].start if spans else len(session.record.token_ids)


def _end_of_text(session: EditableSession) -> int:
    """The record's end, without the end of turn that was sampled."""
    record = session.record
    ended = record.sampled[-1:] == [1] and record.token_ids[-1] in session.context.chat.end_token_ids
    return len(record.token_ids) - int(ended)
