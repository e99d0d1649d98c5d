"""The text of a token id, as a person should see it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from verl_mt.chat import display
from verl_mt.chat.display import token_text
from verl_mt.chat.full_rendering import text_between


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


def test_bytes_of_a_byte_level_vocabulary_are_those_of_gpt_2():
    table = display._byte_table()
    assert sorted(table.values()) == list(range(256))
    assert [table[c] for c in "!~¡¬®ÿ"] == [0x21, 0x7E, 0xA1, 0xAC, 0xAE, 0xFF]
    assert [table[c] for c in "ĀĠġĢłŃ"] == [0x00, 0x20, 0x7F, 0x80, 0xA0, 0xAD]
    assert display._bytes_of("<0xFF>") == b"\xff" and display._bytes_of("Ġa") == b" a"
    assert display._bytes_of("<0xFFF>") == b"<0xFFF>" and display._bytes_of("a<0xFF>") == b"a<0xFF>"
    assert display._bytes_of("▁a") is None and display._bytes_of("<0x41") == b"<0x41"


def test_a_token_is_decoded_as_it_is_and_numpy_ids_are_ids():
    asked = []

    class Spy(Pieces):
        def decode(self, ids, **keys):
            asked.append((ids, keys))
            return super().decode(ids)

    assert token_text(Spy({7: "▁x▁"}, {7: "\ufffd"}), np.int64(7)) == "\ufffd"
    assert asked == [([7], {"skip_special_tokens": False, "clean_up_tokenization_spaces": False})]
    assert type(asked[0][0][0]) is int


def test_a_stream_is_shown_with_its_trained_runs_in_colour():
    ids, mask = [5, 6, 7, 8], [0, 1, 1, 0]
    chat = SimpleNamespace(decode=lambda some: "".join("abcd"[i - 5] for i in some))
    shown = display.render_tokens(chat, ids, mask)
    assert shown.plain == "abcd"
    assert [(s.start, s.end, s.style) for s in shown.spans] == [(0, 1, "dim"), (1, 3, "bold green"), (3, 4, "dim")]
    assert display.legend().plain == "trained on  not sampled: prompt, tools, separators"
    with pytest.raises(ValueError, match=r"^4 token ids came with 3 mask bits"):
        display.render_tokens(chat, ids, mask[:3])


def test_a_text_is_decoded_behind_the_token_before_it():
    """As sentencepiece: a space at the beginning of a text is lost."""
    words = {1: " a", 2: " b", 3: "c"}
    chat = SimpleNamespace(decode=lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert [text_between(chat, [1, 2, 3], *span) for span in ((0, 2), (1, 3), (2, 3), (1, 1), (0, 0))] == [
        "a b", " bc", "c", "", "",
    ]  # fmt: skip
    assert text_between(chat, [1, 2], 1, 2, lambda token: "a") == " b"
    assert text_between(chat, [1, 2], 1, 2, lambda token: "zz") == "b"
    assert text_between(chat, [3, 1], 1, 2, lambda token: " a") == "a"
