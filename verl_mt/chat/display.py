"""Token streams for a person's eyes: what the model wrote and is trained on, in colour; all else dim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from verl_mt.chat.template import ChatTemplate

TRAINED = "bold green"
GIVEN = "dim"


def render_tokens(chat: ChatTemplate, token_ids: Sequence[int], loss_mask: Sequence[int]) -> Text:
    """The text of a stream, trained tokens in colour.

    Args:
        chat: decodes the ids; control tokens are shown.
        token_ids, loss_mask: columns of one record, shape (T,).

    Raises:
        ValueError: the two have different lengths.
    """
    if len(token_ids) != len(loss_mask):
        raise ValueError(f"{len(token_ids)} token ids came with {len(loss_mask)} mask bits; the lengths must be equal")
    text, start = Text(), 0
    for trained, run in itertools.groupby(bool(bit) for bit in loss_mask):
        end = start + len(list(run))
        text.append(_decode_behind(chat, token_ids, start, end), style=TRAINED if trained else GIVEN)
        start = end
    return text


def legend() -> Text:
    """One line that explains the colours."""
    return Text.assemble(("trained on", TRAINED), "  ", ("given: prompt, tools, separators", GIVEN))


def _decode_behind(chat: ChatTemplate, token_ids: Sequence[int], start: int, end: int) -> str:
    """Decoded together with the token before it: sentencepiece drops a leading space otherwise."""
    before = chat.decode(list(token_ids[max(start - 1, 0) : start]))
    text = chat.decode(list(token_ids[max(start - 1, 0) : end]))
    return text[len(before) :] if text.startswith(before) else chat.decode(list(token_ids[start:end]))
