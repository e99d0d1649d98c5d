"""What every tool parser shares: reasoning, end markers, and what stays in `content`.

A parser reads the text of one assistant turn. It never touches tokens: the recorded ids are the truth, and what is
parsed here only decides what runs next and what stands in `messages`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall, ToolSchema

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class FoundCalls:
    """Calls, valid or malformed, written in `text[start:end]`."""

    start: int
    end: int
    items: tuple[ToolCall | MalformedCall, ...]


@dataclass
class _Scan:
    """A turn taken apart, in the order written."""

    pieces: list[str | None] = field(default_factory=list)
    """Text that stays; None where a call was taken out."""
    thoughts: list[str] = field(default_factory=list)
    actions: list[ToolCall | MalformedCall] = field(default_factory=list)


class ToolParser:
    """Reads one assistant turn. Subclasses implement `find_calls`; reasoning and `content` are done here.

    - A call inside `<think>...</think>` is a thought, not a call. An unclosed `<think>` swallows the rest of the turn.
      A `</think>` that nothing opened ends a reasoning that the generation prompt began.
    - Text that tries to be a call and cannot be read becomes a `MalformedCall`, and its raw text stays in `content`.
    - Of the text around a call only what templates write before it (`separators`) is dropped, so that rendering
      content and calls again gives the text that was sampled.
    - An id that the model wrote stands, unless another call of the turn has the same one.
    """

    stop_strings: tuple[str, ...] = ()
    """Strings that end a turn of this grammar; the engine stops after them and keeps them."""
    end_markers: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "</s>")
    """End-of-turn control text; taken off the end of the turn where it is present."""
    reasoning_tags: tuple[str, str] = ("<think>", "</think>")
    reasoning_key: str = "reasoning_content"
    """The key of a message under which templates of this grammar take the reasoning."""
    separators: tuple[str, ...] = ("\n",)
    """What templates of this grammar write between text and a call; the first that fits is dropped."""
    calls_in_content: bool = False
    """True: the text of a call stays in `content`, as chat templates cannot write this grammar from `tool_calls`."""

    def __init__(self, *, end_markers: Sequence[str] | None = None):
        if end_markers is not None:
            self.end_markers = tuple(end_markers)

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        """The first call, valid or malformed, that begins at or after `start`; None if there is none."""
        raise NotImplementedError(f"{type(self).__name__} must implement find_calls(text, start, tools)")

    def parse(
        self, text: str, tools: Sequence[ToolSchema | dict[str, Any]] = (), *, in_reasoning: bool = False
    ) -> ParsedTurn:
        """Content, reasoning and calls of one assistant turn.

        Args:
            text: what the model wrote, without the generation prompt; the end-of-turn marker may be there or not.
            tools: schemas of the tools that exist; grammars without tags use the names.
            in_reasoning: the generation prompt ended in `<think>`, so the text starts inside the reasoning.

        Returns:
            `reasoning` None if the turn has no reasoning, `""` if its block is empty. Never raises on model text.
        """
        text = self._without_end_markers(text)
        scan = _Scan()
        start = 0
        if in_reasoning:
            start = self._take_thought(text, 0, scan)
        self._scan(text, start, tools, scan)
        content = _join(scan.pieces, self.separators)
        actions = _without_double_ids(scan.actions)
        turn = ParsedTurn(content, "\n".join(scan.thoughts) if scan.thoughts else None, actions)
        if turn.calls and not content.strip():
            turn = replace(turn, content="")
        return turn

    def _scan(self, text: str, position: int, tools: Sequence[ToolSchema | dict[str, Any]], scan: _Scan) -> None:
        opening, closing = self.reasoning_tags
        found = self.find_calls(text, position, tools)
        while True:
            limit = found.start if found else len(text)
            thought = text.find(opening, position, limit)
            if not scan.thoughts:
                # A broken call has no certain end: it may be a thought about calls, closed by this tag.
                broken = found is not None and any(isinstance(item, MalformedCall) for item in found.items)
                orphan_limit = found.end if found and broken else limit
                orphan = text.find(closing, position, orphan_limit if thought < 0 else thought)
                if orphan >= 0:
                    self._scan_after_thought(text, orphan, tools, scan)
                    return
            if thought >= 0:
                if scan.pieces or text[position:thought].strip():
                    scan.pieces.append(text[position:thought])
                position = self._take_thought(text, thought + len(opening), scan)
                if found and found.start < position:
                    found = self.find_calls(text, position, tools)
                continue
            scan.pieces.append(text[position:limit])
            if not found:
                return
            self._take_calls(text, found, scan)
            position = found.end
            found = self.find_calls(text, position, tools)

    def _scan_after_thought(
        self, text: str, orphan: int, tools: Sequence[ToolSchema | dict[str, Any]], scan: _Scan
    ) -> None:
        """All before `</think>` at `orphan` was a thought after all."""
        for taken in (scan.pieces, scan.actions):
            taken.clear()
        scan.thoughts.append(text[:orphan].strip("\n"))
        self._scan(text, _skip_newlines(text, orphan + len(self.reasoning_tags[1])), tools, scan)

    def _take_thought(self, text: str, start: int, scan: _Scan) -> int:
        """Move `text[start:...]` up to the closing tag into the thoughts; returns where the turn goes on."""
        closing = self.reasoning_tags[1]
        end = text.find(closing, start)
        scan.thoughts.append(text[start : len(text) if end < 0 else end].strip("\n"))
        return len(text) if end < 0 else _skip_newlines(text, end + len(closing))

    def _take_calls(self, text: str, found: FoundCalls, scan: _Scan) -> None:
        scan.actions += found.items
        malformed = any(isinstance(item, MalformedCall) for item in found.items)
        scan.pieces.append(text[found.start : found.end] if malformed or self.calls_in_content else None)

    def _without_end_markers(self, text: str) -> str:
        while True:
            bare = text.rstrip()
            marker = next((m for m in self.end_markers if m and bare.endswith(m)), None)
            if marker is None:
                return text
            text = bare[: -len(marker)]


def tool_names(tools: Sequence[ToolSchema | dict[str, Any]]) -> set[str]:
    """Names of tool schemas: objects, or dicts in either shape (`{"function": {...}}` or the function itself)."""
    return {tool.get("function", tool).get("name", "") if isinstance(tool, dict) else tool.name for tool in tools}


def skip_space(text: str, position: int) -> int:
    """Where `text` goes on after the white space at `position`."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _skip_newlines(text: str, position: int) -> int:
    return len(text) - len(text[position:].lstrip("\n"))


def _join(pieces: Sequence[str | None], separators: Sequence[str]) -> str:
    kept = []
    for before, piece, after in zip(["", *pieces], pieces, [*pieces[1:], ""]):
        if piece is None or (before is None and not piece.strip()):
            continue
        separator = next((s for s in separators if piece.endswith(s)), "") if after is None else ""
        kept.append(piece.removesuffix(separator))
    return "".join(kept)


def _without_double_ids(actions: Sequence[ToolCall | MalformedCall]) -> list[ToolCall | MalformedCall]:
    """An id that stands for two calls names none: the later ones lose it, and get one of ours."""
    seen: set[str] = set()
    kept: list[ToolCall | MalformedCall] = []
    for action in actions:
        if isinstance(action, ToolCall) and action.id:
            action = replace(action, id="") if action.id in seen else action
            seen.add(action.id)
        kept.append(action)
    return kept
