"""Where the assistant messages of a prompt stand among its ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_mt.chat.token_diff import common_prefix
from verl_mt.data.conversation import Message
from verl_mt.errors import TemplateError

if TYPE_CHECKING:
    from verl_mt.chat.template import ChatTemplate


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
                "be found; switch multi_turn.train_prompt_assistants off, or give a custom_chat_template that keeps "
                "earlier turns as they are"
            )
        spans[place] = (start, end)
    return spans
