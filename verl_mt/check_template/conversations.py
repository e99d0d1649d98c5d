"""Conversations from a JSONL file, replayed to ids and mask."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule

from verl_mt.chat import ChatTemplate, replay
from verl_mt.chat.display import legend, render_tokens
from verl_mt.chat.sanity import SanityMode, check, warning_text
from verl_mt.data.conversation import Message
from verl_mt.errors import DataError, VerlMTError


@dataclass(frozen=True)
class Conversation:
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

    conversation: Conversation
    chat: ChatTemplate
    token_ids: list[int]
    loss_mask: list[int]
    warnings: list[str]

    def to_row(self) -> dict[str, Any]:
        """The line that `--json` writes."""
        return {"token_ids": self.token_ids, "loss_mask": self.loss_mask, "warnings": self.warnings}


def read_conversations(path: str | Path) -> list[Conversation]:
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


def _conversation(line: str, where: str) -> Conversation:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object with prompt, tools, steps, template_kwargs; got {line[:80]}")
    prompt = _field(row, "prompt", where, _is_messages, "a list of messages with at least one, each with a role")
    tools = _field(row, "tools", where, _is_tools, "a list of tool schemas, or null")
    steps = _field(row, "steps", where, _is_objects, "a list of steps, each an object with a type")
    kwargs = _field(row, "template_kwargs", where, lambda v: v is None or isinstance(v, dict), "an object, or null")
    for index, step in enumerate(steps or []):
        _check_step(step, f"{where}: steps[{index}]")
    return Conversation(where, prompt, tools, steps or [], kwargs)


def _field(row: dict[str, Any], key: str, where: str, fits: Callable[[Any], bool], wanted: str) -> Any:
    value = row.get(key)
    if not fits(value):
        raise DataError(f"{where}: {key}: expected {wanted}; got {json.dumps(value, ensure_ascii=False)[:80]}")
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
            raise DataError(f"{where}: a sample needs ids, a list of token ids; got {json.dumps(ids)[:80]}")
        if step.get("message") is not None and not _is_message(step["message"]):
            raise DataError(f"{where}: message: expected a message with a role; got {json.dumps(step['message'])[:80]}")
    elif kind == "env":
        if not _is_messages(step.get("messages")):
            raise DataError(
                f"{where}: env needs messages, a list with at least one; got {json.dumps(step.get('messages'))[:80]}"
            )
    else:
        raise DataError(f"{where}: type: expected sample or env, got {json.dumps(kind)[:80]}")


def replay_line(chat: ChatTemplate, conversation: Conversation) -> Replayed:
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


def _check_ids(chat: ChatTemplate, conversation: Conversation) -> None:
    size = len(chat.tokenizer)
    for index, step in enumerate(conversation.steps):
        odd = [i for i in step.get("ids", ()) if i >= size] if step["type"] == "sample" else []
        if odd:
            raise DataError(f"steps[{index}]: id {odd[0]} is not in the vocabulary, which has {size} ids")


def _messages(chat: ChatTemplate, conversation: Conversation) -> list[Message]:
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
