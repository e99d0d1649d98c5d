"""A cut of token ids never falls inside a character, whatever bytes a vocabulary makes tokens of."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_data import SHARED_DATA
from tables import before_release
from transformers import AutoTokenizer

from verl_mt.rollout.token_text import first_token_at, num_tokens_spelling

NAMES = ("qwen3", before_release("llama3.1"), before_release("gpt-oss"), "mistral-7b-v3", before_release("phi-3-mini"))
PIECES = ("a", " b", "the ", "東", "京", "🙂", "é", "\n", "  ", "€", "日本", "<think>", "𝕏", "한", "\ufffd")


@functools.cache
def decode_and_encode(name: str):
    if not (folder := SHARED_DATA / "tokenizers" / name).is_dir():
        pytest.skip(f"no tokenizer {folder}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return (
        functools.partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        functools.partial(tokenizer.encode, add_special_tokens=False),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_of_several_counts_that_spell_a_beginning_the_largest_is_taken(name, data):
    decode, encode = decode_and_encode(name)
    pieces = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
    ids = [i for text in data.draw(st.lists(pieces, max_size=4)) for i in encode(text)]
    if ids and data.draw(st.booleans()):  # half of a character somewhere
        del ids[data.draw(st.integers(0, len(ids) - 1))]
    full = decode(ids)
    character = data.draw(st.integers(0, len(full)))
    wanted = full[:character] + data.draw(st.sampled_from(("", "x", "東", "\ufffd")))
    texts = [decode(ids[:k]) for k in range(len(ids) + 1)]
    assert num_tokens_spelling(decode, ids, wanted) == max(k for k, text in enumerate(texts) if wanted.startswith(text))

    place, reached = first_token_at(decode, ids, character), [len(text.rstrip("\ufffd")) for text in texts]
    if place < len(ids):  # all before the character is in front of it, and nothing smaller does
        assert texts[place] == full[:character] or reached[place] >= character
    assert all(texts[k] != full[:character] and reached[k] < character for k in range(place))


def phi3_bytes(ids) -> str:
    """Bytes as Phi-3's and Mistral's vocabularies show them: a run of bytes that ends inside a character is stand-ins
    altogether, the finished characters in it too."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


def test_a_character_of_several_bytes_is_kept_whole_or_not_at_all():
    ids = list("€🙂x".encode())
    assert num_tokens_spelling(phi3_bytes, ids, "€🙂y") == 7
    assert num_tokens_spelling(phi3_bytes, ids, "€ and more") == 3
    assert num_tokens_spelling(phi3_bytes, ids, "x") == 0
    assert [first_token_at(phi3_bytes, ids, k) for k in range(4)] == [0, 3, 7, 8]


def test_bytes_that_are_no_text_take_a_finished_character_along():
    ids = [*"𝕏".encode(), *"𝕏".encode()[1:]]
    assert [phi3_bytes(ids[:k]) for k in (4, 5)] == ["𝕏", "\ufffd" * 5]
    assert num_tokens_spelling(phi3_bytes, ids, "\ufffd" * 5 + "x") == 5
    assert num_tokens_spelling(phi3_bytes, ids, "𝕏 and more") == 4
