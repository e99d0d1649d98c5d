"""Where two token streams of the same conversation differ: pure functions on lists of ids.

Both streams are cut into chunks after each end-of-turn token (a chunk is a message in most templates); chunks
are aligned, tokens are compared only inside chunks that differ, so the cost stays linear in practice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher


@dataclass(frozen=True)
class DiffSpan:
    """Tokens `[start, end)` were recorded where `[rendered_start, rendered_end)` was rendered."""

    start: int
    end: int
    rendered_start: int
    rendered_end: int

    def core(self, recorded: Sequence[int], rendered: Sequence[int]) -> DiffSpan:
        """The same span without the ids that both sides share at its edges."""
        left = self.recorded_ids(recorded)
        right = self.rendered_ids(rendered)
        head = common_prefix(left, right)
        tail = common_prefix(left[head:][::-1], right[head:][::-1])
        return DiffSpan(self.start + head, self.end - tail, self.rendered_start + head, self.rendered_end - tail)

    def recorded_ids(self, recorded: Sequence[int]) -> list[int]:
        return list(recorded[self.start : self.end])

    def rendered_ids(self, rendered: Sequence[int]) -> list[int]:
        return list(rendered[self.rendered_start : self.rendered_end])


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """How many leading items two sequences (ids, characters) share."""
    length = min(len(left), len(right))
    for i in range(length):
        if left[i] != right[i]:
            return i
    return length


def split_chunks(ids: Sequence[int], end_token_ids: Collection[int]) -> list[tuple[int, int]]:
    """Half-open ranges that cover `ids`, each ending behind an end-of-turn token (the last one may not)."""
    edges = [0, *(i + 1 for i, token in enumerate(ids) if token in end_token_ids)]
    if edges[-1] != len(ids):
        edges.append(len(ids))
    return list(itertools.pairwise(edges))


def differing_chunks(
    recorded: Sequence[int], rendered: Sequence[int], end_token_ids: Collection[int]
) -> list[DiffSpan]:
    """The chunks that differ, in order.

    Args:
        recorded, rendered: ids, already cut to the same place (see `end_of_last_turn`).
        end_token_ids: ids that end a turn.
    """
    left, right = split_chunks(recorded, end_token_ids), split_chunks(rendered, end_token_ids)
    left_keys = [tuple(recorded[a:b]) for a, b in left]
    right_keys = [tuple(rendered[a:b]) for a, b in right]
    spans: list[DiffSpan] = []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, left_keys, right_keys, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        if i2 - i1 == j2 - j1:
            pairs = [((i, i + 1), (j, j + 1)) for i, j in zip(range(i1, i2), range(j1, j2))]
        else:
            pairs = [((i1, i2), (j1, j2))]
        for (a, b), (c, d) in pairs:
            spans.append(DiffSpan(*_extent(left, a, b, len(recorded)), *_extent(right, c, d, len(rendered))))
    return spans


def _extent(chunks: list[tuple[int, int]], first: int, last: int, total: int) -> tuple[int, int]:
    """Tokens of chunks `[first, last)`; an empty range keeps its place."""
    if first == last:
        place = chunks[first][0] if first < len(chunks) else total
        return place, place
    return chunks[first][0], chunks[last - 1][1]


def end_of_last_turn(
    rendered: Sequence[int], last_id: int, end_token_ids: Collection[int], is_blank: Callable[[int], bool]
) -> int:
    """How many rendered tokens to compare with a record that ends with `last_id`.

    Templates go on after the last sampled token: a separator behind the end of turn (Qwen's newline), an
    end-of-text token (Phi-3), an end of turn that a turn cut by length never had. None of that is compared.

    Args:
        rendered: ids of the whole conversation, its last message being the last assistant turn.
        last_id: the last sampled id.
        end_token_ids: ids that end a turn.
        is_blank: whether an id decodes to white space only.
    """
    first = len(rendered)
    while first > 0 and (rendered[first - 1] in end_token_ids or is_blank(rendered[first - 1])):
        first -= 1
    ends = [i for i in range(first, len(rendered)) if rendered[i] in end_token_ids]
    if not ends:
        return len(rendered)
    if last_id not in end_token_ids:
        return ends[0]
    same = [i for i in ends if rendered[i] == last_id]
    return (same or ends)[0] + 1
