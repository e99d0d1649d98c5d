"""What the command shows: the report on one template, or conversations of a file, replayed to ids and mask.

The report says what the template can render, and what the sanity check says about sample conversations.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from verl_mt.chat import ChatTemplate, replay
from verl_mt.chat.differences import without_empty_reasoning
from verl_mt.chat.display import legend, render_tokens
from verl_mt.chat.parser_fit import suggest_parser
from verl_mt.chat.sanity import SanityMode, check, warning_text
from verl_mt.chat.text_delta import turn_ids
from verl_mt.data.conversation import Message
from verl_mt.errors import DataError, TemplateError, VerlMTError

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


@dataclass(frozen=True)
class FileLine:
    """One line of the file."""

    where: str
    """`FILE:LINE`, for errors."""
    prompt: list[Message]
    tools: list[dict[str, Any]] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Replayed:
    """A conversation as ids; `token_ids` and `loss_mask` have the same length."""

    conversation: FileLine
    chat: ChatTemplate
    token_ids: list[int]
    loss_mask: list[int]
    warnings: list[str]

    def to_row(self) -> dict[str, Any]:
        """The line that `--json` writes."""
        return {"token_ids": self.token_ids, "loss_mask": self.loss_mask, "warnings": self.warnings}


def read_conversations(path: str | Path) -> list[FileLine]:
    """All lines of a JSONL file; blank ones are skipped. All are read before the first is used.

    Raises:
        DataError: no such file, an empty one, or a bad line; names file and line.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--conversations: {str(path)!r} cannot be read: {error}") from error
    found = [_conversation(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"--conversations: {str(path)!r} holds no line")
    return found


def _conversation(line: str, where: str) -> FileLine:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object with prompt, tools, steps, template_kwargs. Got {line[:80]}")
    prompt = _field(row, "prompt", where, _is_messages, "a list of messages with at least one, each with a role")
    tools = _field(row, "tools", where, _is_tools, "a list of tool schemas, or null")
    steps = _field(row, "steps", where, _is_objects, "a list of steps, each an object with a type")
    kwargs = _field(row, "template_kwargs", where, lambda v: v is None or isinstance(v, dict), "an object, or null")
    for index, step in enumerate(steps or []):
        _check_step(step, f"{where}: steps[{index}]")
    return FileLine(where, prompt, tools, steps or [], kwargs)


def _field(row: dict[str, Any], key: str, where: str, fits: Callable[[Any], bool], wanted: str) -> Any:
    value = row.get(key)
    if not fits(value):
        raise DataError(f"{where}: {key}: expected {wanted}. Got {json.dumps(value, ensure_ascii=False)[:80]}")
    return value


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(m) for m in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _is_tools(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value))


def _is_objects(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def _check_step(step: dict[str, Any], where: str) -> None:
    kind = step.get("type")
    if kind == "sample":
        ids = step.get("ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise DataError(f"{where}: a sample needs ids, a list of token ids. Got {json.dumps(ids)[:80]}")
        if step.get("message") is not None and not _is_message(step["message"]):
            raise DataError(f"{where}: message: expected a message with a role. Got {json.dumps(step['message'])[:80]}")
    elif kind == "env":
        if not _is_messages(step.get("messages")):
            raise DataError(
                f"{where}: env needs messages, a list with at least one. Got {json.dumps(step.get('messages'))[:80]}"
            )
    else:
        raise DataError(f"{where}: type: expected sample or env, got {json.dumps(kind)[:80]}")


def replay_line(chat: ChatTemplate, conversation: FileLine) -> Replayed:
    """Ids, mask, and everything that there is to say about them (the sanity check in strict mode included).

    Raises:
        DataError: this conversation cannot be rendered, or holds ids that the tokenizer does not have.
    """
    kwargs = conversation.template_kwargs
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            own = chat.with_kwargs({**chat.template_kwargs, **kwargs}) if kwargs else chat
            _check_ids(own, conversation)
            token_ids, loss_mask = replay(own, conversation.prompt, conversation.tools, conversation.steps)
            said = [str(w.message) for w in caught]
    except VerlMTError as error:
        raise DataError(f"{conversation.where}: {error}") from error
    messages = _messages(own, conversation)
    finding = check(
        own,
        messages=messages,
        tools=conversation.tools,
        token_ids=token_ids,
        sampled=loss_mask,
        mode=SanityMode.STRICT,
        stop_length=True,
    )
    said += [] if finding is None else [warning_text(finding, cause) for cause in finding.causes]
    return Replayed(conversation, own, token_ids, loss_mask, said)


def _check_ids(chat: ChatTemplate, conversation: FileLine) -> None:
    size = len(chat.tokenizer)
    for index, step in enumerate(conversation.steps):
        odd = [i for i in step.get("ids", ()) if i >= size] if step["type"] == "sample" else []
        if odd:
            raise DataError(f"steps[{index}]: id {odd[0]} is not in the vocabulary, which has {size} ids")


def _messages(chat: ChatTemplate, conversation: FileLine) -> list[Message]:
    messages = list(conversation.prompt)
    for step in conversation.steps:
        if step["type"] == "env":
            messages += step["messages"]
        else:
            messages.append(step.get("message") or {"role": "assistant", "content": chat.turn_text(step["ids"])})
    return messages


def show(result: Replayed, console: Console | None = None) -> None:
    """Print a conversation, trained tokens in colour, warnings below."""
    console = console or Console(highlight=False)
    trained, total = sum(result.loss_mask), len(result.loss_mask)
    console.print(Rule(f"{trained} of {total} tokens are trained on"))
    console.print(result.conversation.where, legend(), sep="   ", soft_wrap=True, markup=False)
    console.print(render_tokens(result.chat, result.token_ids, result.loss_mask), soft_wrap=True)
    for text in result.warnings:
        console.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)
