"""Messages, tool calls and tool schemas: the OpenAI chat shapes that templates and plug-in authors know.

A message is a plain dict (`{"role": ..., "content": ..., "tool_calls": [...]}`), because that is what chat
templates render and what every user's code already handles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

Message = dict[str, Any]
"""`role` (system | user | assistant | tool | ...), `content` (str, or a list of typed parts); for an assistant
optionally its reasoning (str, under one of `REASONING_KEYS`) and `tool_calls` (list of `ToolCall.to_message()`); for a
tool `tool_call_id` and `name`."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Where templates look for the reasoning of a message: a rollout writes it under the key that its template reads."""

MESSAGES_AS_TEXT = re.compile(
    r"""\s*+(?:array\(\s*+)?\[?+\s*+\{(?=.*["']role["']\s*+:)\s*+["'](?:role|content|messages)["']\s*+:.*[\]})]\s*""",
    re.DOTALL,
)
"""JSON of messages, or what Python prints of them: a column that went through CSV, a data frame or a database."""


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """What was thought before a message; None where it holds no such text."""
    texts = (message.get(key) for key in REASONING_KEYS)
    return next((text for text in texts if isinstance(text, str) and text), None)


def user_texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The texts that users say."""
    for message in messages:
        content = message.get("content") if message.get("role") == "user" else None
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text") if isinstance(part, Mapping) else None
            if isinstance(text, str):
                yield text


@dataclass(frozen=True)
class ToolCall:
    """One call that the model wrote, parsed.

    `arguments` is always a dict: parsers decode JSON strings.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""

    def to_message(self) -> dict[str, Any]:
        """The OpenAI shape, arguments as a dict (`verl_mt.chat` turns them into a string where a template wants it)."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class MalformedCall:
    """A call that the model tried to write and that cannot be parsed; `error` is what the model is told."""

    text: str
    error: str
    name: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    """What one assistant turn says, read by a tool parser.

    `content` + `reasoning` are what goes into the message; `actions` is what the model wants done.
    """

    content: str
    reasoning: str | None = None
    actions: list[ToolCall | MalformedCall] = field(default_factory=list)
    """Every call, readable or not, in the order written: answers go back in this order, for many templates show no
    call ids, and the model then tells the answers apart by their place alone."""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that can be run, in the order written."""
        return [action for action in self.actions if isinstance(action, ToolCall)]

    @property
    def malformed(self) -> list[MalformedCall]:
        """The calls that cannot be read, in the order written."""
        return [action for action in self.actions if isinstance(action, MalformedCall)]

    def with_ids(self, prefix: str) -> ParsedTurn:
        """The same turn; a call without an id gets `prefix` and its place among the actions (from 0)."""
        actions = [
            replace(action, id=action.id or f"{prefix}{place}") if isinstance(action, ToolCall) else action
            for place, action in enumerate(self.actions)
        ]
        return replace(self, actions=actions)


class _Open(BaseModel):
    """Keeps every keyword it does not know: JSON Schema has many."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """One property of a function's parameters. Every other JSON-Schema keyword is kept as it is."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The parameters of a function: a JSON Schema of type object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Open):
    """A function as OpenAI's tool schema describes it."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """`{"type": "function", "function": {...}}`. `to_template()` is what chat templates get."""

    type: str = "function"
    function: OpenAIFunctionSchema

    @property
    def name(self) -> str:
        return self.function.name

    def to_template(self) -> dict[str, Any]:
        """The dict as the author wrote it: only keys that were set, none invented."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


ToolSchema = OpenAIFunctionToolSchema
