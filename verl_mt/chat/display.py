"""Tokens for a person's eyes: a stream with what is trained on in colour, and the exact text of one token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from verl_mt.chat.full_rendering import text_between

if TYPE_CHECKING:
    from verl_mt.chat.template import ChatTemplate

TRAINED = "bold green"
GIVEN = "dim"
_REPLACEMENT = "\ufffd"
_WORD_START = "\u2581"


def render_tokens(chat: ChatTemplate, token_ids: Sequence[int], loss_mask: Sequence[int]) -> Text:
    """The text of a stream, trained tokens in colour.

    Args:
        chat: decodes the ids; control tokens are shown.
        token_ids, loss_mask: columns of one record, shape (T,).

    Raises:
        ValueError: the two have different lengths.
    """
    if len(token_ids) != len(loss_mask):
        raise ValueError(f"{len(token_ids)} token ids came with {len(loss_mask)} mask bits. The lengths must be equal")
    text, start = Text(), 0
    for trained, run in itertools.groupby(bool(bit) for bit in loss_mask):
        end = start + len(list(run))
        text.append(text_between(chat, token_ids, start, end), style=TRAINED if trained else GIVEN)
        start = end
    return text


def legend() -> Text:
    """One line that explains the colours."""
    return Text.assemble(("trained on", TRAINED), "  ", ("not sampled: prompt, tools, separators", GIVEN))


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of one token, control tokens included.

    Part of a character has no text: its bytes stand there instead, such as `⟨E2 9C⟩`. An id that the tokenizer does not
    know is `⟨id 12345⟩`.

    Args:
        tokenizer: of transformers.
        token_id: any id; models have more than their tokenizers name.
    """
    token_id = int(token_id)  # numpy's integers are no ids to a tokenizer
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if piece is None:
        return f"⟨id {token_id}⟩"
    text = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if _REPLACEMENT in text:
        raw = _bytes_of(piece)
        return text if raw is None else "⟨" + raw.hex(" ").upper() + "⟩"
    # sentencepiece drops the space of a first word.
    if piece.startswith(_WORD_START) and not text.startswith(" "):
        return " " + text
    return text


def _bytes_of(piece: str) -> bytes | None:
    """The bytes that a piece of a byte-level vocabulary, or a byte piece (`<0xE2>`) of another, stands for."""
    if piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:
        return bytes.fromhex(piece[3:-1])
    table = _byte_table()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else None


def _byte_table() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable bytes stand for themselves, the rest from U+0100 on (Radford et
    al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + k): b for k, b in enumerate(rest)}
