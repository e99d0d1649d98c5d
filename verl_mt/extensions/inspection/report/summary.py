"""One rollout row as the page needs it: a line of the table, and the details of an opened conversation.

The details have the *blocks* of each record: which of its tokens say which message. A record knows its prompt,
assistant and observation spans. In prompts and observations, messages are found by their text; what the template writes
around a message belongs to that message's block, its end-of-turn token included. Where it writes much, such as the list
of the tools, that is a separate block, so that the question stands in another one.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from verl_mt.data.conversation import reasoning_of
from verl_mt.extensions.inspection.report.token_columns import RecordNumbers, TokenColumns

BOUNDARY_TOKENS = 3
"""Trained tokens on either side of a tool's answer that count as a tool boundary."""

_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>", "[/INST]")
_PROBE = 40
"""Characters of a message's beginning and end that it is found by."""
_MUCH = 200
"""Characters of the template between two messages that make a separate block."""
_QUESTION, _ANSWER, _TRUTH = 120, 80, 80
"""Characters of these in the table; the details have the whole."""

Block = dict[str, Any]
"""`start`, `end` (tokens), `role`, `kind` (prompt | assistant | observation), `turn`, `name` (of a tool)."""

Line = dict[str, Any]


def describe(row: Mapping[str, Any], columns: TokenColumns, texts: Mapping[int, str]) -> tuple[Line, dict[str, Any]]:
    """A row's line of the table and its details; its tokens go into `columns`.

    A record that does not fit together is left out, and the details say why (`broken`).
    """
    records, numbers, broken = [], [], []
    for place, record in enumerate(row.get("records") or []):
        try:
            found = columns.add(record)
        except ValueError as error:
            broken.append(f"record {place}: {error}")
            continue
        seen = record.get("messages") or row.get("messages") or []
        numbers.append((record, found))
        records.append({"length": len(found.ids), "blocks": blocks_of(record, seen, texts)})
    details = _details(row)
    details["records"] = records
    if broken:
        details["broken"] = broken
    return _line(row, numbers) | _asked(row, details), details


def _line(row: Mapping[str, Any], numbers: Sequence[tuple[Mapping[str, Any], RecordNumbers]]) -> Line:
    counters = row.get("counters") or {}
    spans = [s for s in row.get("time_spans") or [] if "start_s" in s and "end_s" in s]
    sanity = row.get("sanity") or {}
    trained = [n.trained == 1 for _, n in numbers]
    ratios = np.concatenate([_away(n.ratio[t]) for (_, n), t in zip(numbers, trained)] or [np.zeros(0)])
    edges = np.concatenate([_away(n.ratio[_boundary(r, n)]) for r, n in numbers] or [np.zeros(0)])
    gains = np.concatenate([n.advantage[t] for (_, n), t in zip(numbers, trained)] or [np.zeros(0)])
    called = {name.split("/")[1] for name in counters if name.startswith("tools/") and name.endswith("/calls")}
    return {
        "id": str(row.get("trajectory_id", "")),
        "group": str(row.get("group_id", "")),
        "row": row.get("row_index", -1),
        "entry": str(row.get("source") or ""),
        "data": str(row.get("data_source") or ""),
        "reward": row.get("reward"),
        "status": row.get("status") or "",
        "stop": row.get("stop_reason") or "",
        "turns": row.get("num_turns", 0),
        "tokens": sum(len(n.ids) for _, n in numbers),
        "sampled": int(sum(n.sampled.sum() for _, n in numbers)),
        "trained": int(sum(n.trained.sum() for _, n in numbers)),
        "calls": _sum(counters, "/calls"),
        "errors": _sum(counters, "/errors"),
        "model_errors": _sum(counters, "/model_errors"),
        "tools": sorted(called),
        "ratio": _rounded(_largest(ratios)),
        "edge_ratio": _rounded(_largest(edges)),
        "advantage": _rounded(float(np.nanmean(gains)) if np.isfinite(gains).any() else None),
        "mismatch": list(sanity.get("counted", sanity.get("causes") or [c for c in [sanity.get("cause")] if c])),
        "seconds": _rounded(max(s["end_s"] for s in spans) - min(s["start_s"] for s in spans)) if spans else None,
    }


def _asked(row: Mapping[str, Any], details: Mapping[str, Any]) -> Line:
    """What was asked, answered and right, short, and what the same prompt has in common in every step and run.

    `prompt` is a digest of what the users of the prompt say: neither the order of the rows nor another system message
    makes it another prompt.
    """
    messages: list[dict[str, Any]] = details["messages"]
    prompt, own = messages[: details["prompt_messages"]], messages[details["prompt_messages"] :]
    asked = [m["text"] for m in prompt if m["role"] == "user"] or [m["text"] for m in prompt]
    said = [m for m in own if m["role"] == "assistant"]
    answer: dict[str, Any] = said[-1] if said else {"text": ""}
    called = ", ".join(str((call.get("function") or {}).get("name")) for call in answer.get("calls", []))
    return {
        "prompt": hashlib.sha256("\0".join(asked).encode(errors="replace")).hexdigest()[:10],
        "question": _beginning(asked[-1] if asked else "", _QUESTION),
        "answer": _ending(answer["text"], _ANSWER) or (called and f"calls {called}"),
        "truth": None if row.get("ground_truth") is None else _beginning(details["truth"], _TRUTH),
        "parts": {str(name): v for name, v in (row.get("reward_parts") or {}).items() if isinstance(v, int | float)},
    }


def _beginning(text: str, limit: int) -> str:
    short = " ".join(text[: 4 * limit].split())
    return short if len(short) <= limit and len(text) <= 4 * limit else f"{short[: limit - 1]}…"


def _ending(text: str, limit: int) -> str:
    """An answer stands at the end of what was said."""
    short = " ".join(text[-4 * limit :].split())
    return short if len(short) <= limit and len(text) <= 4 * limit else f"…{short[1 - limit :]}"


def _details(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = (
        "trajectory_id", "prompt_id", "group_id", "episode_id", "data_source", "source", "row_index", "reward_parts",
        "tool_rewards", "turn_scores", "counters", "sanity", "error", "info", "replicas",
    )  # fmt: skip
    details = {name: row[name] for name in kept if row.get(name) not in (None, {}, [], "")}
    if (truth := row.get("ground_truth")) is not None:
        details["truth"] = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, indent=1)
    details["messages"] = [_message(m) for m in row.get("messages") or [] if isinstance(m, dict)]
    details["prompt_messages"] = _first_own_message(row, details["messages"])
    details["calls"] = tool_calls(row)
    details["spans"] = [
        [s.get("phase", ""), round(s["start_s"], 6), round(s["end_s"], 6), s.get("turn", 0), s.get("name", "")]
        for s in row.get("time_spans") or []
        if "start_s" in s and "end_s" in s
    ]
    return details


def tool_calls(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every call of the conversation's own turns: `turn`, `name`, `arguments`, `result`, `seconds`, `failure`.

    Older rows have no `tool_calls`, only messages: whose fault a failure was is not known then, and neither is the time
    of a single call.
    """
    messages = [m for m in row.get("messages") or [] if isinstance(m, dict)]
    written = row.get("tool_calls") or []
    own = messages[_first_own_message(row, messages) :]
    answers = [m for m in own if m.get("role") == "tool"]
    if not written:
        written = _calls_in(own)
    by_id = {str(m["tool_call_id"]): m for m in answers if m.get("tool_call_id")}
    in_order = answers if len(answers) == len(written) else []
    calls = []
    for place, call in enumerate(written):
        answer = in_order[place] if in_order else by_id.get(str(call.get("call_id")))
        shown = {name: call.get(name) for name in ("turn", "name", "arguments", "failure", "written", "step_reward")}
        seconds = call.get("latency_s")
        calls.append(
            {k: v for k, v in shown.items() if v is not None}
            | {"result": None if answer is None else _plain(answer.get("content"))}
            | ({} if seconds is None else {"seconds": round(seconds, 6)})
        )
    return calls


def _first_own_message(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> int:
    """Where the prompt ends: the place of the first assistant message that was sampled."""
    said = [k for k, m in enumerate(messages) if m.get("role") == "assistant"]
    num_turns = int(row.get("num_turns") or 0)
    return said[max(0, len(said) - num_turns)] if said and num_turns else len(messages)


def _calls_in(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for turn, message in enumerate((m for m in messages if m.get("role") == "assistant"), start=1):
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            found.append(
                {
                    "turn": turn,
                    "name": function.get("name"),
                    "arguments": function.get("arguments"),
                    "call_id": call.get("id"),
                }
            )
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows and searches of a message."""
    shown: dict[str, Any] = {"role": str(message.get("role", "")), "text": _plain(message.get("content"))}
    if (reasoning := reasoning_of(message)) is not None:
        shown["reasoning"] = reasoning
    if message.get("tool_calls"):
        shown["calls"] = message["tool_calls"]
    if message.get("name"):
        shown["name"] = str(message["name"])
    return shown


def _plain(content: Any) -> str:
    """The text of a message; images and videos by their kind."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [p if isinstance(p, dict) else {"type": "text", "text": str(p)} for p in content]
    return "\n".join(str(p.get("text", "")) if p.get("type") == "text" else f"[{p.get('type')}]" for p in parts)


def _boundary(record: Mapping[str, Any], numbers: RecordNumbers) -> np.ndarray:
    """The trained tokens next to an observation: the last ones before it and the first ones after it."""
    near = np.zeros(len(numbers.ids), bool)
    for span in record.get("turns") or []:
        if span.get("kind") == "observation":
            near[max(0, span["start"] - BOUNDARY_TOKENS) : span["start"]] = True
            near[span["end"] : span["end"] + BOUNDARY_TOKENS] = True
    return near & (numbers.trained == 1)


def _away(ratio: np.ndarray) -> np.ndarray:
    """How far from 1, either way: max(r, 1/r)."""
    return np.maximum(ratio, 1 / ratio)


def _largest(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _sum(counters: Mapping[str, Any], ending: str) -> float:
    return sum(v for k, v in counters.items() if k.startswith("tools/") and k.endswith(ending))


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
    """The blocks of one span of prompt or observation tokens."""
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
    begins: list[tuple[int, str, str]] = []  # character, role, name
    before = 0
    for message, start, end in found:
        begins += _template_block(text, before, start, opens=not before and span.get("kind") == "prompt")
        begins.append((_begin_of(text, before, start), str(message.get("role", "")), message.get("name", "")))
        before = end
    begins[0] = (0, *begins[0][1:])
    edges = [*(bisect.bisect_left(starts, place) for place, _, _ in begins), len(pieces)]
    return [
        _block(span, span["start"] + a, span["start"] + b, role, name)
        for (_, role, name), a, b in zip(begins, edges, edges[1:])
    ]


def _template_block(text: str, before: int, start: int, *, opens: bool) -> list[tuple[int, str, str]]:
    """Where, between two messages, a block of the template's own begins; none where it writes little.

    Args:
        opens: nothing stands before; a whole turn here, such as a default system message, is a block of any length.
    """
    gap = text[before:start]
    first = min((place + len(mark) for mark in _ENDS if (place := gap.find(mark)) >= 0), default=0)
    if before == 0 or first > _PROBE:  # not the end of the message before it
        first = 0
    end = _begin_of(text, before, start) - before
    if not end or (end - first < _MUCH and not opens):
        return []
    return [(before + first + (gap[first : first + 1] == "\n"), "tools" if '"parameters"' in gap else "template", "")]


def _begin_of(text: str, before: int, start: int) -> int:
    """Where the block of a message begins whose text begins at `start`, behind one that ends at `before`: with its
    header, but not with a list of tools in it (Llama writes it into the first user's turn)."""
    header = _end_of_turn(text, before, start)
    return start if start - header >= _MUCH else header


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
