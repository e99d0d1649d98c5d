"""Finished conversations without an engine: replayed as a rollout would have recorded them, and as training records."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from verl_mt.chat.prompt_messages import require_traces
from verl_mt.chat.template import ChatTemplate
from verl_mt.chat.text_delta import turn_ids
from verl_mt.data.conversation import Message
from verl_mt.data.ledger import Ledger, TrajectoryRecord
from verl_mt.errors import DataError

WEIGHT = "weight"
"""Of an assistant message: 0 keeps it out of the loss. No template sees it."""
_CACHE: weakref.WeakKeyDictionary[Any, dict[str, ChatTemplate]] = weakref.WeakKeyDictionary()


def replay(
    tokenizer: Any,
    prompt: Sequence[Message],
    tools: Sequence[Any] | None,
    steps: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of a conversation whose sampled turns are ids already.

    The mask is 1 exactly on sampled ids. The generation prompt stands only before a sample, or at the end if there
    are no steps; adjacent env steps merge; a sample that lacks its end token and is followed by env gets one
    inserted with mask 0 and a warning (a real rollout ends there instead).

    Args:
        tokenizer: a Hugging Face tokenizer, or a `ChatTemplate`.
        prompt: the first messages.
        tools: tool schemas shown in the prompt, or None.
        steps: `{"type": "sample", "ids": [...], "message": {...}}` (the message as parsed; only its tool calls
            matter) or `{"type": "env", "messages": [...]}`.
        template_kwargs: variables of the template.

    Returns:
        `(token_ids, loss_mask)` of equal length, the prompt first.

    Raises:
        TemplateError: the template cannot render the conversation.
        DataError: a step of another shape; names its index.
    """
    return _template(tokenizer, template_kwargs).replayed(prompt, tools, steps)


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
        raise DataError("the conversation begins with an assistant message. It needs one before it")
    plain: list[Message] = [{k: v for k, v in m.items() if k != WEIGHT} for m in messages[: turns[-1] + 1]]
    schemas = list(tools) if tools else None
    require_traces(chat, plain[: turns[-1]], schemas)
    steps: list[Mapping[str, Any]] = []
    for i in range(turns[0], len(plain)):
        if plain[i].get("role") == "assistant":
            ids = turn_ids(chat, plain[:i], plain[i], tools=schemas, raw=False)
            steps.append({"type": "sample", "ids": ids, "message": plain[i]})
        else:
            steps.append({"type": "env", "messages": [plain[i]]})
    token_ids, mask = chat.replayed(plain[: turns[0]], schemas, steps)
    lengths = [len(step["ids"]) for step in steps if step["type"] == "sample"]
    return _record(token_ids, mask, lengths, [_weight(messages[i], i) for i in turns])


def _record(token_ids: list[int], mask: list[int], lengths: list[int], weights: list[int]) -> TrajectoryRecord:
    """Cut the stream into its turns again: where a turn begins, the mask rises or the turn before it ends."""
    ledger, at = Ledger(), 0
    for turn, (length, weight) in enumerate(zip(lengths, weights), 1):
        begin = mask.index(1, at)
        if begin > at or turn == 1:
            ledger.append_observation(token_ids[at:begin], turn=turn - 1)
        at = begin + length
        ledger.sampled(token_ids[begin:at], None, [-1] * length, turn=turn)
        if not weight:
            ledger.record.clear_mask(list(range(begin, at)))
    return ledger.record


def _weight(message: Message, index: int) -> int:
    value = message.get(WEIGHT)
    if value not in (None, 0, 1):
        raise DataError(f"messages[{index}].weight is {value!r}, must be 0 or 1")
    return 1 if value is None else int(value)


def _template(tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> ChatTemplate:
    """The tokenizer's ChatTemplate; probes are kept between calls."""
    if isinstance(tokenizer, ChatTemplate):
        if not template_kwargs or dict(template_kwargs) == tokenizer.template_kwargs:
            return tokenizer
        return tokenizer.with_kwargs(template_kwargs)
    key = json.dumps([template_kwargs or {}, getattr(tokenizer, "chat_template", None)], sort_keys=True, default=repr)
    try:
        cache = _CACHE.setdefault(tokenizer, {})
    except TypeError:  # an unhashable tokenizer is only not cached
        cache = {}
    if key not in cache:
        cache[key] = ChatTemplate(tokenizer, template_kwargs=template_kwargs)
    return cache[key]
