"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, QwQ, Qwen3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json, malformed, read_call
from verl_mt.data.conversation import ToolSchema

_SPACE = re.compile(r"\s*")


class HermesParser(ToolParser):
    """Tagged JSON calls, any number in a turn.

    The JSON is decoded first and the closing tag looked for after it, so a closing tag inside a string is harmless.
    """

    open_tag = "<tool_call>"
    close_tag = "</tool_call>"

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        begin = text.find(self.open_tag, start)
        if begin < 0:
            return None
        inside = _skip_space(text, begin + len(self.open_tag))
        try:
            value, after = decode_json(text, inside)
        except BadJSON as error:
            end = self._end_of_broken(text, inside)
            closed = text.endswith(self.close_tag, begin, end)
            problem = f"it is not valid JSON ({error})" if closed else f"it is not closed ({error})"
            return FoundCalls(begin, end, (malformed(text[begin:end], problem),))
        after = _skip_space(text, after)
        if text.startswith(self.close_tag, after):
            end = after + len(self.close_tag)
            return FoundCalls(begin, end, (read_call(value, text[begin:end]),))
        end = self._end_of_broken(text, after)
        problem = (
            f"there is extra text after the JSON object: {text[after:end][:40]!r}"
            if text.endswith(self.close_tag, begin, end)
            else "it is not closed"
        )
        return FoundCalls(begin, end, (malformed(text[begin:end], problem),))

    def _end_of_broken(self, text: str, position: int) -> int:
        """After the next closing tag, before the next opening tag, or the end of the turn: whichever comes first."""
        closing = text.find(self.close_tag, position)
        opening = text.find(self.open_tag, position)
        if closing >= 0 and (opening < 0 or closing < opening):
            return closing + len(self.close_tag)
        return opening if opening >= 0 else len(text)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
