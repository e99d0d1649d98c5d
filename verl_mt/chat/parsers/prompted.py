"""Grammars that a prompt teaches to any model, and no chat template writes: ReAct and Search-R1."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from verl_mt.chat.parsers.argument_types import parameters_of, read_argument
from verl_mt.chat.parsers.base import FoundCalls, ToolParser, first_match, not_run, skip_space
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json
from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall, ToolSchema

_ACTION = re.compile(r"^[ \t]*Action:[ \t]*([^\n]*)$", re.MULTILINE)
_INPUT = re.compile(r"\s*^[ \t]*Action Input:[ \t]*", re.MULTILINE)
_NEXT = re.compile(r"^[ \t]*(?:Observation|Thought|Action|Final Answer):", re.MULTILINE)
_FINAL = re.compile(r"^[ \t]*Final Answer:", re.MULTILINE)
_FENCE = re.compile(r"```\w*[ \t]*\n")
_ADVICE = "Write a line with Action: and the name of a tool, and below it a line with Action Input: and its arguments."


class ReactParser(ToolParser):
    """`Action: name` and `Action Input: arguments`, each on a separate line: a pair of them is a call, and a turn
    without one ends the conversation.

    An input that is a JSON object holds the arguments. Any other text is the value of the tool's only argument (or its
    only required one); for a tool that does not exist it is called `input`. The text stays in `content`, as chat
    templates cannot write this grammar. The turn ends where the model would begin to write the observation itself.
    """

    stop_strings = ("Observation:",)
    calls_in_content = True

    def find_calls(self, text: str, start: int, tools: Sequence[ToolSchema | dict[str, Any]]) -> FoundCalls | None:
        for action in _ACTION.finditer(text, start):
            name = action[1].strip().strip("`'\"[]*").strip()
            given = _INPUT.match(text, action.end())
            if given is not None:
                item, end = _read(text, action.start(), given.end(), name, tools)
                return FoundCalls(action.start(), end, (item,))
            if first_match(_FINAL, text, action.end()):
                continue  # an answer, with an "Action: None" before it
            following = first_match(_NEXT, text, action.end())
            end = following.start() if following else len(text)
            problem = f"the action {name[:40]!r} has no input"
            return FoundCalls(action.start(), end, (not_run(text[action.start() : end], problem, _ADVICE, name),))
        return None


def _read(
    text: str, begin: int, start: int, name: str, tools: Sequence[ToolSchema | dict[str, Any]]
) -> tuple[ToolCall | MalformedCall, int]:
    """The call whose input begins at `start`, and where the input ends."""
    if not name:
        end = _input_end(text, start)
        return not_run(text[begin:end], "the name of the tool is missing", _ADVICE), end
    position = skip_space(text, start)
    bad: BadJSON | None = None
    if text.startswith("{", position):
        try:
            value, after = decode_json(text, position)
            if not text[after : _input_end(text, after)].strip():
                return ToolCall(name, value), after
        except BadJSON as error:
            bad = error
    end = _input_end(text, start)
    raw = text[start:end].strip()
    fence = _FENCE.match(raw)
    if fence is not None and raw.endswith("```", fence.end()):
        raw = raw[fence.end() : -3].rstrip(" \t").removesuffix("\n")
        try:
            value, after = decode_json(raw, skip_space(raw, 0))
            if isinstance(value, dict) and not raw[after:].strip():
                return ToolCall(name, value), end
        except BadJSON as error:
            bad = error if raw.lstrip().startswith("{") else None
    return _from_text(text[begin:end], raw, name, parameters_of(tools, name), bad), end


def _from_text(
    whole: str, raw: str, name: str, parameters: dict[str, Any] | None, bad: BadJSON | None
) -> ToolCall | MalformedCall:
    """The input is no JSON object: it is the value of the one argument that it can be."""
    if parameters is None and bad is None:
        return ToolCall(name, {"input": raw} if raw else {})
    keys = list((parameters or {}).get("properties") or {})
    required = [key for key in (parameters or {}).get("required") or () if key in keys]
    only = keys if len(keys) == 1 else required
    if not raw and not required:
        return ToolCall(name, {})
    if len(only) == 1 and (bad is None or len(keys) == 1):
        return ToolCall(name, {only[0]: read_argument(raw, only[0], parameters)})
    wanted = f" with the keys {', '.join(keys)}" if keys else ""
    advice = f"{_ADVICE[:-1]}: one JSON object{wanted}."
    problem = f"the input is not valid JSON ({bad})" if bad else "the input is not a JSON object"
    return not_run(whole, problem, advice, name)


def _input_end(text: str, start: int) -> int:
    following = first_match(_NEXT, text, start)
    return following.start() if following else len(text)


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
    """`<search>query</search>` and `<answer>text</answer>`, the grammar of Search-R1 and of slime's search example: one
    action per turn, the first complete one. A search calls the tool, an answer ends the conversation.

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
