"""Find the tokens of a record in a Sample that a generate function returned.

The record is the truth: what was sampled is never encoded again, whatever the function put into the Sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from verl_mt.chat.differences import common_prefix
from verl_mt.data.ledger import TrajectoryRecord, TurnSpan
from verl_mt.errors import LedgerError
from verl_mt.rollout.token_text import Decode


@dataclass(frozen=True)
class Alignment:
    """Where the tokens of a record are in a Sample."""

    places: list[int | None]
    """Per token of the record: its index in the tokens; None in text that they spell in other ids. Shorter than
    the record where they end inside the last turn."""
    used: int
    """How many of the tokens they are; the rest follows the last turn."""


def align(
    tokens: Sequence[int], record: TrajectoryRecord, decode: Decode, *, wanted: Sequence[int] | None = None
) -> Alignment:
    """Find a record in the tokens of a Sample. Of the last sampled turn they may hold a beginning only.

    Args:
        wanted: for each of the last `len(wanted)` tokens, whether it is to be trained; None = nobody says.

    Raises:
        LedgerError: names the first token that is another one.
    """
    bits = None if wanted is None or len(wanted) > len(tokens) else [0] * (len(tokens) - len(wanted)) + list(wanted)
    places: list[int | None] = []
    # The record is walked span by span, `at` the place in the tokens that the next one begins at. A sampled span must
    # be there id by id: its log-probs belong to these ids. Of a given span only the text must be there, for a function
    # may have encoded it in other pieces; the ids that the engine read stand.
    at, last = 0, max((k for k, span in enumerate(record.turns) if span.kind == "assistant"), default=-1)
    for number, span in enumerate(record.turns):
        ids = record.token_ids[span.start : span.end]
        here = list(tokens[at : at + len(ids)])
        if here == ids:
            places += range(at, at + len(ids))
            at += len(ids)
            continue
        if span.kind == "assistant":
            kept = common_prefix(here, ids)
            # What follows is the function's own where it says so; else it passes for the model's, and is not.
            more = any(bits[at + kept :]) if bits is not None else at + kept < len(tokens)
            if number == last and not more and (kept or any(record.sampled[: span.start])):
                return Alignment([*places, *range(at, at + kept)], at + kept)
            raise _differs(tokens, at, span, ids, decode)
        # A tokenizer writes one placeholder for an image of which the engine reads many.
        spelling = _squeezed(decode) if span.kind == "prompt" and record.media else decode
        width = _width_of_text(tokens, at, ids, _next_sampled(record, number), spelling)
        if width is None:
            raise _differs(tokens, at, span, ids, decode)
        places += [None] * len(ids)
        at += width
    return Alignment(places, at)


def _next_sampled(record: TrajectoryRecord, number: int) -> list[int]:
    """Ids of the sampled turn that follows span `number`."""
    for span in record.turns[number + 1 :]:
        if span.kind == "assistant" and span.end > span.start:
            return record.token_ids[span.start : span.end]
    return []


def _width_of_text(
    tokens: Sequence[int], at: int, ids: Sequence[int], following: Sequence[int], decode: Decode
) -> int | None:
    """How many of the tokens from `at` spell the same text as `ids`, before the sampled turn that follows."""
    text = _without_space(decode(ids))
    if not following:
        return len(tokens) - at if _without_space(decode(tokens[at:])) == text else None
    head = list(following[: len(tokens) - at])
    # In other pieces the text has another number of tokens, so its end shows only by what follows: the next sampled
    # turn, or as much of it as there is. Its ids may occur inside the text too, hence the texts are compared as well.
    for end in range(at, len(tokens)):
        if tokens[end] != following[0] or list(tokens[end : end + len(following)]) != head[: len(tokens) - end]:
            continue
        if _without_space(decode(tokens[at:end])) == text:
            return end - at
    return None


def _squeezed(decode: Decode) -> Decode:
    """`decode` of ids of which runs of one and the same count once."""

    def spell(ids: Sequence[int]) -> str:
        return decode([token for token, _ in groupby(ids)])

    return spell


def _without_space(text: str) -> str:
    """Some tokenizers swallow white space at their control tokens, or put one before every text (Phi-3)."""
    return "".join(text.split())


def _differs(tokens: Sequence[int], at: int, span: TurnSpan, ids: Sequence[int], decode: Decode) -> LedgerError:
    offset = next((k for k, i in enumerate(ids) if at + k >= len(tokens) or tokens[at + k] != i), 0)
    got = tokens[at + offset] if at + offset < len(tokens) else None
    shown = "nothing" if got is None else f"{got} ({decode([got])!r})"
    if span.kind == "assistant":
        what = (
            f"the engine sampled {ids[offset]} ({decode([ids[offset]])!r}) in turn {span.turn}; sampled tokens must be "
            "the engine's: take them from meta_info.output_token_logprobs (return_logprob=True), never from a tokenizer"
        )
    else:
        what = f"the engine read {ids[offset]} ({decode([ids[offset]])!r}), and the text there is not the same either"
    return LedgerError(f"sample.tokens[{at + offset}] is {shown}, but {what}")
