"""The report on one template: what it can render, and what the sanity check says about sample conversations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_mt.chat import ChatTemplate, replay
from verl_mt.chat.differences import without_empty_reasoning
from verl_mt.chat.parser_fit import suggest_parser
from verl_mt.chat.sanity import SanityMode, check
from verl_mt.chat.text_delta import turn_ids
from verl_mt.data.conversation import Message
from verl_mt.errors import TemplateError

SHAPES = (
    "prompt",
    "no_tools",
    "system",
    "user_turn",
    "tools",
    "tool_call",
    "parallel_calls",
    "text_with_call",
    "tool_result",
)
"""Shapes of conversation, in the order of the report."""


@dataclass(frozen=True)
class SampleResult:
    """What the sanity check says about one sample conversation."""

    name: str
    verdict: str
    """`clean`, the causes of the mismatches, or `refused`."""
    detail: str = ""
    """Each mismatch as `token N: recorded -> rendered`, or why the conversation is refused."""


@dataclass(frozen=True)
class Report:
    """Everything that the command prints."""

    model: str
    facts: dict[str, Any]
    shapes: dict[str, dict[str, str] | None]
    """None: the shape can be rendered; else `cause` (the pitfall's number) and `text`."""
    samples: list[SampleResult]

    def to_row(self) -> dict[str, Any]:
        """The object that `--json` writes."""
        return asdict(self)


def build_report(chat: ChatTemplate, model: str) -> Report:
    """Probe the template and run the sample conversations.

    Raises:
        TemplateError: the template cannot render a single user message.
    """
    can = chat.capabilities
    facts = {
        "append_only": can.append_only,
        "rewritten": can.rewritten,
        "rewrites_calls": can.rewrites_calls,
        "rewrites_prompt": can.rewrites_prompt,
        "drops_reasoning": can.drops_reasoning,
        "reasoning_content": can.reasoning_content,
        "prefilled_reasoning": chat.prefilled_reasoning,
        "roles": sorted(can.roles),
        "call_arguments": can.arguments,
        "tool_parser": _tool_parser(chat),
        "merges_tool_messages": can.merges_tool_messages,
        "uses_clock": can.uses_clock,
        "generation_prompt": chat.generation_prompt_text,
        "end_tokens": [chat.decode([token]) for token in sorted(chat.end_token_ids)],
    }
    problems = {name: {"cause": p.cause, "text": p.text} for name, p in can.problems.items()}
    names = [*SHAPES, *(name for name in problems if name not in SHAPES)]
    samples = [
        _run_sample(chat, name, prompt, tools, turns) for name, prompt, tools, turns in sample_conversations(chat)
    ]
    return Report(model, facts, {name: problems.get(name) for name in names}, samples)


def _tool_parser(chat: ChatTemplate) -> str:
    """Which parser reads what a model with this template writes."""
    name = suggest_parser(chat)
    if name is not None:
        return f"{name} (suggested)"
    return "none fits its calls" if chat.capabilities.tool_calls else "not known: it writes no calls"


Turns = Sequence[Message]


def sample_conversations(chat: ChatTemplate) -> list[tuple[str, list[Message], list[dict[str, Any]] | None, Turns]]:
    """`(name, prompt, tools, turns)`: small conversations of the kinds that rollouts produce."""
    asks: list[Message] = [{"role": "user", "content": "What is 17 * 3?"}]
    again: Message = {"role": "user", "content": "Are you sure?"}
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": "17 * 3"}},
    }
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer: Message = {"role": "tool", "content": "51", "tool_call_id": "call00001", "name": "calculator"}
    first, last = {"role": "assistant", "content": "It is 51."}, {"role": "assistant", "content": "Yes, 51."}
    return [
        ("two plain turns", asks, None, [first, again, last]),
        ("reasoning, then a user turn", asks, None, [_reasoned(chat, "It is 51."), again, _reasoned(chat, "Yes.")]),
        ("white space around a turn", asks, None, [{"role": "assistant", "content": " \n51.\n"}, again, last]),
        ("a tool call", asks, [_CALCULATOR], [calls, answer, first]),
        ("a tool call, then a user turn", asks, [_CALCULATOR], [calls, answer, first, again, last]),
        (
            "a tool result that holds control text",
            asks,
            [_CALCULATOR],
            [calls, {**answer, "content": _hostile(chat)}, first],
        ),
    ]


_MARKER = "Zqxjkvturn"
_CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression."}},
            "required": ["expression"],
        },
    },
}


def _reasoned(chat: ChatTemplate, text: str) -> Message:
    """A turn with reasoning, as the rollout writes it down: raw where the template ignores `reasoning_content`."""
    opening = "" if chat.prefilled_reasoning else "<think>\n"
    return {"role": "assistant", "content": f"{opening}Seventeen times three.\n</think>\n\n{text}"}


def _hostile(chat: ChatTemplate) -> str:
    ends = [chat.decode([token]) for token in sorted(chat.end_token_ids)]
    return f"51{ends[0] if ends else ''} and more"


def _model_ids(
    chat: ChatTemplate, history: list[Message], message: Message, tools: list[dict[str, Any]] | None
) -> list[int]:
    """What a model would sample for this turn: what it opens every turn with, the words of the message, its end.

    Raises:
        TemplateError: the template cannot write the turn.
    """
    if chat.prefilled_reasoning:
        text = _calls_text(chat, history, message, tools) if message.get("tool_calls") else message["content"]
        closing = "" if "</think>" in text else "</think>\n\n"
        return turn_ids(chat, history, {"role": "assistant", "content": closing + text}, tools=tools)
    if message.get("tool_calls"):
        return turn_ids(chat, history, message, tools=tools)
    marked: Message = {"role": "assistant", "content": _MARKER}
    written = without_empty_reasoning(chat.decode(turn_ids(chat, history, marked, tools=tools, raw=False)))
    opening = written.partition(_MARKER)[0] if _MARKER in written else ""
    return turn_ids(chat, history, {**message, "content": opening + message["content"]}, tools=tools)


def _calls_text(
    chat: ChatTemplate, history: list[Message], message: Message, tools: list[dict[str, Any]] | None
) -> str:
    """The calls of a turn as the template writes them behind a generation prompt that it does not show again."""
    prompt = chat.full_text(history, tools, add_generation_prompt=True)
    written = chat.full_text([*history, message], tools, add_generation_prompt=False)
    header = prompt[: prompt.rindex("<")]  # without the tag that opens the reasoning
    if not written.startswith(header):
        raise TemplateError("the template rewrites the prompt once a turn with tool calls is there", cause="P7")
    return chat.turn_text(chat.encode_text(written[len(header) :].rstrip(), neutral=False))


def _run_sample(
    chat: ChatTemplate, name: str, prompt: list[Message], tools: list[dict[str, Any]] | None, turns: Turns
) -> SampleResult:
    history, steps = list(prompt), []
    try:
        for message in turns:
            if message["role"] == "assistant":
                steps.append({"type": "sample", "ids": _model_ids(chat, history, message, tools), "message": message})
            else:
                steps.append({"type": "env", "messages": [message]})
            history.append(message)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a turn without an end of its own is part of the verdict below
            token_ids, mask = replay(chat, prompt, tools, steps)
    except TemplateError as error:
        return SampleResult(name, "refused", str(error))
    finding = check(chat, messages=history, tools=tools, token_ids=token_ids, sampled=mask, mode=SanityMode.STRICT)
    if finding is None:
        return SampleResult(name, "clean")
    places = dict.fromkeys(f"token {span.start}: {span.recorded!r} -> {span.rendered!r}" for span in finding.spans)
    return SampleResult(name, ", ".join(cause.value for cause in finding.causes), "\n".join(places))


def print_report(report: Report, console: Console | None = None) -> None:
    """Print it as tables."""
    console = console or Console(highlight=False)
    facts = Table(title=f"Chat template of {report.model}", title_justify="left", show_header=False)
    for key, value in report.facts.items():
        facts.add_row(key.replace("_", " "), _plain(value))
    console.print(facts)
    shapes = Table("shape", "rendered", "cause", "what happens", title="Conversations", title_justify="left")
    for name, problem in report.shapes.items():
        if problem is None:
            shapes.add_row(name.replace("_", " "), "yes", "", "")
        else:
            shapes.add_row(name.replace("_", " "), "REFUSED", problem["cause"], escape(problem["text"]), style="red")
    console.print(shapes)
    samples = Table(
        "conversation", "verdict", "recorded -> rendered", title="Sanity check (strict)", title_justify="left"
    )
    for sample in report.samples:
        style = None if sample.verdict == "clean" else "yellow"
        samples.add_row(sample.name, sample.verdict, escape(sample.detail), style=style)
    console.print(samples)
    console.print("Every cause is explained in docs/multiturn.md.")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return escape(", ".join(map(repr, value) if value and "<" in str(value) else map(str, value)))
    return escape(repr(value) if isinstance(value, str) and ("\n" in value or "<" in value) else str(value))
