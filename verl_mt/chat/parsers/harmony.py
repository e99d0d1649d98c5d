"""gpt-oss's harmony format: one turn is several messages, each in a channel.

`<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{...}<|call|>`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_mt.chat.parsers.base import IndexedText, ToolParser, first_match, skip_space
from verl_mt.chat.parsers.sectioned import json_arguments
from verl_mt.chat.parsers.tagged import BadCall, found_instead, not_run
from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall, ToolSchema

_HEADER = re.compile(r"\s{0,8}(?:<\|start\|>)?(?P<header>(?:assistant\b|to=|<\|channel\|>)[^\n]{0,200}?)<\|message\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CLOSING = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_NEXT = re.compile(r"<\|start\|>|<\|channel\|>")
_ADVICE = (
    "Write a call as a message of the commentary channel to functions.NAME, with one JSON object of arguments as its "
    "body."
)


@dataclass
class _Turn:
    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    actions: list[ToolCall | MalformedCall] = field(default_factory=list)


class HarmonyParser(ToolParser):
    """A message with a recipient is a call, whatever its channel; without one, `analysis` is reasoning and every other
    channel is content."""

    end_markers = ("<|return|>", "<|call|>", "<|end|>", "<|endoftext|>")
    reasoning_key = "thinking"

    def parse(
        self, text: str, tools: Sequence[ToolSchema | dict[str, Any]] = (), *, in_reasoning: bool = False
    ) -> ParsedTurn:
        """As `ToolParser.parse`. `in_reasoning`: the text begins in the body of an analysis message."""
        text = IndexedText(text)
        turn = _Turn()
        position = 0
        if in_reasoning:
            position = self._body(text, 0, "<|channel|>analysis", 0, turn)
        while position < len(text):
            begin, kept = position, len(turn.text)
            header = _HEADER.match(text, position)
            if header is not None:
                position = self._body(text, header.end(), header["header"], begin, turn)
            else:
                following = first_match(_NEXT, text, begin + 1)
                position = following.start() if following else len(text)
                self._loose(text[begin:position], turn)
            if len(turn.actions) > self.max_calls:
                turn.actions[-1] = self.too_many(text[begin:])
                turn.text[kept:] = [text[begin:]]
                break
        content = "\n".join(piece for piece in turn.text if piece.strip())
        return ParsedTurn(content, "\n".join(turn.thoughts) if turn.thoughts else None, turn.actions)

    def _body(self, text: str, start: int, header: str, begin: int, turn: _Turn) -> int:
        """Read the message whose body begins at `start`; returns where the next one begins."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            return self._call(text, start, recipient[1].removeprefix("functions."), begin, turn)
        closing = first_match(_CLOSING, text, start)
        body = text[start : closing.start() if closing else len(text)]
        channel = _CHANNEL.search(header)
        (turn.thoughts if channel and channel[1] == "analysis" else turn.text).append(body)
        return closing.end() if closing else len(text)

    def _call(self, text: str, start: int, name: str, begin: int, turn: _Turn) -> int:
        """The arguments are decoded first and the closing token looked for after them, so one inside a string is
        harmless."""
        position = skip_space(text, start)
        closing = _CLOSING.match(text, position)
        try:
            empty = closing is not None or position == len(text)
            arguments, end = ({}, position) if empty else json_arguments(text, position, name)
            end = skip_space(text, end)
            closing = _CLOSING.match(text, end)
            if closing is None and end < len(text):
                raise BadCall(f"it should be closed behind its arguments, but {found_instead(text, end)}", name)
            turn.actions.append(ToolCall(name, arguments))
        except BadCall as error:
            closing = first_match(_CLOSING, text, position)
            raw = text[begin : closing.end() if closing else len(text)]
            turn.actions.append(not_run(raw, str(error), _ADVICE, error.name))
            turn.text.append(raw)
        return closing.end() if closing else len(text)

    def _loose(self, text: str, turn: _Turn) -> None:
        """Text outside every message: what a model writes that does not know the format, or a header without a body."""
        text = self._without_end_markers(text)
        if _RECIPIENT.search(text) and ("<|channel|>" in text or "<|start|>" in text):
            turn.actions.append(not_run(text, "the message has no body", _ADVICE))
        turn.text.append(text)
