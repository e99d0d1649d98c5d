"""Where two token streams of the same conversation differ: pure functions on lists of ids.

Both streams are cut into chunks after each end-of-turn token (a chunk is a message in most templates); chunks
are aligned, and tokens are compared only inside chunks that differ. A conversation in which every turn differs costs
in proportion to its length: chunks that both sides hold equally often are the fixed points of the alignment, and only
what stands between them and holds none is compared chunk by chunk.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

_Gap = tuple[int, int, int, int]
"""Chunks `[i, i_end)` of one side stand where `[j, j_end)` of the other stand."""
_MAX_PRODUCT = 1024
"""Numbers of chunks, multiplied, up to which a gap without fixed points is searched for the longest equal runs."""
_MAX_DEPTH = 16
_KEY_CHARS = 256


@dataclass(frozen=True, slots=True)
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
    """How many leading items two sequences of one type (lists of ids, texts) share."""
    shared, end = 0, min(len(left), len(right))
    while shared < end:  # slices compare in C: halving the rest is faster than looking at each item here
        middle = (shared + end + 1) // 2
        if left[shared:middle] == right[shared:middle]:
            shared = middle
        else:
            end = middle - 1
    return shared


def split_chunks(ids: Sequence[int], end_token_ids: Collection[int]) -> list[tuple[int, int]]:
    """Half-open ranges that cover `ids`, each ending behind an end-of-turn token (the last one may not)."""
    return list(itertools.pairwise(_edges(array("q", ids), end_token_ids)))


def _edges(packed: array[int], end_token_ids: Collection[int]) -> list[int]:
    """Where the chunks begin, and where the last one ends."""
    is_end = np.isin(np.frombuffer(packed, dtype=np.int64), list(end_token_ids)) if packed else np.zeros(0, bool)
    edges = [0, *(np.flatnonzero(is_end) + 1).tolist()]
    return edges if edges[-1] == len(packed) else [*edges, len(packed)]


def differing_chunks(
    recorded: Sequence[int],
    rendered: Sequence[int],
    end_token_ids: Collection[int],
    decode: Callable[[Sequence[int]], str],
) -> list[DiffSpan]:
    """The chunks that differ, in order.

    Args:
        recorded, rendered: ids, already cut to the same place (see `end_of_last_turn`).
        end_token_ids: ids that end a turn.
        decode: text of ids; used where one side has more chunks than the other.
    """
    left_edges, left = _packed_chunks(recorded, end_token_ids)
    right_edges, right = _packed_chunks(rendered, end_token_ids)
    spans: list[DiffSpan] = []
    for i1, i2, j1, j2 in _gaps(left, right, (0, len(left), 0, len(right))):
        if i2 - i1 == j2 - j1 == 1:
            pairs = [(0, 1, 0, 1)]
        else:
            pairs = _paired(
                [decode(recorded[a:b]) for a, b in itertools.pairwise(left_edges[i1 : i2 + 1])],
                [decode(rendered[a:b]) for a, b in itertools.pairwise(right_edges[j1 : j2 + 1])],
            )
        for i, i_end, j, j_end in pairs:
            a, b = left_edges[i1 + i], left_edges[i1 + i_end]
            c, d = right_edges[j1 + j], right_edges[j1 + j_end]
            if recorded[a:b] != rendered[c:d]:
                spans.append(DiffSpan(a, b, c, d))
    return spans


def _packed_chunks(ids: Sequence[int], end_token_ids: Collection[int]) -> tuple[list[int], list[bytes]]:
    """Where the chunks begin and the last one ends, and each as bytes: those compare and hash fast, and thousands of
    them start no garbage collection."""
    packed = array("q", ids)
    edges = _edges(packed, end_token_ids)
    return edges, [packed[a:b].tobytes() for a, b in itertools.pairwise(edges)]


def _gaps(left: Sequence[bytes], right: Sequence[bytes], window: _Gap, depth: int = 0) -> Iterator[_Gap]:
    """What stands between the chunks that the two sides share, in order, inside a window."""
    i1, i2, j1, j2 = window
    while i1 < i2 and j1 < j2 and left[i1] == right[j1]:
        i1, j1 = i1 + 1, j1 + 1
    while i1 < i2 and j1 < j2 and left[i2 - 1] == right[j2 - 1]:
        i2, j2 = i2 - 1, j2 - 1
    if i1 == i2 and j1 == j2:
        return
    if i2 - i1 == j2 - j1 == 1:
        yield i1, i2, j1, j2
        return
    fixed = _fixed_points(left, right, (i1, i2, j1, j2)) if depth < _MAX_DEPTH else []
    if fixed:
        for i, j in [*fixed, (i2, j2)]:
            yield from _gaps(left, right, (i1, i, j1, j), depth + 1)
            i1, j1 = i + 1, j + 1
    elif (i2 - i1) * (j2 - j1) > _MAX_PRODUCT:
        yield i1, i2, j1, j2
    else:
        matcher = SequenceMatcher(None, left[i1:i2], right[j1:j2], autojunk=False)
        for tag, i, i_end, j, j_end in matcher.get_opcodes():
            if tag != "equal":
                yield i1 + i, i1 + i_end, j1 + j, j1 + j_end


def _fixed_points(left: Sequence[bytes], right: Sequence[bytes], window: _Gap) -> list[tuple[int, int]]:
    """Equal chunks that belong together, `(i, j)`, rising on both sides.

    A chunk that the window holds as often on the left as on the right pairs in order of appearance; of these pairs the
    longest rising sequence is taken, so a message that moved is not one of them.
    """
    i1, i2, j1, j2 = window
    mine, theirs = Counter(left[i1:i2]), Counter(right[j1:j2])
    shared = {chunk for chunk, count in mine.items() if theirs.get(chunk) == count}
    # Sorting is stable and both sides hold the same chunks: zipped, the k-th of a kind meets the k-th.
    in_left = sorted((i for i in range(i1, i2) if left[i] in shared), key=left.__getitem__)
    in_right = sorted((j for j in range(j1, j2) if right[j] in shared), key=right.__getitem__)
    pairs = sorted(zip(in_left, in_right))
    ends: list[int] = []  # the smallest j at which a rising sequence of that length can end
    last_of: list[int] = []
    before: list[int | None] = []
    for k, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        ends[length : length + 1], last_of[length : length + 1] = [j], [k]
        before.append(last_of[length - 1] if length else None)
    rising, at = [], last_of[-1] if last_of else None
    while at is not None:
        rising.append(pairs[at])
        at = before[at]
    return rising[::-1]


def _paired(left: list[str], right: list[str]) -> list[_Gap]:
    """Which chunks of two differing groups belong together: ranges `(i, i_end, j, j_end)`.

    A chunk on the left may be several on the right: an end token that was neutralised on one side splits the other.
    Equal texts are the fixed points; between them chunks are paired one by one if there are as many on both sides.
    """
    pairs: list[_Gap] = []
    i = j = 0
    fixed = [*_equal_texts(left, right), (len(left), len(right), len(right))]
    for at, start, end in fixed:
        if at - i == start - j:
            pairs += [(i + k, i + k + 1, j + k, j + k + 1) for k in range(at - i)]
        else:
            pairs.append((i, at, j, start))
        if at < len(left):
            pairs.append((at, at + 1, start, end))
        i, j = at + 1, end
    return pairs


def _equal_texts(left: list[str], right: list[str]) -> Iterator[tuple[int, int, int]]:
    """`(i, j, j_end)` for each left text that right texts `[j, j_end)` spell together."""
    joined = "".join(right)
    edges = [0, *itertools.accumulate(map(len, right))]
    starts: dict[int, dict[str, list[int]]] = {}  # by length of key: how the text at each edge begins
    first = 0
    for i, text in enumerate(left):
        if not text:
            continue
        size = min(_KEY_CHARS, 1 << (len(text).bit_length() - 1))
        if size not in starts:
            starts[size] = defaultdict(list)
            for j in range(len(right)):
                starts[size][joined[edges[j] : edges[j] + size]].append(j)
        candidates = starts[size].get(text[:size], [])
        for j in itertools.islice(candidates, bisect_left(candidates, first), None):
            stop = edges[j] + len(text)
            end = bisect_left(edges, stop, lo=j + 1)
            if end < len(edges) and edges[end] == stop and joined.startswith(text, edges[j]):
                yield i, j, end
                first = end
                break


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
