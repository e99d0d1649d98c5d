"""Stop strings are found at the token that completes them, as if the whole turn were decoded each time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.engines.stop_strings import StopStrings

# A byte-level vocabulary with some longer pieces, like real ones: characters may span tokens.
PIECES = [bytes([b]) for b in range(256)] + [b"ab", b"</s", b"stop", b"\xf0\x9f", b"\x98\x80x", "é".encode(), b""]


def decode(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", errors="replace")


def first_match(ids: list[int], stops: tuple[str, ...]) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in stops)), None)


interesting = st.sampled_from([*b"abst op</>x", *range(256, len(PIECES)), 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(interesting, max_size=30),
    stops=st.lists(st.sampled_from(["stop", "</s>", "a", "ba", "😀", "éx", "b st"]), min_size=1, max_size=3),
)
def test_stops_are_found_where_decoding_everything_would_find_them(ids, stops):
    watch = StopStrings(decode, tuple(stops))
    found = next((n for n, token in enumerate(ids, start=1) if watch.push(token)), None)
    assert found == first_match(ids, tuple(stops))


def test_the_cost_of_a_token_does_not_grow_with_the_turn():
    longest = 0

    def counting(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    watch = StopStrings(counting, ("never",))
    for token in [ord("a")] * 500 + [0xFF] * 500:
        assert not watch.push(token)
    assert longest < 30
