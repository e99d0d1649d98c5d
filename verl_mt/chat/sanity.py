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
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from verl_mt.chat.comparison import Comparison, Finding, Mismatch, combine, describe, render_failure
from verl_mt.chat.full_rendering import cut_prompt, full_rendering
from verl_mt.chat.mismatch_causes import Cause
from verl_mt.data.conversation import Message
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
        f"actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode: got {value!r}; "
        "use strict, ignore_strippable or off (disable and False mean off)"
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


class SanityMonitor:
    """Counts findings over a run, warns once per cause, and holds the budget. One per run; thread-safe."""

    def __init__(self, mode: SanityMode, max_mismatch_rate: float | None = None) -> None:
        """`max_mismatch_rate`: the share of a step's trajectories that may mismatch; None = only warn."""
        self.mode = mode
        self.max_mismatch_rate = max_mismatch_rate
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="sanity")
        """Where an event loop has conversations checked: one after the other, so that the loop keeps half of the
        interpreter's time however many end at once. Begins with the first one."""
        self._warned: set[Cause] = set()
        self._lock = threading.Lock()
        self._start_step()

    def _start_step(self) -> None:
        self._observed = 0
        self._mismatched = 0
        self._by_cause: Counter[Cause] = Counter()
        self._against_budget: list[Finding] = []

    def observe(self, finding: Finding | None) -> None:
        """Count one checked trajectory; None = it was checked and nothing differed."""
        with self._lock:
            self._observed += 1
            if finding is None:
                return
            self._mismatched += bool(finding.counted)
            self._by_cause.update(finding.causes)
            if finding.in_budget:
                self._against_budget.append(finding)
            new = [cause for cause in finding.causes if cause not in self._warned]
            self._warned.update(new)
        for cause in new:
            logger.warning("%s", warning_text(finding, cause))

    def metrics(self, reset: bool = True) -> dict[str, float]:
        """What was counted since the last reset; empty where the mode is off.

        Args:
            reset: the step is over: hold it against the budget and count anew. False only looks.

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
        with self._lock:
            total, over = max(self._observed, 1), self._against_budget
            values = {"sanity/mismatch_rate": self._mismatched / total}
            for cause in Cause:
                if self._by_cause[cause]:
                    values[f"sanity/{cause.value}"] = float(self._by_cause[cause])
            if reset:
                self._start_step()
        limit = self.max_mismatch_rate
        if reset and limit is not None and len(over) > limit * total:
            raise TemplateError(
                f"{len(over)} of {total} trajectories of this step differ from the full rendering of their "
                f"messages; multi_turn.max_mismatch_rate allows a share of {limit}. "
                f"First {over[0].describe()}. Correct the chat template, or raise the limit if the difference "
                "is intended (docs/multiturn.md)"
            )
        return values


def warning_text(finding: Finding, cause: Cause) -> str:
    """What is logged the first time that a run meets `cause`."""
    if cause is Cause.RENDER_FAILED:
        return (
            f"The tokenization sanity check could not render a conversation ({finding.rendered}). "
            "Such trajectories are trained on as recorded, unchecked (docs/multiturn.md)."
        )
    span = next(span for span in finding.spans if span.cause is cause)
    if cause is Cause.GENERATION_PROMPT:
        return (
            f"{WARNING} ({describe(cause, span.start, span.recorded, span.rendered)}; the template means this: its "
            "generation prompt writes it, nothing of it is trained, and no such trajectory counts as a mismatch)"
        )
    if cause is finding.cause:
        return f"{WARNING} ({finding.describe()})"
    return f"{WARNING} ({describe(cause, span.start, span.recorded, span.rendered)})"
