"""What a generate function says of tokens, held against what the engine sampled.

The ledger is the truth: sampled tokens must be the engine's, in the engine's order, with the engine's log-probs. Text
that the function appended may have been tokenized in another way (piece by piece, say): it is compared as text, and the
ids that the engine read stand. What comes behind the last sampled token was read by nobody and is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from verl_mt.data.sample import Sample, check_unsupported, fill_from_record
from verl_mt.data.trajectory import Trajectory, TrajectoryRecord, TurnSpan
from verl_mt.errors import LedgerError

log = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""Between a log-prob as the engine gave it and as the function hands it back (it may have gone through float32)."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Alignment:
    """Where the tokens of a record are in a Sample."""

    places: list[int | None]
    """Per token of the record: its index in `sample.tokens`; None in text that the Sample holds in other ids. Shorter
    than the record where the Sample ends inside the last turn."""
    used: int
    """How many of `sample.tokens` they are; the rest follows the last turn."""


def align(sample: Sample, record: TrajectoryRecord, decode: Decode) -> Alignment:
    """Find a record in `sample.tokens`. Of the last sampled turn the Sample may hold a beginning only.

    Raises:
        LedgerError: names the first token that is another one.
    """
    tokens, wanted = sample.tokens, _wanted(sample)
    places: list[int | None] = []
    at, last = 0, max((k for k, span in enumerate(record.turns) if span.kind == "assistant"), default=-1)
    for number, span in enumerate(record.turns):
        ids = record.token_ids[span.start : span.end]
        here = list(tokens[at : at + len(ids)])
        if here == ids:
            places += range(at, at + len(ids))
            at += len(ids)
            continue
        if span.kind == "assistant":
            kept = next((k for k, i in enumerate(here) if i != ids[k]), len(here))
            # What follows in the Sample is the function's own where it says so; else it passes for the model's.
            more = any(wanted[at + kept :]) if wanted is not None else at + kept < len(tokens)
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


def _wanted(sample: Sample) -> list[int] | None:
    """Per token whether the function wants it trained; None where it does not say."""
    if sample.loss_mask is None or len(sample.loss_mask) > len(sample.tokens):
        return None
    return [0] * (len(sample.tokens) - len(sample.loss_mask)) + list(sample.loss_mask)


def adopt(sample: Sample, trajectory: Trajectory, decode: Decode) -> None:
    """Verify a Sample against the one record of its trajectory, clear what it masked, and fill it from the record.

    Counted on the trajectory: `cut_tokens` (sampled, and left out by the function), `masked_tokens` (sampled, and taken
    out of the loss), `masked_observation_tokens` (not sampled, and wanted in it), `unread_tokens` (behind the last
    turn).

    Raises:
        LedgerError: lengths that do not fit, tokens or log-probs that are not the engine's; names position and numbers.
    """
    record = trajectory.records[-1]
    check_unsupported(sample)
    sample.check_lengths()
    found = align(sample, record, decode)
    first = len(sample.tokens) - sample.response_length
    _check_response(sample, record, found, first)
    trained = sum(record.loss_mask)
    cut = sum(record.sampled[len(found.places) :])
    counts = {
        "cut_tokens": cut,
        "masked_observation_tokens": _mask(sample, record, found, first),
        "unread_tokens": len(sample.tokens) - found.used,
    }
    if sample.remove_sample:
        record.clear_mask(list(range(len(record.token_ids))))
    counts["masked_tokens"] = trained - sum(record.loss_mask) - cut
    for name, count in counts.items():
        if count:
            trajectory.counters[name] = trajectory.counters.get(name, 0) + count
    if counts["masked_observation_tokens"]:
        log.warning(
            "%s: loss_mask is 1 on %d tokens that the engine did not sample; they are not trained",
            trajectory.trajectory_id,
            counts["masked_observation_tokens"],
        )
    fill_from_record(sample, record)
    sample.turn_texts = list(trajectory.turn_texts)


def _check_response(sample: Sample, record: TrajectoryRecord, found: Alignment, first: int) -> None:
    """Sampled tokens are in the response, and their log-probs are the engine's."""
    for position, place in enumerate(found.places):
        if not record.sampled[position]:
            continue
        assert place is not None
        if place < first:
            raise LedgerError(
                f"response_length is {sample.response_length}, so the response begins at token {first} of "
                f"{len(sample.tokens)}, but the engine sampled token {place} already"
            )
        if sample.rollout_log_probs is None or (sample.loss_mask is not None and not sample.loss_mask[place - first]):
            continue  # a token that the function does not train may have a filler
        said, known = sample.rollout_log_probs[place - first], record.rollout_log_probs[position]
        if not abs(said - known) <= _TOLERANCE * max(1.0, abs(known)):
            raise LedgerError(
                f"rollout_log_probs[{place - first}] is {said}, but the engine gave {known} for that token; take both "
                "from the same item of meta_info.output_token_logprobs"
            )


def _mask(sample: Sample, record: TrajectoryRecord, found: Alignment, first: int) -> int:
    """Clear what the function cleared or left out; how many tokens it wanted trained that were not sampled.

    Raises:
        LedgerError: it wants tokens trained that come behind everything the engine sampled.
    """
    clear = list(range(len(found.places), len(record.token_ids)))
    wanted = 0
    if sample.loss_mask is not None:
        behind = sum(sample.loss_mask[max(found.used - first, 0) :])
        if behind:
            raise LedgerError(
                f"loss_mask is 1 on {behind} of the {len(sample.tokens) - found.used} tokens behind the engine's last; "
                "the engine did not sample them"
            )
        sampled = {p: k for k, p in enumerate(found.places) if p is not None and record.sampled[k]}
        clear += [k for p, k in sampled.items() if not sample.loss_mask[p - first]]
        wanted = sum(sample.loss_mask) - sum(sample.loss_mask[p - first] for p in sampled)
    record.clear_mask(clear)
    return wanted


def _next_sampled(record: TrajectoryRecord, number: int) -> list[int]:
    """Ids of the sampled turn that follows span `number`."""
    for span in record.turns[number + 1 :]:
        if span.kind == "assistant" and span.end > span.start:
            return record.token_ids[span.start : span.end]
    return []


def _width_of_text(
    tokens: Sequence[int], at: int, ids: Sequence[int], following: Sequence[int], decode: Decode
) -> int | None:
    """How many of the Sample's tokens spell the same text as `ids`, before the sampled turn that follows."""
    text = _without_space(decode(ids))
    if not following:
        return len(tokens) - at if _without_space(decode(tokens[at:])) == text else None
    head = list(following[: len(tokens) - at])
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
