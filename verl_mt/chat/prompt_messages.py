"""The messages of a prompt in its rendering: that each leaves a trace, and which tokens are an assistant's.

Templates write what they know and pass over the rest: Qwen's pass over a message of the role `human`, so that the
question is gone and the run trains on prompts without one. What a template leaves out of old turns on purpose
(reasoning, an empty system message) has no text here, or another part that is shown.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from verl_mt.chat.differences import common_prefix
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.conversation import Message
from verl_mt.errors import TemplateError
from verl_mt.plugins import suggest

_ROLES = ("system", "user", "assistant", "tool")
_MEANT = {
    "human": "user", "prompter": "user", "question": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant",
    "chatgpt": "assistant", "model": "assistant", "developer": "system", "function": "tool", "observation": "tool",
    "ipython": "tool", "tool_response": "tool",
}  # fmt: skip
"""Roles of other formats (ShareGPT, Gemini, the old functions of OpenAI)."""
_MARKER = "Zqxjktrace{}zq"

_SEEN: weakref.WeakKeyDictionary[ChatTemplate, set[Any]] = weakref.WeakKeyDictionary()
"""Shapes of conversations of which the template shows every message."""


def require_traces(chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
    """Refuse a prompt of which the template writes a message nowhere.

    One more rendering for each new order of roles; what was seen to be shown is not looked at again.

    Raises:
        TemplateError: names the message, its role and its text.
    """
    shape = (bool(tools), *((m.get("role"), bool(m.get("tool_calls")), _has_text(m)) for m in messages))
    seen = _SEEN.setdefault(chat, set())
    if shape in seen:
        return
    for index in _unmarked(chat, messages, tools):
        if _is_dropped(chat, messages, index, tools):
            role, text = str(messages[index].get("role")), _text(messages[index])
            hint = suggest(role, _ROLES) if role not in _MEANT else f"; did you mean {_MEANT[role]!r}?"
            raise TemplateError(
                f"message {index + 1} (role {role!r}) leaves no trace in the prompt: the chat template writes nothing "
                f"for it, so the model would never see {text[:60]!r}{'' if role in _ROLES else hint}. Give it a role "
                "and a place that the template shows, or give actor_rollout_ref.model.custom_chat_template",
                cause="P16",
            )
    seen.add(shape)


def _unmarked(chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
    """Messages whose text a rendering with a marker in each does not show."""
    # Beside tool calls templates may leave the text out; the message is seen by its calls.
    checked = [i for i, m in enumerate(messages) if _has_text(m) and not m.get("tool_calls")]
    marked = [_marked(m, i) if i in checked else m for i, m in enumerate(messages)]
    try:
        text = chat.full_text(marked, tools, add_generation_prompt=True)
    except TemplateError:
        return checked
    return [i for i in checked if _MARKER.format(i) not in text]


def _is_dropped(chat: ChatTemplate, messages: Sequence[Message], index: int, tools: Sequence[Any] | None) -> bool:
    """Whether the prompt is the same whatever the message says."""
    other = [_marked(m, i) if i == index else m for i, m in enumerate(messages)]
    try:
        changed = chat.full_text(other, tools, add_generation_prompt=True)
    except TemplateError:
        return False
    return changed == chat.full_text(messages, tools, add_generation_prompt=True)


def _has_text(message: Message) -> bool:
    return bool(_text(message).strip())


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(p.get("text") or "") for p in content if isinstance(p, dict) and p.get("type") == "text")
    return content if isinstance(content, str) else ""


def _marked(message: Message, index: int) -> Message:
    """The same message with a marker in the place of its text."""
    marker, content = _MARKER.format(index), message["content"]
    if isinstance(content, list):
        content = [{**p, "text": marker} if isinstance(p, dict) and p.get("type") == "text" else p for p in content]
    else:
        content = marker
    return {**message, "content": content}


def assistant_spans(
    chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None, prompt_ids: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """Place of an assistant message -> half-open range of its tokens: its words and its end of turn.

    Role headers and separators are not in it: nothing of them would have been sampled.

    Args:
        prompt_ids: of all messages, as recorded.

    Raises:
        TemplateError: the template writes a message in another way once others follow it, so that its ids in the
            prompt are not known.
    """
    spans: dict[int, tuple[int, int]] = {}
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.prompt_ids(messages[:place], tools) if place else []
        after = chat.prompt_ids(messages[: place + 1], tools, add_generation_prompt=False)
        start = common_prefix(before, after)
        ends = [k for k in range(start, len(after)) if after[k] in chat.end_token_ids]
        end = ends[-1] + 1 if ends else len(after)
        if list(prompt_ids[:end]) != after[:end]:
            raise TemplateError(
                f"message {place} of the prompt is written in another way once others follow it, so its tokens cannot "
                "be found. Switch multi_turn.train_prompt_assistants off, or give a custom_chat_template that keeps "
                "earlier turns as they are"
            )
        spans[place] = (start, end)
    return spans
