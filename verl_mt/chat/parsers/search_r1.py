"""`<search>query</search>` and `<answer>text</answer>`: the grammar of Search-R1 and of slime's search example."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from verl_mt.chat.parsers.base import FoundCalls, ToolParser
from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall, ToolSchema

_HINT = (
    "The last turn held no valid action. To look something up, put the query between the search tags; "
    "to finish, put the final answer between the answer tags. Try again."
)


class _Action(NamedTuple):
    start: int
    end: int
    tag: str
    text: str


class SearchR1Parser(ToolParser):
    """One action per turn, the first complete one: a search calls the tool, an answer ends the conversation.

    The turn's text stays in `content` with its tags, `<answer>` included: chat templates cannot write this grammar from
    `tool_calls`, and scorers look for the tags. A turn without an action is malformed, its error a hint.

    Args:
        tool_name: the tool that a search calls.
        argument: the tool's argument that gets the query.
        hint: what the model is told after a turn without an action; None = such a turn ends the conversation.
    """

    stop_strings = ("</search>", "</answer>")
    calls_in_content = True

    def __init__(
        self,
        *,
        tool_name: str = "search",
        argument: str = "query",
        hint: str | None = _HINT,
        end_markers: Sequence[str] | None = None,
    ):
        super().__init__(end_markers=end_markers)
        self.tool_name = tool_name
        self.argument = argument
        self.hint = hint

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        action = _first_action(text, start)
        if action is None:
            return None
        items = (ToolCall(self.tool_name, {self.argument: action.text.strip()}),) if action.tag == "search" else ()
        return FoundCalls(action.start, action.end, items)

    def parse(
        self, text: str, tools: Sequence[ToolSchema | dict[str, Any]] = (), *, in_reasoning: bool = False
    ) -> ParsedTurn:
        turn = super().parse(text, tools, in_reasoning=in_reasoning)
        action = _first_action(turn.content, 0)
        if action is None:
            bad: list[ToolCall | MalformedCall] = []
            if self.hint is not None:
                bad.append(MalformedCall(turn.content, self.hint))
            return dataclasses.replace(turn, actions=bad)
        return dataclasses.replace(turn, actions=turn.actions[:1] if action.tag == "search" else [])


def _first_action(text: str, start: int) -> _Action | None:
    """Found without a regular expression: backtracking over many opening tags would take quadratic time."""
    actions = []
    for tag in ("search", "answer"):
        opening = text.find(f"<{tag}>", start)
        inside = opening + len(tag) + 2
        closing = text.find(f"</{tag}>", inside) if opening >= 0 else -1
        if closing >= 0:
            actions.append(_Action(opening, closing + len(tag) + 3, tag, text[inside:closing]))
    return min(actions, default=None)
