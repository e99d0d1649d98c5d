"""`Action: name` and `Action Input: arguments`, each on a line of its own: ReAct prompts, for any model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.parsers.base import FoundCalls, ToolParser, first_match, skip_space
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json
from verl_mt.chat.parsers.tagged import not_run, parameters_of, read_argument
from verl_mt.data.conversation import MalformedCall, ToolCall, ToolSchema

_ACTION = re.compile(r"^[ \t]*Action:[ \t]*([^\n]*)$", re.MULTILINE)
_INPUT = re.compile(r"\s*^[ \t]*Action Input:[ \t]*", re.MULTILINE)
_NEXT = re.compile(r"^[ \t]*(?:Observation|Thought|Action|Final Answer):", re.MULTILINE)
_FINAL = re.compile(r"^[ \t]*Final Answer:", re.MULTILINE)
_FENCE = re.compile(r"```\w*[ \t]*\n")
_ADVICE = "Write a line with Action: and the name of a tool, and below it a line with Action Input: and its arguments."


class ReactParser(ToolParser):
    """Every pair of an action and its input is a call; a turn without one ends the conversation.

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
