"""The last word on a trajectory's mask: the loss scale, and what is trained on request without being sampled."""

from __future__ import annotations

from collections.abc import Sequence

from verl_mt.chat.prompt_messages import assistant_spans
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.conversation import Message
from verl_mt.data.trajectory import Trajectory, TrajectoryRecord
from verl_mt.rollout.loss_scale import ContextType, LossScale, trains_everything, zero_stretches


def train_prompt_assistants(
    chat: ChatTemplate, record: TrajectoryRecord, messages: Sequence[Message], tools: Sequence[dict] | None
) -> int:
    """Set the bits of the assistant messages in a record's prompt (unless they say `loss: False`), ends of turn
    included. Nobody sampled them: the update uses the trainer's own log-probs. Returns how many bits were set.

    Raises:
        TemplateError: the prompt does not show them as the template writes them one after the other.
    """
    prompt = record.token_ids[: record.num_prompt_tokens]
    spans = assistant_spans(chat, messages, tools, prompt)
    return record.set_mask(
        [
            p
            for place, (start, end) in spans.items()
            for p in range(start, end)
            if (loss := messages[place].get("loss")) is None or loss  # also numpy's False, and 0
        ]
    )


def apply_loss_scale(scale: LossScale, chat: ChatTemplate, trajectory: Trajectory, rounds: Sequence[int]) -> None:
    """Clear the bits that the scale weighs 0; with `all`, set every bit first.

    Args:
        rounds: for each assistant turn, the number of its message.

    Raises:
        UserCodeError: the scale's pieces do not fit the text.
    """
    if type(scale) is LossScale and not scale.patterns:
        return
    before = sum(sum(r.loss_mask) for r in trajectory.records)
    for record in trajectory.records:
        if trains_everything(scale):
            trajectory.counters["trained_given_tokens"] = trajectory.counters.get(
                "trained_given_tokens", 0
            ) + record.set_mask(range(1, len(record.token_ids)))
        for number, (start, end) in _messages_of(record, rounds).items():
            last = number == rounds[-1]
            for low, high in _cleared(scale, chat, record.token_ids[start:end], last, trajectory.messages):
                record.clear_mask(list(range(start + low, start + high)))
        if any(record.loss_mask[: record.num_prompt_tokens]) and not trains_everything(scale):
            _scale_prompt(scale, chat, record)
    after = sum(sum(r.loss_mask) for r in trajectory.records)
    if after < before:
        trajectory.counters["masked_tokens"] = trajectory.counters.get("masked_tokens", 0) + before - after


def _messages_of(record: TrajectoryRecord, rounds: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Message number -> its tokens in the record, from its first sampled one to its last."""
    found: dict[int, tuple[int, int]] = {}
    for span in record.turns:
        if span.kind == "assistant":
            start, _ = found.get(rounds[span.turn - 1], (span.start, 0))
            found[rounds[span.turn - 1]] = (start, span.end)
    return found


def _cleared(
    scale: LossScale, chat: ChatTemplate, ids: list[int], last: bool, messages: Sequence[Message]
) -> list[tuple[int, int]]:
    """Ranges of tokens with weight 0, the end of turn asked for by itself."""
    body = len(ids) - int(bool(ids) and ids[-1] in chat.end_token_ids)
    text = chat.decode(ids[:body])
    ranges = [
        (_first_at(chat, ids[:body], low), _first_at(chat, ids[:body], high) if high < len(text) else body)
        for low, high in zero_stretches(scale, text, ContextType.RESPONSE, last=last, messages=messages)
    ]
    end = chat.decode(ids[body:])
    if end and zero_stretches(scale, end, ContextType.SUFFIX, last=last, messages=messages):
        ranges.append((body, len(ids)))
    return ranges


def _scale_prompt(scale: LossScale, chat: ChatTemplate, record: TrajectoryRecord) -> None:
    """Assistant messages of the prompt, where they are trained on request: earlier rounds like any other."""
    edge = 0
    mask = record.loss_mask[: record.num_prompt_tokens]
    while 1 in mask[edge:]:
        start = mask.index(1, edge)
        end = mask.index(0, start) if 0 in mask[start:] else len(mask)
        for low, high in _cleared(scale, chat, record.token_ids[start:end], False, []):
            record.clear_mask(list(range(start + low, start + high)))
        edge = end


def _first_at(chat: ChatTemplate, ids: Sequence[int], character: int) -> int:
    """The first token that begins at or behind a character of the ids' text."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(chat.decode(ids[:middle])) >= character else (middle + 1, high)
    return low
