"""The tokens of a rollout: records of equal columns, and the ledger, the only code that appends to them.

A record with two assistant turns around one tool answer, P0 the first prompt (generation prompt included), A0 and A1
sampled, E0 the tool's answer as the template renders it (the next generation prompt included)::

    token_ids         = P0             + A0            + E0             + A1
    sampled           = [0] * len(P0)  + [1] * len(A0) + [0] * len(E0)  + [1] * len(A1)
    loss_mask         = sampled, minus what a user cleared
    rollout_log_probs = [0.0]*len(P0)  + lp(A0)        + [0.0]*len(E0)  + lp(A1)
    policy_versions   = [-1]*len(P0)   + version(A0)   + [-1]*len(E0)   + version(A1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from verl_mt.data.conversation import Message
from verl_mt.data.media import MediaInput
from verl_mt.errors import LedgerError

SpanKind = Literal["prompt", "assistant", "observation"]

_COLUMNS = ("token_ids", "sampled", "loss_mask", "rollout_log_probs", "policy_versions")
"""What a record holds per token."""
_SEALED = (np.int32, np.int8, np.int8, np.float64, np.int32)
"""Their types, once nothing is appended any more."""


def total(column: Sequence[int]) -> int:
    """Sum of a record's column, sealed or not."""
    return int(column.sum()) if isinstance(column, np.ndarray) else sum(column)


def listed(column: Sequence[Any]) -> list[Any]:
    """A record's column, or a part of it, as a list of Python's own numbers, sealed or not."""
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


@dataclass(frozen=True)
class TurnSpan:
    """Tokens `[start, end)` of a record that belong to one step of the conversation."""

    kind: SpanKind
    start: int
    end: int
    turn: int
    """The assistant turn: 0 for the prompt, k for the k-th assistant turn and for the observation that follows it."""


@dataclass
class TrajectoryRecord:
    """One token stream of a trajectory, with provenance and mask of equal length. See the module's picture.

    Of a record that came from a rollout worker the columns are arrays, and nothing can be appended (`seal`).
    """

    token_ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    """log_softmax(logits / T) by the sampler where `sampled`, 0.0 elsewhere."""
    policy_versions: list[int] = field(default_factory=list)
    """Version of the weights where `sampled`, -1 elsewhere."""
    turns: list[TurnSpan] = field(default_factory=list)
    has_log_probs: bool = True
    """False if the engine gave text only: training then uses the trainer's own old log-probs."""
    messages: list[Message] = field(default_factory=list)
    """What this record has seen, where history was rewritten after it. empty = the trajectory's `messages`."""
    tools: list[dict[str, Any]] | None = None
    """The schemas that its prompt showed, where a later record shows others. None = the trajectory's `tools`."""
    media: list[MediaInput] = field(default_factory=list)
    """Images and videos among its tokens, in order: exactly the inputs of the engine and of the trainer."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the first prompt, its generation prompt included."""
        return self.turns[0].end if self.turns and self.turns[0].kind == "prompt" else 0

    @property
    def assistant_turns(self) -> list[TurnSpan]:
        """The spans that were sampled, in order."""
        return [span for span in self.turns if span.kind == "assistant"]

    def append_sampled(self, ids: list[int], log_probs: list[float] | None, versions: list[int], *, turn: int) -> None:
        """Append what the engine produced: sampled 1, mask 1.

        Raises:
            LedgerError: log-probs missing or of another length (names both lengths).
        """
        if log_probs is None and self.has_log_probs and any(self.sampled):
            raise LedgerError("sampled tokens without log-probs after sampled tokens with log-probs")
        if log_probs is None:
            self.has_log_probs = False
            log_probs = [0.0] * len(ids)
        if len(log_probs) != len(ids) or len(versions) != len(ids):
            raise LedgerError(
                f"{len(ids)} sampled ids came with {len(log_probs)} log-probs and {len(versions)} versions. "
                "All three must have the same length"
            )
        self._append(ids, 1, log_probs, versions, "assistant", turn)

    def append_given(self, ids: list[int], *, kind: SpanKind, turn: int) -> None:
        """Append a prompt or an observation: sampled 0, mask 0, log-prob filler 0.0, version -1."""
        self._append(ids, 0, [0.0] * len(ids), [-1] * len(ids), kind, turn)

    def clear_mask(self, positions: list[int]) -> int:
        """Take tokens out of the loss. Returns how many bits were set before."""
        cleared = sum(self.loss_mask[p] for p in positions)
        for p in positions:
            self.loss_mask[p] = 0
        return cleared

    def set_mask(self, positions: Iterable[int]) -> int:
        """Put tokens into the loss, sampled or not: an explicit request of the user. Returns how many of them that
        nobody sampled were not in it before. Placeholders of images and videos stay out: they say nothing."""
        added = 0
        shown = {p for made in self.media for p in range(made.start, made.end)}
        for p in positions:
            if p in shown:
                continue
            added += not self.loss_mask[p] and not self.sampled[p]
            self.loss_mask[p] = 1
        return added

    def cut(self, end: int) -> int:
        """Drop the tokens from position `end` on. Returns how many of them were sampled."""
        dropped = sum(self.sampled[end:])
        for name in _COLUMNS:
            del getattr(self, name)[end:]
        self.turns = [replace(span, end=min(span.end, end)) for span in self.turns if span.start < end]
        self.media = [made for made in self.media if made.end <= end]
        return dropped

    def split(self, start: int) -> tuple[TrajectoryRecord, TrajectoryRecord]:
        """Two records that train the same tokens: what comes before position `start` is the prompt of the second, where
        nothing counts as sampled, so that no token is trained twice."""
        first = replace(self, turns=list(self.turns), messages=list(self.messages), media=list(self.media))
        for name in _COLUMNS:
            setattr(first, name, list(getattr(self, name)))
        # What was given between the last sampled token before `start` and `start` is the second's business only.
        first.cut(max((p + 1 for p in range(start) if self.sampled[p]), default=start))
        second = TrajectoryRecord(has_log_probs=self.has_log_probs, media=list(self.media))
        turn = first.turns[-1].turn if first.turns else 0
        second.append_given(list(self.token_ids[:start]), kind="prompt", turn=turn)
        for name in _COLUMNS:
            getattr(second, name).extend(getattr(self, name)[start:])
        second.turns += [span for span in self.turns if span.start >= start]
        return first, second

    def seal(self) -> None:
        """Nothing is appended any more: the columns become arrays, of which a process can send, count and copy millions
        of tokens without touching one after the other. No value changes."""
        for name, kind in zip(_COLUMNS, _SEALED):
            setattr(self, name, np.asarray(getattr(self, name), kind))

    def check(self) -> None:
        """Verify the invariants of the module's picture.

        Raises:
            LedgerError: names the invariant and the numbers.
        """
        lengths = {name: len(getattr(self, name)) for name in _COLUMNS}
        if len(set(lengths.values())) != 1:
            raise LedgerError(f"columns of one record differ in length: {lengths}")
        log_probs, versions = np.asarray(self.rollout_log_probs), np.asarray(self.policy_versions)
        wrong = np.flatnonzero((np.asarray(self.sampled) == 0) & ((log_probs != 0.0) | (versions != -1)))
        if len(wrong):
            p = int(wrong[0])
            raise LedgerError(f"position {p} was not sampled but has log-prob {log_probs[p]} and version {versions[p]}")
        edge = 0
        for span in self.turns:
            if span.start != edge or span.end < span.start:
                raise LedgerError(f"turn spans are not contiguous at token {edge}: {span}")
            edge = span.end
        if edge != len(self.token_ids):
            raise LedgerError(f"turn spans cover {edge} of {len(self.token_ids)} tokens")

    def _append(
        self,
        ids: list[int],
        sampled: int,
        log_probs: list[float],
        versions: list[int],
        kind: SpanKind,
        turn: int,
    ) -> None:
        """The one place where tokens enter a record. A token is trained because it was sampled, so provenance and mask
        bit are written beside it from the same number; a bit changes later only by `clear_mask` and `set_mask`."""
        start, bits = len(self.token_ids), [sampled] * len(ids)
        self.token_ids.extend(ids)
        self.sampled.extend(bits)
        self.loss_mask.extend(bits)
        self.rollout_log_probs += log_probs
        self.policy_versions += versions
        self.turns.append(TurnSpan(kind, start, start + len(ids), turn))


@dataclass
class Ledger:
    """The records of one trajectory, and the only code that appends tokens to them.

    The last record is open. Earlier ones hold what the model read and wrote before its history was rewritten. Only
    tokens are known here: messages and the engine are the session's (`verl_mt.rollout.session`).
    """

    records: list[TrajectoryRecord] = field(default_factory=lambda: [TrajectoryRecord()])
    num_cut_tokens: int = 0
    """Taken back from the ends of turns."""

    @property
    def record(self) -> TrajectoryRecord:
        """The token stream that the next turn extends."""
        return self.records[-1]

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the first prompt, over all records. A later record's prompt repeats what was counted. What was
        taken back counts too: a loop that does so again and again must come to an end."""
        return sum(len(r.token_ids) - r.num_prompt_tokens for r in self.records) + self.num_cut_tokens

    def append_observation(self, ids: list[int], *, turn: int) -> None:
        """Append what nobody sampled, behind assistant turn `turn`: the record's prompt, then observations."""
        self.record.append_given(ids, kind="observation" if self.record.turns else "prompt", turn=turn)

    def sampled(self, ids: list[int], log_probs: list[float] | None, versions: list[int], *, turn: int) -> None:
        """Append what the engine produced as assistant turn `turn`, counted from 1 through all records.

        Raises:
            LedgerError: log-probs or versions are missing or of another length.
        """
        self.record.append_sampled(ids, log_probs, versions, turn=turn)

    def fork(self, prompt_ids: list[int], *, turn: int) -> bool:
        """Begin a new record with another prompt.

        What was sampled was sampled behind the tokens of its own record: to realign it with another history would give
        it log-probs that nobody computed. So the old record stays as it is, and is trained as it is.

        Returns:
            Whether it stays. A record of which nothing was sampled taught nobody anything, and is replaced.
        """
        stays = any(self.record.sampled)
        if stays:
            self.records.append(TrajectoryRecord())
        else:
            self.records[-1] = TrajectoryRecord()
        self.append_observation(prompt_ids, turn=turn)
        return stays

    def cut(self, keep: int) -> int:
        """Take back the tokens of the open record from position `keep` on. Returns how many of them were sampled."""
        self.num_cut_tokens += len(self.record.token_ids) - keep
        return self.record.cut(keep)
