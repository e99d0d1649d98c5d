"""The text of a token id, as a person should see it."""

from __future__ import annotations

import pytest

from verl_mt.chat.display import token_text


class Pieces:
    """A tokenizer of given pieces."""

    def __init__(self, pieces: dict[int, str], texts: dict[int, str]):
        self._pieces, self._texts = pieces, texts

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self._pieces.get(token_id)

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self._texts[i] for i in ids)


@pytest.mark.parametrize(
    ("piece", "decoded", "shown"),
    [
        ("Ġthe", " the", " the"),
        ("âľ", "\ufffd", "⟨E2 9C⟩"),
        ("<0xE2>", "\ufffd", "⟨E2⟩"),
        ("▁word", "word", " word"),
        ("▁word", " word", " word"),
        ("<|im_end|>", "<|im_end|>", "<|im_end|>"),
    ],
)
def test_a_piece_is_shown_with_its_space_and_with_bytes_where_it_is_no_character(piece, decoded, shown):
    assert token_text(Pieces({7: piece}, {7: decoded}), 7) == shown


def test_an_id_without_a_piece_says_so():
    assert token_text(Pieces({}, {}), 151999) == "⟨id 151999⟩"
