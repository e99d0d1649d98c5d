"""Where two token streams of one conversation differ, and why: pure functions on lists of ids, then on texts.

Where: both streams are cut into chunks after each end-of-turn token (a chunk is a message in most templates); chunks
are aligned, and tokens are compared only inside chunks that differ. A conversation in which every turn differs costs
in proportion to its length: chunks that both sides hold equally often are the fixed points of the alignment, and only
what stands between them and holds none is compared chunk by chunk.

Why: causes are peeled off one after the other. Reasoning is taken out of both sides, then every JSON value is written
in one canonical way; what is left decides the rest. So one turn can have more than one cause.
"""

from __future__ import annotations

import enum
import html
import itertools
import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

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
    """How many leading items two sequences (ids, characters) share."""
    if type(left) is not type(right):
        left, right = list(left), list(right)
    shared, end = 0, min(len(left), len(right))
    # Slices compare in C, so halving the rest beats a loop in Python; every item is compared about once.
    while shared < end:
        middle = (shared + end + 1) // 2
        if left[shared:middle] == right[shared:middle]:
            shared = middle
        else:
            end = middle - 1
    return shared


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
    packed = np.array(ids, dtype=np.int64)
    edges = [0, *(np.flatnonzero(np.isin(packed, list(end_token_ids))) + 1).tolist()]
    if edges[-1] != len(packed):
        edges.append(len(packed))
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
    # Longest equal runs (difflib) take the product of both lengths, seconds for hundreds of rewritten turns: equal
    # chunks cut the window first, and only small rests are searched. The depth bounds the recursion.
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
    # Right texts are looked up by how they begin, in keys as long as a power of two: one table per length of key, so
    # that a thousand texts on both sides are not compared a million times.
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


class Cause(enum.StrEnum):
    """Why the recorded stream and the rendered conversation differ."""

    RETOKENIZED = "retokenized"
    """Same text, other ids: the sampled sequence is not the one that the tokenizer would write."""
    STRIPPED_REASONING = "stripped_reasoning"
    """The template drops reasoning that the model wrote."""
    REWRITES_HISTORY = "rewrites_history"
    """The template writes earlier messages in another way once the conversation has gone on."""
    TURN_SEPARATOR = "turn_separator"
    """White space or an end-of-turn token between two turns differs."""
    RESERIALIZED_ARGUMENTS = "reserialized_arguments"
    """A tool call is written in another way than the model wrote it."""
    TRUNCATION = "truncation"
    """The last turn was cut by a length limit, and its rest cannot be rendered as it is; or the prompt was cut."""
    TEMPLATE_DEFAULT_TEXT = "template_default_text"
    """The template adds text that stands in no message (a default system prompt, an empty think block)."""
    GENERATION_PROMPT = "generation_prompt"
    """The generation prompt begins a turn with an empty think block that earlier turns of a rendering do not show."""
    NEUTRALISED_TEXT = "neutralised_text"
    """Control-token text was encoded as plain text on one of the two sides."""
    RENDER_FAILED = "render_failed"
    """The template cannot render the conversation, so there was nothing to compare with."""


NOT_COUNTED = frozenset({Cause.GENERATION_PROMPT, Cause.RENDER_FAILED})
"""No mismatch of the conversation: what the template's own generation prompt is meant to write, and what could not be
compared."""

_REASONING = re.compile(
    r"<think>.*?(?:</think>|\Z)"
    r"|\[THINK\].*?(?:\[/THINK\]|\Z)"
    r"|<seed:think>.*?(?:</seed:think>|\Z)"
    r"|<reasoning>.*?(?:</reasoning>|\Z)"
    r"|<\|inner_prefix\|>.*?(?:<\|inner_suffix\|>|\Z)"
    r"|◁think▷.*?(?:◁/think▷|\Z)"
    r"|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)",
    re.DOTALL,
)
_REASONING_TAG = r"</?think>|\[/?THINK\]|</?seed:think>|</?reasoning>|<\|inner_(?:prefix|suffix)\|>|◁/?think▷"
_OPENING = re.compile(rf"(?:(?:{_REASONING_TAG}|<\|channel>thought|<channel\|>)\s*)+\Z")
_ONLY_TAGS = re.compile(rf"(?:\s*(?:{_REASONING_TAG}))+\s*")
_TAG = re.compile(_REASONING_TAG + r"|<\|(?:channel|message|end|start)\|>")
_CONTROL = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]")
"""What looks like a control token or a tag."""
_JSON_OPENS = re.compile(r'"?[{\[]')
_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_MAX_READS = 8
"""How often a text is read through in search of JSON before what is left of it counts as plain."""
_MAX_NESTED = 1000
_BLANKS = str.maketrans("", "", " \n\t\r")


@dataclass(frozen=True)
class KnownTexts:
    """Contents of messages and names of tools; text unlike all of them is the template's own."""

    texts: tuple[str, ...] = ()

    def explain(self, text: str) -> bool:
        """Whether one of them holds `text`, or the other way round."""
        return text in self._joined or any(known in text for known in self.texts)

    @cached_property
    def _joined(self) -> str:
        return "\0".join(self.texts)  # one search in C; no text of a message spans the zero


@dataclass(frozen=True)
class TurnTexts:
    """One chunk of the conversation as recorded and as rendered, with what is known about it."""

    recorded: str
    rendered: str
    given: Callable[[], str] = str
    """The head of `recorded` that was not sampled (separator, role header, prefilled reasoning), decoded if asked."""
    ends: tuple[str, ...] = ()
    """Texts of the end-of-turn tokens."""
    known: KnownTexts = KnownTexts()
    call_starts_at: int | None = None
    """Where, in `recorded`, the text behind the message's content begins, if the message holds tool calls."""

    @cached_property
    def difference(self) -> tuple[int, str, str]:
        """`differing_text` of the two."""
        return differing_text(self.recorded, self.rendered)


def squeeze(text: str) -> str:
    """`text` without spaces, tabs and line breaks."""
    return text.translate(_BLANKS)


def differing_text(recorded: str, rendered: str) -> tuple[int, str, str]:
    """`(offset, recorded part, rendered part)`: the two texts without what they share at both ends."""
    head = common_prefix(recorded, rendered)
    for text in (recorded, rendered):  # never from the middle of a tag: `<|end|>` and `<|return|>` share a beginning
        head = min([head, *(m.start() for m in _CONTROL.finditer(text) if m.start() < head < m.end())])
    left, right = recorded[head:], rendered[head:]
    tail = common_prefix(left[::-1], right[::-1])
    for text in (left, right):
        cut = len(text) - tail
        tail = min([tail, *(len(text) - m.end() for m in _CONTROL.finditer(text) if m.start() < cut < m.end())])
    return head, left[: len(left) - tail], right[: len(right) - tail]


def causes_of_turn(turn: TurnTexts) -> list[Cause]:
    """The causes for a chunk that holds sampled tokens and whose texts differ; never empty."""
    causes: list[Cause] = []
    recorded, rendered = turn.recorded, turn.rendered
    _, mine, theirs = turn.difference
    if _ONLY_TAGS.fullmatch(mine) and not squeeze(theirs):
        return [Cause.STRIPPED_REASONING]  # such as a prefilled `<think>` that the finished turn does not show
    if _ONLY_TAGS.fullmatch(theirs) and not squeeze(mine):
        return [Cause.TEMPLATE_DEFAULT_TEXT]
    if _reasoning_text(recorded) != _reasoning_text(rendered):
        causes.append(_cause_of_reasoning(recorded, rendered))
        recorded, rendered = _REASONING.sub("", recorded), _REASONING.sub("", rendered)
    if squeeze(recorded) == squeeze(rendered):
        if _json_texts(recorded) != _json_texts(rendered):
            return [*causes, Cause.RESERIALIZED_ARGUMENTS]
        return causes or [_cause_of_blanks(turn)]
    if _arguments_differ(turn, recorded, rendered):
        return [*causes, Cause.RESERIALIZED_ARGUMENTS]
    return [*causes, _cause_of_rest(turn, recorded, rendered)]


def cause_of_given(turn: TurnTexts) -> Cause:
    """The cause for a chunk without sampled tokens (prompt, observation) whose texts differ."""
    if squeeze(turn.recorded) == squeeze(turn.rendered):
        return Cause.TURN_SEPARATOR
    return _cause_of_rest(turn, turn.recorded, turn.rendered)


def closed_opening(generation_prompt: str) -> str:
    """The empty reasoning block that a generation prompt ends with (thinking switched off); empty where it has none."""
    found = _OPENING.search(generation_prompt)
    return found.group() if found else ""


def without_empty_reasoning(text: str) -> str:
    """`text` without the empty reasoning block that some templates write at the head of every turn."""
    found = _REASONING.match(text.lstrip())
    if found is None or squeeze(_TAG.sub("", found.group())):
        return text
    return text.lstrip()[found.end() :].lstrip("\n")


def _reasoning_text(text: str) -> str | None:
    """All reasoning without its tags and white space; None where there is no reasoning block at all."""
    blocks = _REASONING.findall(text)
    return squeeze(_TAG.sub("", "".join(blocks))) if blocks else None


def _cause_of_reasoning(recorded: str, rendered: str) -> Cause:
    if _REASONING.search(recorded):
        return Cause.STRIPPED_REASONING
    return Cause.REWRITES_HISTORY if _reasoning_text(rendered) else Cause.TEMPLATE_DEFAULT_TEXT


def _cause_of_blanks(turn: TurnTexts) -> Cause:
    """White space only: the template's between turns, or a rewriting of what the model wrote."""
    offset, mine, _ = turn.difference
    num_given = len(turn.given())
    if offset < num_given or (offset == num_given and not mine):
        return Cause.TURN_SEPARATOR
    return Cause.REWRITES_HISTORY


def _arguments_differ(turn: TurnTexts, recorded: str, rendered: str) -> bool:
    """Whether a tool call written in another way explains what is left."""
    if squeeze(canonical_json(recorded)) == squeeze(canonical_json(rendered)):
        return True
    if turn.call_starts_at is None:
        return False
    # Formats that are not JSON (XML parameters, Python calls): what stands before the call is as written
    offset, _, theirs = turn.difference
    return offset >= turn.call_starts_at and bool(squeeze(theirs))


def _cause_of_rest(turn: TurnTexts, recorded: str, rendered: str) -> Cause:
    _, mine, theirs = differing_text(recorded, rendered)
    if _only_ends(mine, turn.ends) and _only_ends(theirs, turn.ends):
        return Cause.TURN_SEPARATOR
    added = theirs.strip()
    if added and not squeeze(mine) and not turn.known.explain(added):
        return Cause.TEMPLATE_DEFAULT_TEXT
    return Cause.REWRITES_HISTORY


def _only_ends(text: str, ends: tuple[str, ...]) -> bool:
    for end in ends:
        text = text.replace(end, "")
    return not squeeze(text)


def canonical_json(text: str) -> str:
    """`text` with every JSON object and array in it written in one way (sorted keys, nested JSON decoded)."""
    text = html.unescape(text)
    return "".join(text[at:end] if value is None else _ENCODER.encode(value) for at, end, value in _json_pieces(text))


def _json_texts(text: str) -> list[str]:
    """Every JSON object and array as it stands in `text`."""
    return [text[at:end] for at, end, value in _json_pieces(text) if value is not None]


def _json_pieces(text: str) -> Iterator[tuple[int, int, Any]]:
    """`text` cut into `(start, end, value)`, None for what is no JSON object or array.

    Text that is no JSON, or is nested too deeply to be a call, stays as it is. So does the rest of a text in which
    openings that lead nowhere (`[[[[`) have been read through many times over.
    """
    at, left_to_read = 0, _MAX_READS * len(text) + _MAX_NESTED
    while (opening := _JSON_OPENS.search(text, at)) is not None and left_to_read > 0:
        start, end, value = opening.start(), opening.start() + 1, None
        try:
            read, behind = _DECODER.raw_decode(text, start)
            value, end = _decoded(read), behind
        except json.JSONDecodeError as error:
            left_to_read -= error.pos - start
        except (ValueError, RecursionError):
            left_to_read -= _MAX_NESTED
        yield at, start, None
        yield start, end, value
        at = end
    yield at, len(text), None


def _decoded(value: Any) -> Any:
    """JSON text inside JSON strings becomes the value it stands for: arguments are often encoded twice."""
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return _decoded(json.loads(value))
        except ValueError:
            return value
    return value
