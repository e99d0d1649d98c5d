"""The tokenization sanity check: is the recorded stream what the template makes of the whole conversation?

The recorded stream is the truth (it is what the engine saw and sampled); the full rendering is what
production, or another framework, would feed the model. Where they differ, somebody should know why:
`docs/multiturn.md` explains each cause. The check, its modes and its sentence come from verl's documentation of
multi-turn rollouts. `strict` compares ids, `ignore_strippable` exact differing texts without any context.
"""

from __future__ import annotations

import enum
import logging
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from verl_mt.chat.differences import (
    NOT_COUNTED,
    Cause,
    DiffSpan,
    KnownTexts,
    TurnTexts,
    cause_of_given,
    causes_of_turn,
    closed_opening,
    differing_chunks,
    differing_text,
    end_of_last_turn,
    squeeze,
)
from verl_mt.chat.full_rendering import CutPrompt, cut_prompt, full_rendering, sampled_runs, text_between
from verl_mt.data.conversation import Message, reasoning_of
from verl_mt.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from verl_mt.chat.template import ChatTemplate

__all__ = [
    "WARNING",
    "Cause",
    "Finding",
    "Mismatch",
    "SanityMode",
    "SanityMonitor",
    "check",
    "combine",
    "parse_mode",
    "warning_text",
]

logger = logging.getLogger(__name__)

WARNING = (
    "Inconsistent training and inference tokenization detected. "
    "This may lead to unexpected behavior during training. "
    "Please review your chat template to determine if this is intentional. "
    "For more information, refer to the multiturn README.md."
)
"""The documented sentence. The page it names is `docs/multiturn.md`."""


_CONTEXT_TOKENS = 6
_MAX_ROW_CHARS = 2000
_MAX_LOG_CHARS = 300
_MAX_BRIEF_CHARS = 10
_MIN_KNOWN_CHARS = 4


class SanityMode(enum.StrEnum):
    """`multi_turn.tokenization_sanity_check_mode`."""

    STRICT = "strict"
    """Any difference in ids is a finding."""
    IGNORE_STRIPPABLE = "ignore_strippable"
    """Differences made only of spaces, tabs and line breaks are silent."""
    OFF = "off"
    """Nothing is rendered, nothing compared."""


def parse_mode(value: object) -> SanityMode:
    """The mode that a config value names.

    `off` reaches us as False from YAML; `disable` is verl's name for it.

    Raises:
        ConfigError: any other value.
    """
    if value is False or value == "disable":
        return SanityMode.OFF
    if isinstance(value, str) and value in tuple(SanityMode):
        return SanityMode(value)
    raise ConfigError(
        f"actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode: got {value!r}. "
        "Use strict, ignore_strippable or off (disable and False mean off)"
    )


def check(
    chat: ChatTemplate,
    *,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    token_ids: Sequence[int],
    sampled: Sequence[int],
    mode: SanityMode,
    neutralised: bool = False,
    stop_length: bool = False,
    prompt_truncated: bool = False,
) -> Finding | None:
    """Compare a recorded stream with the full rendering of its messages, up to the last sampled token.

    Reasoning that the generation prompt opened (a prefilled `<think>`) is no mismatch in the last turn: no template
    shows it there, and nothing reads the last turn again.

    Args:
        messages: what this record has seen, its prompt and its own turns: of a trajectory with several records all
            messages up to its last assistant turn. What follows the last assistant message is not looked at (no token
            of it is sampled).
        token_ids, sampled: the record's columns, shape (T,). Earlier turns in its prompt count as given.
        neutralised: control-token text was neutralised during this trajectory.
        stop_length: the last turn of this record was cut by a length limit.
        prompt_truncated: the first prompt of this record was cut to fit (`data.truncation`): a finding of cause
            `truncation` that is never against the budget; what follows the prompt is compared as always.

    Returns:
        None where nothing differs that `mode` looks at.
    """
    if mode is SanityMode.OFF or not any(sampled):
        return None
    last = next(i for i in range(len(sampled) - 1, -1, -1) if sampled[i])
    recorded = list(token_ids[: last + 1])
    turns = list(messages)
    while turns and turns[-1].get("role") != "assistant":
        turns.pop()
    schemas = list(tools) if tools else None
    try:
        streams = {"recorded": recorded, "sampled": sampled[: last + 1]}
        rendered = full_rendering(chat, turns, schemas, **streams)
        cut = cut_prompt(chat, turns, schemas, **streams, rendered=rendered) if prompt_truncated else None
    except Exception as error:  # a template is foreign code: whatever it raises is the finding
        return render_failure(error)
    if cut is None and rendered[: len(recorded)] == recorded:
        return None
    comparison = Comparison(chat, turns, schemas, recorded=recorded, rendered=cut or rendered, sampled=sampled)
    return comparison.finding(
        ignore_blanks=mode is SanityMode.IGNORE_STRIPPABLE, neutralised=neutralised, stop_length=stop_length
    )


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
        # Other ids for sampled tokens are the model's own choice among spellings: training on them is the point, so
        # they are counted and never held against the template. Only given text has one right spelling.
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


@dataclass
class _Counts:
    """Of the trajectories of one plan."""

    observed: int = 0
    mismatched: int = 0
    by_cause: Counter[Cause] = field(default_factory=Counter)
    against_budget: list[Finding] = field(default_factory=list)

    def add(self, other: _Counts) -> None:
        self.observed += other.observed
        self.mismatched += other.mismatched
        self.by_cause += other.by_cause
        self.against_budget += other.against_budget


class SanityMonitor:
    """Counts findings over a run, says each cause once, and holds the budget. One per run; thread-safe."""

    def __init__(self, mode: SanityMode, max_mismatch_rate: float | None = None) -> None:
        """`max_mismatch_rate`: the share of a step's trajectories that may mismatch; None = only warn."""
        self.mode = mode
        self.max_mismatch_rate = max_mismatch_rate
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="sanity")
        """Where an event loop has conversations checked: one after the other, so that the loop keeps half of the
        interpreter's time however many end at once. Begins with the first one."""
        self._warned: set[Cause] = set()
        self._lock = threading.Lock()
        self._counts: dict[str, _Counts] = {}

    def observe(self, finding: Finding | None, plan: str = "") -> None:
        """Count one checked trajectory of a plan; None = it was checked and nothing differed. Runs on the rollout's
        loop and waits for nothing."""
        if self.mode is SanityMode.OFF:
            return
        with self._lock:
            counts = self._counts.setdefault(plan, _Counts())
            counts.observed += 1
            if finding is None:
                return
            counts.mismatched += bool(finding.counted)
            counts.by_cause.update(finding.causes)
            if finding.in_budget:
                counts.against_budget.append(finding)
            new = [cause for cause in finding.causes if cause not in self._warned]
            said = self._warned - NOT_COUNTED
            self._warned.update(new)
        for cause in new:
            whole = cause is Cause.RENDER_FAILED or not (said or cause in NOT_COUNTED)
            level = logging.INFO if cause is Cause.GENERATION_PROMPT else logging.WARNING
            logger.log(level, "%s", warning_text(finding, cause) if whole else brief_text(finding, cause))
            said = said | ({cause} - NOT_COUNTED)

    def metrics(self, reset: bool = True, of: str = "") -> dict[str, float]:
        """What was counted since the last reset; empty where the mode is off.

        Runs in the trainer's main thread and waits for nothing.

        Args:
            reset: the step is over: hold it against the budget and count anew. False only looks.
            of: how the names of the step's plans begin; conversations of others may have ended meanwhile.

        Returns:
            `sanity/mismatch_rate`, the share of the observed trajectories with a counted cause (`NOT_COUNTED` has the
            others), and `sanity/<cause>`, the number of trajectories with that cause, for every cause since the last
            reset. (Not "of this run": a resumed
            run has not met what the run it goes on from has, and must write the same numbers.)

        Raises:
            TemplateError: with `reset`, when more than `max_mismatch_rate` of the trajectories mismatch.
        """
        if self.mode is SanityMode.OFF:
            return {}
        found = _Counts()
        with self._lock:
            for plan in [plan for plan in self._counts if plan.startswith(of)]:
                found.add(self._counts.pop(plan) if reset else self._counts[plan])
        total, over = max(found.observed, 1), found.against_budget
        values = {"sanity/mismatch_rate": found.mismatched / total}
        for cause in Cause:
            if found.by_cause[cause]:
                values[f"sanity/{cause.value}"] = float(found.by_cause[cause])
        limit = self.max_mismatch_rate
        if reset and limit is not None and len(over) > limit * total:
            raise TemplateError(
                f"{len(over)} of {total} trajectories of this step differ from the full rendering of their "
                f"messages. multi_turn.max_mismatch_rate allows a share of {limit}. "
                f"First {over[0].describe()}. Correct the chat template, or raise the limit if the difference "
                "is intended (docs/multiturn.md)"
            )
        return values


def brief_text(finding: Finding, cause: Cause) -> str:
    """One line for a cause that a run meets after its first one, or that the template means."""
    span = next((span for span in finding.spans if span.cause is cause), None)
    place = "" if span is None else f" at token {span.start}: {_cut(span.recorded)} for {_cut(span.rendered)}"
    return f"sanity check, {cause.value}{place} (docs/multiturn.md)"


def _cut(text: str) -> str:
    return repr(text if len(text) <= _MAX_BRIEF_CHARS else text[:_MAX_BRIEF_CHARS] + "...")


def warning_text(finding: Finding, cause: Cause) -> str:
    """What is logged where a run meets its first cause, `cause`."""
    if cause is Cause.RENDER_FAILED:
        return (
            f"The tokenization sanity check could not render a conversation ({finding.rendered}). "
            "Such trajectories are trained on as recorded, unchecked (docs/multiturn.md)."
        )
    span = next(span for span in finding.spans if span.cause is cause)
    if cause is finding.cause:
        return f"{WARNING} ({finding.describe()})"
    return f"{WARNING} ({describe(cause, span.start, span.recorded, span.rendered)})"
