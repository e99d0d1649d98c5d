"""What a recorded stream is compared with: the whole conversation as its template writes it.

Two things are recorded that no finished conversation shows, and that no template is to blame for: reasoning that the
generation prompt opened for the last turn, and a prompt that was cut to fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_mt.chat.differences import common_prefix
from verl_mt.chat.probe import REASONING
from verl_mt.data.conversation import Message

if TYPE_CHECKING:
    from verl_mt.chat.template import ChatTemplate


def sampled_runs(sampled: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of adjacent sampled tokens, in order: the sampled turns of a record."""
    return [run.span() for run in re.finditer(b"\x01+", bytes(map(bool, sampled)))]


def text_between(
    chat: ChatTemplate, ids: Sequence[int], start: int, end: int, token_text: Callable[[int], str] | None = None
) -> str:
    """Text of `ids[start:end]`, decoded behind the token before it: sentencepiece drops a leading space otherwise.

    `token_text`: text of one id, where a caller remembers those.
    """
    before = ids[start - 1 : start] if start else []
    anchor = token_text(before[0]) if token_text and before else chat.decode(before) if before else ""
    text = chat.decode(ids[max(start - 1, 0) : end])
    return text[len(anchor) :] if text.startswith(anchor) else chat.decode(ids[start:end])


def full_rendering(
    chat: ChatTemplate,
    turns: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    *,
    recorded: Sequence[int],
    sampled: Sequence[int],
) -> list[int]:
    """Ids of the whole conversation, the last turn behind the generation prompt that it was sampled behind.

    A generation prompt that ends in `<think>` (QwQ, R1) stands in no finished turn, and such templates write no
    reasoning either. Nothing ever reads the last turn in that form: its reasoning is taken as it was sampled, the rest
    as the template writes it. Earlier turns are what the template makes of them, for that is what a model reads next.

    Args:
        turns: messages, the last one being the last assistant message.
        recorded, sampled: the record's columns up to the last sampled token.

    Raises:
        Exception: whatever the template raises.
    """
    finished = list(chat.full_ids(turns, tools))
    if not chat.prefilled_reasoning:
        return finished
    prompt = chat.generation_prompt_text
    opening, closing = max(REASONING, key=lambda tags: prompt.rfind(tags[0]))
    prefill = prompt[prompt.rindex(opening) :]
    text = chat.full_text(turns, tools)
    context = chat.full_text(turns[:-1], tools, add_generation_prompt=True)
    header = context.removesuffix(prefill)
    if text.startswith(context) or header == context or not text.startswith(header):
        return finished
    thought, rest = "", text[len(header) :]
    written = text_between(chat, recorded, *sampled_runs(sampled)[-1])
    if closing in written:
        thought, _ = _behind(written, closing)
        rest = _behind(rest, closing)[1].lstrip("\n")
    return list(chat.encode_text(context + thought + rest, neutral=False))


@dataclass(frozen=True)
class CutPrompt:
    """What is compared where the first prompt was cut to fit (`data.truncation`)."""

    rendered: list[int]
    """The full rendering with its prompt cut in the same way."""
    whole: list[int] | None
    """The prompt before it was cut; None where the finished conversation shows another prompt, so that `rendered`
    could not be cut and no difference in the prompt means anything."""


def cut_prompt(
    chat: ChatTemplate,
    turns: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    *,
    sampled: Sequence[int],
    recorded: Sequence[int],
    rendered: list[int],
) -> CutPrompt:
    """The full rendering `rendered`, cut where the recorded prompt was cut: the rest can be compared as usual.

    Raises:
        Exception: whatever the template raises.
    """
    runs = sampled_runs(sampled)
    kept = list(recorded[: runs[0][0]])
    turns_at = [i for i, m in enumerate(turns) if m.get("role") == "assistant"]
    if len(runs) > len(turns_at):
        return CutPrompt(rendered, None)
    whole = list(chat.full_ids(turns[: turns_at[-len(runs)]], tools, add_generation_prompt=True))
    shared = common_prefix(whole, rendered)
    # A prefilled `<think>` at the prompt's end is in no finished conversation.
    unshown = whole[shared:]
    if kept[len(kept) - len(unshown) :] != unshown:
        return CutPrompt(rendered, None)
    return CutPrompt(kept[: len(kept) - len(unshown)] + rendered[shared:], whole)


def _behind(text: str, tag: str) -> tuple[str, str]:
    """`text` cut in two behind the tag's first occurrence and its line breaks; all of it on the right without one."""
    at = text.find(tag)
    if at < 0:
        return "", text
    end = len(text) - len(text[at + len(tag) :].lstrip("\n"))
    return text[:end], text[end:]
