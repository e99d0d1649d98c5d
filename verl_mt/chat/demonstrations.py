"""A finished conversation as a training record: what the assistant says is in the loss, everything else is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_mt.chat.message_traces import require_traces
from verl_mt.chat.replaying import replay
from verl_mt.chat.template import ChatTemplate
from verl_mt.chat.text_delta import turn_ids
from verl_mt.data.conversation import Message
from verl_mt.data.trajectory import TrajectoryRecord
from verl_mt.errors import DataError

WEIGHT = "weight"
"""Of an assistant message: 0 keeps it out of the loss. No template sees it."""


def demonstration(
    chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
) -> TrajectoryRecord:
    """Ids and mask of a conversation as a rollout would have recorded it.

    Each assistant turn, its end of turn included, is encoded behind the prompt that a model would have had there; what
    stands between turns is the same delta as in a rollout. Messages after the last assistant turn are left out.

    Args:
        chat: the model's template.
        messages: with at least one `assistant` message behind another one. `weight: 0` on an assistant message keeps
            it in the context and out of the loss.
        tools: the schemas that the prompt shows.

    Returns:
        A record without log-probs; `sampled` where an assistant speaks, `loss_mask` where it also counts.

    Raises:
        DataError: no assistant turn, one without anything before it, or a weight that is neither 0 nor 1.
        TemplateError: the template cannot render the conversation, or writes one of its messages nowhere.
    """
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant message, so there is nothing to learn from")
    if turns[0] == 0:
        raise DataError("the conversation begins with an assistant message; it needs one before it")
    plain: list[Message] = [_without_weight(message) for message in messages[: turns[-1] + 1]]
    schemas = list(tools) if tools else None
    require_traces(chat, plain[: turns[-1]], schemas)
    steps: list[Mapping[str, Any]] = []
    for i in range(turns[0], len(plain)):
        if plain[i].get("role") == "assistant":
            ids = turn_ids(chat, plain[:i], plain[i], tools=schemas, raw=False)
            steps.append({"type": "sample", "ids": ids, "message": plain[i]})
        else:
            steps.append({"type": "env", "messages": [plain[i]]})
    token_ids, mask = replay(chat, plain[: turns[0]], schemas, steps)
    lengths = [len(step["ids"]) for step in steps if step["type"] == "sample"]
    return _record(token_ids, mask, lengths, [_weight(messages[i], i) for i in turns])


def _record(token_ids: list[int], mask: list[int], lengths: list[int], weights: list[int]) -> TrajectoryRecord:
    """Cut the stream into its turns again: where a turn begins, the mask rises or the turn before it ends."""
    record, at = TrajectoryRecord(), 0
    for turn, (length, weight) in enumerate(zip(lengths, weights), 1):
        begin = mask.index(1, at)
        if begin > at or turn == 1:
            record.append_given(token_ids[at:begin], kind="prompt" if turn == 1 else "observation", turn=turn - 1)
        record.append_sampled(token_ids[begin : begin + length], None, [-1] * length, turn=turn)
        at = begin + length
        if not weight:
            record.clear_mask(list(range(begin, at)))
    return record


def _without_weight(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != WEIGHT}


def _weight(message: Message, index: int) -> int:
    value = message.get(WEIGHT)
    if value not in (None, 0, 1):
        raise DataError(f"messages[{index}].weight is {value!r}, must be 0 or 1")
    return 1 if value is None else int(value)
