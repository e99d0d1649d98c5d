"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, QwQ, Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, skip_space
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json, malformed, read_call
from verl_mt.chat.parsers.tagged import end_of_broken, found_instead
from verl_mt.data.conversation import ToolSchema


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
        inside = skip_space(text, begin + len(self.open_tag))
        try:
            value, after = decode_json(text, inside)
        except BadJSON as error:
            end = end_of_broken(text, inside, self.open_tag, self.close_tag)
            closed = text.endswith(self.close_tag, begin, end)
            problem = f"it is not valid JSON ({error})" if closed else f"it is not closed ({error})"
            return FoundCalls(begin, end, (malformed(text[begin:end], problem),))
        after = skip_space(text, after)
        if text.startswith(self.close_tag, after):
            end = after + len(self.close_tag)
            return FoundCalls(begin, end, (read_call(value, text[begin:end]),))
        end = end_of_broken(text, after, self.open_tag, self.close_tag)
        problem = (
            f"behind the JSON object it should be closed, but {found_instead(text[:end], after)}"
            if text.endswith(self.close_tag, begin, end)
            else "it is not closed"
        )
        return FoundCalls(begin, end, (malformed(text[begin:end], problem),))
