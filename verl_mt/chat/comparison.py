"""Two token streams of one conversation, recorded and rendered, compared: every mismatch with its cause."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from verl_mt.chat.full_rendering import CutPrompt, sampled_runs, text_between
from verl_mt.chat.mismatch_causes import (
    NOT_COUNTED,
    Cause,
    KnownTexts,
    TurnTexts,
    cause_of_given,
    causes_of_turn,
    closed_opening,
    differing_text,
    squeeze,
)
from verl_mt.chat.token_diff import DiffSpan, differing_chunks, end_of_last_turn
from verl_mt.data.conversation import Message, reasoning_of

if TYPE_CHECKING:
    from verl_mt.chat.template import ChatTemplate

_CONTEXT_TOKENS = 6
_MAX_ROW_CHARS = 2000
_MAX_LOG_CHARS = 300
_MIN_KNOWN_CHARS = 4


@dataclass(frozen=True)
class Mismatch:
    """One place where the two streams differ, and one cause for it."""

    cause: Cause
    start: int
    """First differing token of the recorded stream; `[start, end)` is empty where text was only added."""
    end: int
    rendered_start: int
    rendered_end: int
    recorded: str
    """Exactly the differing text; for equal text the tokens, set apart by `|`."""
    rendered: str
    in_budget: bool
    """False: the model's sampling, neutralised text or a cut prompt is the reason, or nothing could be rendered."""
    record: int = 0
    """Which record of the trajectory; places are counted in its stream."""


@dataclass(frozen=True)
class Finding:
    """What the check found in one trajectory: its most serious mismatch, and all of them."""

    cause: Cause
    recorded: str
    """The mismatched text as recorded, with a little of what stands around it."""
    rendered: str
    """The same place in the full rendering."""
    start: int
    """First differing token of the recorded stream."""
    in_budget: bool
    spans: tuple[Mismatch, ...]
    record: int = 0
    """Which record of the trajectory the most serious mismatch is in."""

    @property
    def counted(self) -> tuple[Cause, ...]:
        """Those of its causes that make a mismatch of it."""
        return tuple(cause for cause in self.causes if cause not in NOT_COUNTED)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """All causes, each once, in order of appearance."""
        return tuple(dict.fromkeys(span.cause for span in self.spans))

    def describe(self) -> str:
        """One line for a person: cause, place, both texts."""
        return describe(self.cause, self.start, self.recorded, self.rendered)

    def to_row(self) -> dict[str, Any]:
        """Plain values for the rollout rows (`Trajectory.sanity`)."""
        return {
            **vars(self),
            "cause": self.cause.value,
            "spans": [{**vars(span), "cause": span.cause.value} for span in self.spans],
            "causes": [cause.value for cause in self.causes],
            "counted": [cause.value for cause in self.counted],
        }


def describe(cause: Cause, start: int, recorded: str, rendered: str) -> str:
    """The part of a message that names cause, place and texts; long texts lose their middle."""
    if cause is Cause.RENDER_FAILED:
        return f"cause: {cause.value}; {_short(rendered)}"
    return f"cause: {cause.value} at token {start}; recorded {_short(recorded)!r}, rendered {_short(rendered)!r}"


def combine(findings: Sequence[Finding | None]) -> Finding | None:
    """One finding of a trajectory from one per record, in order; None where no record has any.

    The most serious comes first: one against the budget, else one that is a mismatch, else one that was not rendered,
    else one that only the generation prompt makes.
    """
    found = [
        replace(finding, record=k, spans=tuple(replace(span, record=k) for span in finding.spans)) if k else finding
        for k, finding in enumerate(findings)
        if finding is not None
    ]
    if not found:
        return None
    main = min(found, key=lambda f: (not f.in_budget, not f.counted, f.cause is not Cause.RENDER_FAILED))
    return replace(main, spans=tuple(span for finding in found for span in finding.spans))


def render_failure(error: Exception) -> Finding:
    """The finding where the template could not render the conversation at all."""
    text = f"{type(error).__name__}: {error}"[:_MAX_ROW_CHARS]
    span = Mismatch(Cause.RENDER_FAILED, 0, 0, 0, 0, "", text, in_budget=False)
    return Finding(Cause.RENDER_FAILED, "", text, 0, False, (span,))


class Comparison:
    """The two streams of one trajectory.

    Args:
        messages: the conversation, its last message being the last assistant message.
        recorded: ids up to the last sampled one.
        rendered: ids of the full rendering of `messages`, or what stands for it where the prompt was cut.
        sampled: provenance of `recorded`, at least as long.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        *,
        recorded: list[int],
        rendered: list[int] | CutPrompt,
        sampled: Sequence[int],
    ) -> None:
        self.chat = chat
        self.assistants = [m for m in messages if m.get("role") == "assistant"]
        self.ends = chat.end_token_ids
        self._token_text = cache(lambda token: chat.decode([token]))
        self.cut_prompt = rendered if isinstance(rendered, CutPrompt) else None
        full = rendered.rendered if isinstance(rendered, CutPrompt) else rendered
        cut = end_of_last_turn(full, recorded[-1], self.ends, self._is_blank)
        self.recorded, self.rendered = recorded, full[:cut]
        self._is_sampled = bytes(map(bool, sampled[: len(recorded)]))
        self.end_texts = tuple(chat.decode([token]) for token in sorted(self.ends))
        self.run_starts = [start for start, _ in sampled_runs(self._is_sampled)]
        self.known = _known_texts(messages, tools)
        self._opening = "" if chat.prefilled_reasoning else closed_opening(chat.generation_prompt_text)
        self._opening_ids = list(chat.encode_text(self._opening, neutral=False)) if self._opening else []

    def finding(self, *, ignore_blanks: bool, neutralised: bool, stop_length: bool) -> Finding | None:
        """All mismatches as one finding; None where none is left."""
        spans = self.mismatches(ignore_blanks=ignore_blanks, neutralised=neutralised, stop_length=stop_length)
        if not spans:
            return None
        main = min(spans, key=lambda span: (not span.in_budget, span.cause in NOT_COUNTED))
        before = self.chat.decode(self.recorded[max(main.start - _CONTEXT_TOKENS, 0) : main.start])
        after = self.chat.decode(self.recorded[main.end :][:_CONTEXT_TOKENS])
        after_rendered = self.chat.decode(self.rendered[main.rendered_end :][:_CONTEXT_TOKENS])
        recorded, rendered = main.recorded, main.rendered
        if main.in_budget and main.cause is not Cause.RETOKENIZED:
            span = DiffSpan(main.start, main.end, main.rendered_start, main.rendered_end)
            recorded, rendered = (text[:_MAX_ROW_CHARS] for text in self._texts(span))
        return Finding(
            cause=main.cause,
            recorded=before + recorded + after,
            rendered=before + rendered + after_rendered,
            start=main.start,
            in_budget=main.in_budget,
            spans=tuple(spans),
        )

    def mismatches(self, *, ignore_blanks: bool, neutralised: bool, stop_length: bool) -> list[Mismatch]:
        """Every differing chunk, once per cause."""
        found = self._of_cut_prompt()
        if self.rendered[: len(self.recorded)] == self.recorded:
            return found
        if self.recorded[-1] in self.ends and self.rendered == self.recorded[:-1]:
            # Closes a turn only when another follows: in GLM the stop token is the next role's header.
            return found
        num_unknown = self._num_prompt if self.cut_prompt is not None and self.cut_prompt.whole is None else 0
        for chunk in differing_chunks(self.recorded, self.rendered, self.ends, self.chat.decode):
            opening = self._opening_of(chunk)
            if opening is not None:
                kept = self._text(self.rendered, opening.rendered_start, opening.rendered_end)
                found.append(_mismatch(Cause.GENERATION_PROMPT, opening, self._opening, kept, in_budget=False))
                chunk = DiffSpan(opening.end, chunk.end, opening.rendered_end, chunk.rendered_end)
                if chunk.recorded_ids(self.recorded) == chunk.rendered_ids(self.rendered):
                    continue
            recorded, rendered = self._texts(chunk)
            core = chunk.core(self.recorded, self.rendered)
            if chunk.start < num_unknown:
                _, mine, theirs = differing_text(recorded, rendered)
                found.append(_mismatch(Cause.TRUNCATION, core, mine, theirs, in_budget=False))
            elif recorded == rendered:
                if not (ignore_blanks and not squeeze(self.chat.decode(core.recorded_ids(self.recorded)))):
                    found.append(self._same_text(core, neutralised))
            elif not (ignore_blanks and squeeze(recorded) == squeeze(rendered)):
                found += self._other_text(chunk, core, recorded, rendered, stop_length)
        return found

    def _opening_of(self, chunk: DiffSpan) -> DiffSpan | None:
        """Where the generation prompt began this turn with an empty think block that the rendering does not show."""
        first = bisect_left(self.run_starts, chunk.start)
        if not self._opening_ids or first == len(self.run_starts) or self.run_starts[first] >= chunk.end:
            return None
        end = self.run_starts[first]
        start = end - len(self._opening_ids)
        place = chunk.rendered_start + start - chunk.start
        if start < chunk.start or self.recorded[start:end] != self._opening_ids:
            return None
        if self.rendered[chunk.rendered_start : place] != self.recorded[chunk.start : start]:
            return None
        if self.rendered[place : place + len(self._opening_ids)] == self._opening_ids:
            return None
        shown = next(
            (n for n in self._shorter_openings if self.rendered[place : place + n] == self._opening_ids[-n:]), 0
        )
        return DiffSpan(start, end, place, place + shown)

    @cached_property
    def _shorter_openings(self) -> list[int]:
        """How many ids at the opening's end a template may keep of it in earlier turns: `</think>` (DeepSeek V3.2)."""
        ids = self._opening_ids
        return [n for n in range(len(ids) - 1, 0, -1) if squeeze(self.chat.decode(ids[-n:]))]

    @property
    def _num_prompt(self) -> int:
        return self.run_starts[0]

    def _of_cut_prompt(self) -> list[Mismatch]:
        """What was cut out of the prompt, where it is known; placed where it is missing in both streams."""
        whole = self.cut_prompt.whole if self.cut_prompt is not None else None
        kept = self.recorded[: self._num_prompt]
        if whole is None or whole == kept:
            return []
        core = DiffSpan(0, len(kept), 0, len(whole)).core(kept, whole)
        mine = self._text(kept, core.start, core.end)
        theirs = self._text(whole, core.rendered_start, core.rendered_end)
        place = DiffSpan(core.start, core.end, core.start, core.end)
        return [_mismatch(Cause.TRUNCATION, place, mine, theirs, in_budget=False)]

    @cached_property
    def _control(self) -> frozenset[int]:
        return frozenset(getattr(self.chat.tokenizer, "added_tokens_decoder", ()))

    def _is_blank(self, token: int) -> bool:
        return not squeeze(self._token_text(token))

    def _texts(self, span: DiffSpan) -> tuple[str, str]:
        return (
            self._text(self.recorded, span.start, span.end),
            self._text(self.rendered, span.rendered_start, span.rendered_end),
        )

    def _text(self, ids: list[int], start: int, end: int) -> str:
        return text_between(self.chat, ids, start, end, self._token_text)

    def _same_text(self, core: DiffSpan, neutralised: bool) -> Mismatch:
        mine, theirs = core.recorded_ids(self.recorded), core.rendered_ids(self.rendered)
        by_model = any(self._is_sampled[core.start : core.end])
        # The full rendering trusts all text; what arrived during the rollout was written as plain text.
        plain = not by_model and (neutralised or self._control.isdisjoint(mine) != self._control.isdisjoint(theirs))
        return _mismatch(
            Cause.NEUTRALISED_TEXT if plain else Cause.RETOKENIZED,
            core,
            "|".join(self.chat.decode([token]) for token in mine),
            "|".join(self.chat.decode([token]) for token in theirs),
            # Neither the model's sampling nor what a tool chose to answer may stop a run.
            in_budget=not by_model and not plain,
        )

    def _other_text(
        self, chunk: DiffSpan, core: DiffSpan, recorded: str, rendered: str, stop_length: bool
    ) -> list[Mismatch]:
        first, last = (find(1, chunk.start, chunk.end) for find in (self._is_sampled.find, self._is_sampled.rfind))
        turn = TurnTexts(recorded, rendered, ends=self.end_texts, known=self.known)
        if first < 0:
            causes = [cause_of_given(turn)]
        elif stop_length and chunk.end == len(self.recorded) and self.recorded[-1] not in self.ends:
            causes = [Cause.TRUNCATION]
        else:
            one_turn = last + 1 == chunk.end and self._is_sampled.count(1, first, chunk.end) == chunk.end - first
            turn = replace(
                turn,
                given=lambda: self._text(self.recorded, chunk.start, first),
                call_starts_at=self._call_offset(first, recorded) if one_turn else None,
            )
            causes = causes_of_turn(turn)
        _, mine, theirs = turn.difference
        return [_mismatch(cause, core, mine, theirs, in_budget=True) for cause in causes]

    def _call_offset(self, position: int, recorded: str) -> int | None:
        """Where the call begins in `recorded`, if the message sampled at `position` holds calls."""
        turns_behind = len(self.run_starts) - bisect_right(self.run_starts, position)
        if turns_behind >= len(self.assistants):
            return None
        message = self.assistants[-1 - turns_behind]
        if not message.get("tool_calls"):
            return None
        content = message.get("content")
        text = content.strip() if isinstance(content, str) else ""
        at = recorded.rfind(text)
        return (at + len(text) if text else 0) if at >= 0 else None


def _mismatch(cause: Cause, core: DiffSpan, mine: str, theirs: str, *, in_budget: bool) -> Mismatch:
    return Mismatch(
        cause,
        core.start,
        core.end,
        core.rendered_start,
        core.rendered_end,
        mine[:_MAX_ROW_CHARS],
        theirs[:_MAX_ROW_CHARS],
        in_budget,
    )


def _known_texts(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> KnownTexts:
    texts: list[Any] = []
    for message in messages:
        content = message.get("content")
        texts += [part.get("text") for part in content] if isinstance(content, list) else [content]
        texts.append(reasoning_of(message))
    texts += [tool.get("function", tool).get("name") for tool in tools or ()]
    stripped = (text.strip() for text in texts if isinstance(text, str))
    return KnownTexts(tuple(dict.fromkeys(text for text in stripped if len(text) >= _MIN_KNOWN_CHARS)))


def _short(text: str) -> str:
    half = _MAX_LOG_CHARS // 2
    return text if len(text) <= _MAX_LOG_CHARS else f"{text[:half]} ... {text[-half:]}"
