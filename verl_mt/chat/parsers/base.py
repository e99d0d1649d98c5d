"""What every tool parser shares: reasoning, end markers, and what stays in `content`.

A parser reads the text of one assistant turn. It never touches tokens: the recorded ids are the truth, and what is
parsed here only decides what runs next and what stands in `messages`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall, ToolSchema

_SPACE = re.compile(r"\s*")
_TAG_BEGINS = re.compile(r"[<\[]")


class IndexedText(str):
    """One turn's text, with the places of what was looked for in it.

    A model that writes the same tag ten thousand times asks ten thousand times for the tag that would close it. `find`
    remembers all places of a string, `first_match` the last answer for a pattern.
    """

    _places: dict[str, list[int]]
    _matches: dict[re.Pattern[str], tuple[int, re.Match[str] | None]]
    unreadable: dict[int, tuple[str, int | None]]
    """Where values begin that are known to be broken: what is wrong, and at which place."""
    unclosed: set[int]
    """Where brackets open that are known not to be closed."""

    def __new__(cls, text: str) -> IndexedText:
        indexed = super().__new__(cls, text)
        indexed._places, indexed._matches, indexed.unreadable, indexed.unclosed = {}, {}, {}, set()
        return indexed

    def find(self, wanted: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        """As `str.find`; `start` and `end` are not negative."""
        places = self._places.get(wanted)
        if places is None:
            places = self._places[wanted] = list(_places_of(str(self), wanted))
        nearest = bisect_left(places, start)
        if nearest == len(places) or (end is not None and places[nearest] + len(wanted) > end):
            return -1
        return places[nearest]

    def first_match(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        asked, match = self._matches.get(pattern, (start + 1, None))
        if asked > start or (match is not None and match.start() < start):
            match = pattern.search(self, start)
            self._matches[pattern] = (start, match)
        return match


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
    - Of more than `max_calls` calls in a turn the later ones are not read; the model is told.
    """

    max_calls: int = 128
    """The most calls, readable or not, that one turn may hold."""
    runs_calls_in_unclosed_reasoning: bool = False
    """A call in a reasoning that the turn does not close ends the reasoning and is run, as SGLang does it for the
    models of this grammar; False: it is a thought."""

    other_names: tuple[str, ...] = ()
    """What verl, SGLang and vLLM call this parser. A hyphen may stand for an underscore."""
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
        text = IndexedText(self._without_end_markers(text))
        scan = _Scan()
        start = 0
        if in_reasoning:
            start = self._take_thought(text, 0, tools, scan)
        self._scan(text, start, tools, scan)
        content = _join(scan.pieces, self.separators)
        actions = _without_double_ids(scan.actions)
        turn = ParsedTurn(content, "\n".join(scan.thoughts) if scan.thoughts else None, actions)
        if turn.calls and not content.strip():
            turn = replace(turn, content="")
        return turn

    def _scan(self, text: str, position: int, tools: Sequence[ToolSchema | dict[str, Any]], scan: _Scan) -> None:
        # One pass, left to right, over whatever comes first: a reasoning block, a call, or a closing tag that nothing
        # opened. The last means that all before it was a thought (the generation prompt opened it, or the model did not
        # care to), so what was taken for calls is given back. It counts only as long as no thought was seen.
        opening, closing = self.reasoning_tags
        found = self.find_calls(text, position, tools)
        while True:
            limit = found.start if found else len(text)
            broken = found is not None and any(isinstance(item, MalformedCall) for item in found.items)
            thought = text.find(opening, position, limit)
            if not scan.thoughts:
                # A broken call has no certain end: it may be a thought about calls, closed by this tag.
                orphan_limit = found.end if found and broken else limit
                orphan = text.find(closing, position, orphan_limit if thought < 0 else thought)
                if orphan >= 0:
                    self._scan_after_thought(text, orphan, tools, scan)
                    return
            if thought >= 0:
                if scan.pieces or text[position:thought].strip():
                    scan.pieces.append(text[position:thought])
                position = self._take_thought(text, thought + len(opening), tools, scan)
                if found and found.start < position:
                    found = self.find_calls(text, position, tools)
                continue
            scan.pieces.append(text[position:limit])
            if not found:
                return
            if len(scan.actions) + len(found.items) > self.max_calls:
                self._give_up(text, found, tools, scan)
                return
            scan.actions += found.items
            scan.pieces.append(text[found.start : found.end] if broken or self.calls_in_content else None)
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

    def _take_thought(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]], scan: _Scan) -> int:
        """Move `text[start:...]` up to the closing tag into the thoughts; returns where the turn goes on."""
        closing = self.reasoning_tags[1]
        end = text.find(closing, start)
        if end >= 0:
            scan.thoughts.append(text[start:end].strip("\n"))
            return _skip_newlines(text, end + len(closing))
        end = self._call_in_thought(text, start, tools)
        scan.thoughts.append(text[start:end].strip("\n"))
        return end

    def _call_in_thought(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> int:
        """Where a thought without an end gives way to a call that can be run; else the end of the text."""
        if self.runs_calls_in_unclosed_reasoning:
            found = self.find_calls(text, start, tools)
            for _ in range(self.max_calls):
                if found is None:
                    break
                if any(isinstance(item, ToolCall) for item in found.items):
                    return found.start
                found = self.find_calls(text, found.end, tools)
        return len(text)

    def _give_up(self, text: str, found: FoundCalls, tools: Sequence[ToolSchema | dict[str, Any]], scan: _Scan) -> None:
        """Keep the calls that a turn may hold; the rest of the text stays, unread, with one error for all of it."""
        orphan = -1 if scan.thoughts else text.find(self.reasoning_tags[1], found.start)
        if orphan >= 0:
            self._scan_after_thought(text, orphan, tools, scan)
            return
        scan.actions += found.items[: self.max_calls - len(scan.actions)]
        scan.actions.append(self.too_many(text[found.start :]))
        scan.pieces.append(text[found.start :])

    def too_many(self, rest: str) -> MalformedCall:
        """What stands for all of the turn behind the most calls that it may hold."""
        problem = f"one turn may hold {self.max_calls} calls, and this turn goes on behind them"
        advice = "Write fewer calls at once, and read their results before you go on."
        return MalformedCall(rest, f"The tool call was not run: {problem}. {advice}")

    def _without_end_markers(self, text: str) -> str:
        kept = end = len(text)
        while True:
            while end and text[end - 1].isspace():
                end -= 1
            marker = next((m for m in self.end_markers if m and text.endswith(m, 0, end)), None)
            if marker is None:
                return text[:kept]
            kept = end = end - len(marker)


def first_match(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    """`pattern.search(text, start)`, remembered where the text can remember."""
    return text.first_match(pattern, start) if isinstance(text, IndexedText) else pattern.search(text, start)


def tool_names(tools: Sequence[ToolSchema | dict[str, Any]]) -> set[str]:
    """Names of tool schemas: objects, or dicts in either shape (`{"function": {...}}` or the function itself)."""
    return {tool.get("function", tool).get("name", "") if isinstance(tool, dict) else tool.name for tool in tools}


def skip_space(text: str, position: int) -> int:
    """Where `text` goes on after the white space at `position`."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _skip_newlines(text: str, position: int) -> int:
    while text.startswith("\n", position):
        position += 1
    return position


def _places_of(text: str, wanted: str) -> Iterator[int]:
    place = text.find(wanted)
    while place >= 0:
        yield place
        place = text.find(wanted, place + 1)


def _join(pieces: Sequence[str | None], separators: Sequence[str]) -> str:
    kept = []
    for before, piece, after in zip(["", *pieces], pieces, [*pieces[1:], ""]):
        if piece is None or (before is None and not piece.strip()):
            continue
        separator = next((s for s in separators if piece.endswith(s)), "") if after is None else ""
        kept.append(piece.removesuffix(separator))
    return "".join(kept)


def _without_double_ids(actions: Sequence[ToolCall | MalformedCall]) -> list[ToolCall | MalformedCall]:
    """An id that stands for two calls names none: the later ones lose it, and get a new one."""
    seen: set[str] = set()
    kept: list[ToolCall | MalformedCall] = []
    for action in actions:
        if isinstance(action, ToolCall) and action.id:
            action = replace(action, id="") if action.id in seen else action
            seen.add(action.id)
        kept.append(action)
    return kept


class BadCall(ValueError):
    """A call that cannot be read; the message is the end of "The tool call was not run: ...".

    `at` is the position where reading stopped: what was read before it is not read again.
    """

    def __init__(self, problem: str, name: str | None = None, at: int = 0):
        super().__init__(problem)
        self.name = name
        self.at = at


def not_run(text: str, problem: str, advice: str, name: str | None = None) -> MalformedCall:
    """A call that was not understood, with the sentence that the model gets back."""
    return MalformedCall(text=text, error=f"The tool call was not run: {problem}. {advice}", name=name or None)


def found_instead(text: str, position: int) -> str:
    """What stands at `position`, for an error text: no tags, for the model would see them as its own."""
    if position >= len(text):
        return "the text ends"
    shown = _TAG_BEGINS.split(text[position : position + 30])[0].strip()
    return f"it says {shown!r}" if shown else "another tag stands"


def end_of_broken(text: str, position: int, opening: str, closing: str) -> int:
    """After the next closing tag, before the next opening tag, or the end of the turn: whichever comes first."""
    close, open_ = text.find(closing, position), text.find(opening, position)
    if close >= 0 and (open_ < 0 or close < open_):
        return close + len(closing)
    return open_ if open_ >= 0 else len(text)
