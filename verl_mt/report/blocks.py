"""Which tokens of a record say which message: the blocks of a conversation as a person reads it.

A record knows its prompt, assistant and observation spans. Inside what was given, messages are found by their text;
what the template writes around a message belongs to that message's block, its end-of-turn token included.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>", "[/INST]")
_PROBE = 40
"""Characters of a message's beginning and end that it is found by."""

Block = dict[str, Any]
"""`start`, `end` (tokens), `role`, `kind` (prompt | assistant | observation), `turn`, `name` (of a tool)."""


def blocks_of(
    record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], texts: Mapping[int, str]
) -> list[Block]:
    """Blocks of one record in order, covering its tokens.

    Args:
        record: of a rollout row.
        messages: what the record has seen, its own turns included.
        texts: token id -> text.
    """
    spans = record.get("turns") or [
        {"kind": "prompt", "start": 0, "end": len(record.get("token_ids") or []), "turn": 0}
    ]
    ids = record.get("token_ids") or []
    said = [k for k, message in enumerate(messages) if message.get("role") == "assistant"]
    own = [span for span in spans if span.get("kind") == "assistant"]
    generated = said[max(0, len(said) - len(own)) :] if own else []
    edge = generated[0] if generated else len(messages)
    given, blocks, turn_number = messages[:edge], [], 0
    for span in spans:
        if span.get("kind") == "assistant":
            blocks.append(_block(span, span["start"], span["end"], "assistant"))
            after = generated[turn_number] + 1 if turn_number < len(generated) else len(messages)
            turn_number += 1
            until = generated[turn_number] if turn_number < len(generated) else len(messages)
            given = messages[after:until]
            continue
        pieces = [texts.get(i, "") for i in ids[span["start"] : span["end"]]]
        blocks += _split(span, pieces, given)
    return [block for block in blocks if block["end"] > block["start"]]


def _split(span: Mapping[str, Any], pieces: list[str], given: Sequence[Mapping[str, Any]]) -> list[Block]:
    """The blocks of one span of given tokens."""
    text = "".join(pieces)
    starts = [0, *accumulate(len(piece) for piece in pieces)]
    found: list[tuple[Mapping[str, Any], int, int]] = []
    cursor = 0
    for message in given:
        place = _find(text, _text_of(message.get("content")), cursor)
        if place is not None:
            found.append((message, *place))
            cursor = place[1]
    if not found:
        role = given[0].get("role", "prompt") if given else "tool" if span.get("kind") == "observation" else "prompt"
        name = given[0].get("name", "") if given else ""
        return [_block(span, span["start"], span["end"], str(role), name)]
    edges = [0]
    for (_, _, end), (_, start, _) in pairwise(found):
        edges.append(bisect.bisect_left(starts, _end_of_turn(text, end, start)))
    edges.append(len(pieces))
    return [
        _block(span, span["start"] + a, span["start"] + b, str(message.get("role", "")), message.get("name", ""))
        for (message, _, _), a, b in zip(found, edges, edges[1:])
    ]


def _find(text: str, content: str, cursor: int) -> tuple[int, int] | None:
    content = content.strip()
    if not content:
        return None
    start = text.find(content[:_PROBE], cursor)
    if start < 0:
        return None
    end = text.find(content[-_PROBE:], start)
    return start, (start + len(content) if end < 0 else end + len(content[-_PROBE:]))


def _end_of_turn(text: str, end: int, start: int) -> int:
    """Where, between the end of one message and the start of the next, the second one's block begins."""
    gap = text[end:start]
    place = max(((gap.rfind(mark) + len(mark)) for mark in _ENDS if mark in gap), default=0)
    while place < len(gap) and gap[place] == "\n":
        place += 1
    return end + place


def _text_of(content: Any) -> str:
    """The text of a message's content; of typed parts the first text."""
    if isinstance(content, str):
        return content
    parts: Iterable[Any] = content if isinstance(content, list) else ()
    return next((p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)), "")


def _block(span: Mapping[str, Any], start: int, end: int, role: str, name: str = "") -> Block:
    block: Block = {"start": start, "end": end, "role": role, "kind": span.get("kind", ""), "turn": span.get("turn", 0)}
    return block | {"name": name} if name else block
