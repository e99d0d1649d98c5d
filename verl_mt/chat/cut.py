"""Where an assistant turn ends in a rendered text: the cut between what is sampled and what is rendered.

`tail` below is the text from right after the assistant's last known words. The end of the turn is a control token
that stands both where the conversation stops there and where it goes on; where the two differ, or nothing stands
there, the rules of `find_end` decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class TurnEnd:
    """How a template ends an assistant turn before a message of one role."""

    closing: str
    """Everything from the assistant's last words up to and including the end token."""
    token: str
    """The end token's text; empty where the template writes none (the sampled stop token stands alone then)."""
    opens_next: bool = False
    """The end token is the first token of what follows (GLM stops at the next role's header)."""
    final: str = ""
    """The token that ends the turn where nothing follows, if that is another one (gpt-oss: `<|return|>`)."""


def find_end(
    following: str,
    alone: str,
    pattern: re.Pattern[str] | None,
    *,
    starts: Collection[str],
    known: Collection[str],
    header_ends: bool = False,
) -> TurnEnd:
    """The end of a turn, from two renderings.

    Args:
        following: the tail with an environment message, up to that message's content.
        alone: the tail of the conversation that stops after the assistant.
        pattern: finds control literals.
        starts: literals of the generation prompt: they start a turn, so they cannot end one.
        known: literals that are known to end a turn.
        header_ends: this template's user header ends the turn before it, so another role's header may too.
    """
    if pattern is None:
        return TurnEnd("", "")
    spans = [m.span() for m in pattern.finditer(following)]
    alone_spans = [m.span() for m in pattern.finditer(alone)]
    common = common_length(following, alone)
    for start, end in (*spans, *alone_spans):
        if start < common < end:
            common = start

    def end_at(span: tuple[int, int], **how: bool | str) -> TurnEnd:
        return TurnEnd(following[: span[1]], following[slice(*span)], **how)  # type: ignore[arg-type]

    before_next = list(takewhile(lambda s: following[slice(*s)] not in starts, spans))
    shared = [s for s in before_next if s[1] <= common]
    sure = [s for s in before_next if following[slice(*s)] in known]
    after = _next_to(following, common, spans)
    if after and following[slice(*after)] in starts:
        after = None
    final = _next_to(alone, common, alone_spans)
    if sure:
        return end_at(sure[0])
    if header_ends and after:
        return end_at(after, opens_next=True)
    if shared:
        return end_at(shared[-1])
    if after and final:
        return end_at(after, final=alone[slice(*final)])
    if after:
        return end_at(after, opens_next=True)
    return TurnEnd(following[: spans[0][0]] if spans else "", "")


def common_length(first: str, second: str) -> int:
    """How many leading characters two texts share."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _next_to(text: str, position: int, spans: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The control literal at a position, white space before it allowed."""
    return next((s for s in spans if s[0] >= position and not text[position : s[0]].strip()), None)
