"""Why a rendered turn differs from the recorded one: pure functions on the two texts.

Causes are peeled off one after the other: reasoning is taken out of both sides, then every JSON value is
written in one canonical way; what is left decides the rest. So one turn can have more than one cause.
"""

from __future__ import annotations

import enum
import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl_mt.chat.token_diff import common_prefix


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
        return "\0".join(self.texts)


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
