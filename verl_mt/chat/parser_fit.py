"""Does a tool parser read the calls that a chat template writes? Found out by writing one and reading it back.

A template shows a model in which form to write its calls (and writes them so when it renders a conversation). A parser
of another form finds no call in what such a model says: every trajectory ends after its first turn, without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_mt.chat.differences import common_prefix
from verl_mt.chat.parsers import ToolParser, get_parser, is_registered, tool_parsers
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.conversation import Message, ToolCall
from verl_mt.errors import TemplateError

_ASKED = "Zqxjkvasked"
_NAME = "zqxjkvlookup"
_ARGUMENTS: dict[str, Any] = {"query": 'two\n"words"', "count": 3}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "count": {"type": "integer", "description": "How many."},
            },
            "required": ["query", "count"],
        },
    },
}


@dataclass(frozen=True)
class WrittenCall:
    """A call as a template writes it, behind the generation prompt."""

    text: str
    in_reasoning: bool
    """The text begins in mid-thought, as the generation prompt opened one."""

    def read_by(self, parser: ToolParser) -> bool:
        """Whether the parser finds the call, and takes nothing of it for text."""
        turn = parser.parse(self.text, [_TOOL], in_reasoning=self.in_reasoning)
        calls = [ToolCall(call.name, call.arguments) for call in turn.calls]
        whole = parser.calls_in_content or not turn.content.strip()
        return calls == [ToolCall(_NAME, _ARGUMENTS)] and not turn.malformed and whole


def written_call(
    chat: ChatTemplate, *, tool: dict[str, Any] = _TOOL, arguments: dict[str, Any] = _ARGUMENTS
) -> WrittenCall | None:
    """A call as the template writes it, of a small tool unless you pass another one's schema; None where it writes
    none."""
    if not chat.capabilities.tool_calls:
        return None
    call = ToolCall(tool["function"]["name"], arguments, id="zqxjkv001").to_message()
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked: list[Message] = [{"role": "user", "content": _ASKED}]
    # A template that opens every turn in mid-thought shows that opening only where there is a thought.
    for message in (turn, {**turn, chat.capabilities.reasoning_key: "Hm."}):
        try:
            prompt = chat.full_text(asked, [tool], add_generation_prompt=True)
            full = chat.full_text([*asked, message], [tool])
        except TemplateError:
            return None
        if full.startswith(prompt):
            return WrittenCall(_model_text(chat, full[len(prompt) :]), chat.prefilled_reasoning)
    # The finished turn begins in another way than the generation prompt: the header goes, as far as both have it.
    header, tail = (text[text.rfind(_ASKED) + len(_ASKED) :] for text in (prompt, full))
    common = common_prefix(header, tail)
    tag = header.rfind("<", 0, common)
    if tag >= 0 and ">" not in header[tag:common]:
        common = tag  # never from the middle of one
    return WrittenCall(_model_text(chat, tail[common:]), False)


def suggest_parser(chat: ChatTemplate) -> str | None:
    """The registered parser that reads the calls of this template; None if it writes none, or no parser reads them."""
    written = written_call(chat)
    if written is None:
        return None
    return next((name for name in tool_parsers if written.read_by(get_parser(name))), None)


def require_parser(chat: ChatTemplate, name: str, parser: ToolParser) -> str | None:
    """Check at start that the parser fits the template.

    Args:
        name: as configured.
        parser: made from it.

    Returns:
        A note for the user where something may be wrong; None where nothing is, and for grammars that a prompt teaches
        and no template writes (ReAct, Search-R1).

    Raises:
        TemplateError: a registered parser cannot read this template's calls, and another one can.
    """
    written = written_call(chat)
    if written is None or parser.calls_in_content or written.read_by(parser):
        return None
    fitting = suggest_parser(chat)
    key = "actor_rollout_ref.rollout.multi_turn.tool_parser"
    problem = f"{key}={name} cannot read the tool calls that this chat template writes: {written.text[:160]!r}."
    if fitting is None:
        return f"{problem} No parser that comes with verl_mt can; set it to your parser for this model"
    if not is_registered(name):
        return f"{problem} {fitting} can"
    raise TemplateError(
        f"{problem} {fitting} can: set {key}={fitting}. If your prompts teach the model the form of {name}, give the "
        f"parser as a dotted path ({_path_of(type(parser))}). Then this is only a note"
    )


def _model_text(chat: ChatTemplate, text: str) -> str:
    """`text` up to its end of turn, without white space behind it."""
    ids = chat.encode_text(text, neutral=False)
    ends = [place for place, token in enumerate(ids) if token in chat.end_token_ids]
    return chat.decode(ids[: ends[-1]] if ends else ids).rstrip()


__all__ = ["WrittenCall", "require_parser", "suggest_parser", "written_call"]


def _path_of(kind: type) -> str:
    """The path that a configuration may give; a shipped parser is named by its package, not by its family's file."""
    room = "verl_mt.chat.parsers"
    module = room if kind.__module__.startswith(f"{room}.") else kind.__module__
    return f"{module}.{kind.__qualname__}"
