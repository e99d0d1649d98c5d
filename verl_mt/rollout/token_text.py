"""Which token ids spell a known beginning of their text.

A character may be spread over several tokens. Decoded up to its middle, it shows as stand-ins (U+FFFD) that the whole
text does not have, and some tokenizers (byte fallback) then show the finished characters before it as stand-ins too.
So texts of cut ids are compared without the stand-ins at their end, and a cut is never made inside a character.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_STAND_IN = "\ufffd"


def num_tokens_spelling(decode: Decode, ids: Sequence[int], text: str) -> int:
    """The largest number of leading ids whose whole text `text` begins with."""
    if text.startswith(decode(ids)):
        return len(ids)

    def goes_beyond(count: int) -> bool:
        return not text.startswith(decode(ids[:count]).rstrip(_STAND_IN))

    # No count up to the one that is wanted goes beyond; after it, one may again not, in the middle of a character. So
    # the bisection ends on the wanted count or behind it, and the way back to it is as long as one run of such tokens.
    count = bisect_left(range(len(ids)), True, key=goes_beyond)
    count = max(count - 1, 0)
    while not text.startswith(decode(ids[:count])):
        count -= 1
    if _STAND_IN in text:
        # Bytes that are no text take finished characters before them along, so that a count can go beyond and a larger
        # one not: each has to be looked at.
        further = (more for more in range(len(ids) - 1, count, -1) if text.startswith(decode(ids[:more])))
        return next(further, count)
    return count


def first_token_at(decode: Decode, ids: Sequence[int], character: int) -> int:
    """The first token that begins at or behind a character of the ids' text; `len(ids)` where there is none."""
    text = decode(ids)[:character]
    place = num_tokens_spelling(decode, ids, text)
    if decode(ids[:place]) == text:
        while place and decode(ids[: place - 1]) == text:  # tokens without text belong to what follows them
            place -= 1
        return place
    # A token reaches over the edge: it belongs to what it begins in, and so does the rest of a character begun in it.
    while place < len(ids) and len(decode(ids[:place]).rstrip(_STAND_IN)) < character:
        place += 1
    return place
