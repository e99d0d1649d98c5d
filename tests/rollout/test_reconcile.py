"""What somebody else believes of a conversation, and where that is in the record."""

from __future__ import annotations

import pytest

from verl_mt.data.trajectory import TrajectoryRecord
from verl_mt.errors import LedgerError
from verl_mt.extensions.compat.generate.align import align


def decode(ids) -> str:
    return "".join(chr(i) for i in ids)


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def record_of(prompt: str, *turns: str) -> TrajectoryRecord:
    """Prompt, then sampled turns and observations in turn."""
    record = TrajectoryRecord()
    record.append_given(ids(prompt), kind="prompt", turn=0)
    for k, text in enumerate(turns):
        if k % 2:
            record.append_given(ids(text), kind="observation", turn=k)
        else:
            record.append_sampled(ids(text), [-1.0] * len(text), [0] * len(text), turn=k + 1)
    return record


def test_tokens_as_recorded_are_found_place_by_place():
    record = record_of("p", "ab", "-", "cd")
    found = align(ids("pab-cd"), record, decode)
    assert found.places == [0, 1, 2, 3, 4, 5] and found.used == 6


def test_an_observation_in_other_ids_is_found_by_its_text_and_what_follows_it():
    record = record_of("p", "ab", "xx", "cd")
    wide = {1: "xx"}
    found = align([*ids("pab"), 1, *ids("cd"), 7], record, lambda i: "".join(wide.get(t, chr(t)) for t in i))
    assert found.places == [0, 1, 2, None, None, 4, 5] and found.used == 6


def test_of_the_last_turn_a_beginning_is_enough_where_the_rest_is_not_wanted():
    record = record_of("p", "ab", "-", "cdef")
    found = align(ids("pab-cd"), record, decode)
    assert found.places == [0, 1, 2, 3, 4, 5]
    assert align(ids("pab-cdxx"), record, decode, wanted=[1, 1, 0, 1, 1, 0, 0]).used == 6
    for wanted in (None, [1, 1, 0, 1, 1, 0, 1]):
        with pytest.raises(LedgerError, match=r"sample.tokens\[6\] is 120 \('x'\), but the engine sampled 101"):
            align(ids("pab-cdxx"), record, decode, wanted=wanted)


def test_an_earlier_turn_must_be_whole():
    record = record_of("p", "ab", "-", "cd")
    with pytest.raises(LedgerError, match=r"tokens\[2\] is 45 \('-'\), but the engine sampled 98"):
        align(ids("pa-cd"), record, decode, wanted=[1, 0, 1, 1])


def test_an_image_is_one_placeholder_for_a_tokenizer_and_many_for_the_engine():
    record = record_of("p<###>q", "ab")
    with pytest.raises(LedgerError, match="the text there is not the same"):
        align(ids("p<#>qab"), record, decode)
    record.media = [object()]  # type: ignore[list-item]
    found = align(ids("p<#>qab"), record, decode)
    assert found.places == [None] * 7 + [5, 6] and found.used == 7
