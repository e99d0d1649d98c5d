"""`EditableSession`: a session whose driver also edits the conversation.

The core's session has two verbs, `generate` and `extend`. Schedulers, generate functions and agents need more. They can
go on inside an unfinished message (`extend_ids`, `reopen`, `prefill`) or show the model another history (`rewrite`).
Edits are queued and take effect with the next turn. Sampled tokens stay as they were sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mt.data.conversation import Message, ParsedTurn
from verl_mt.data.requests import FinishReason
from verl_mt.data.trajectory import StopReason
from verl_mt.errors import LedgerError
from verl_mt.rollout.drivers import Episode
from verl_mt.rollout.session import RolloutSession

__all__ = ["EditableSession", "session_of"]


@dataclass(frozen=True)
class _Edits:
    """What the next turn reads besides queued messages. Not recorded before all of it fits.

    Frozen: to put the edits back, keep the object (`unless_refused`).
    """

    tail_ids: tuple[int, ...] = ()
    """User-provided ids that go on inside the last assistant message."""
    opening: str = ""
    """How the next assistant message begins."""
    opening_ids: tuple[int, ...] = ()
    new_prompt: tuple[int, ...] | None = None
    """The history was rewritten: the next turn reads this instead of the record."""
    continues: bool = False
    """The next turn goes on inside the last message."""


@dataclass
class EditableSession(RolloutSession):
    """One trajectory whose messages may be continued, cut back and rewritten."""

    engine_session: str | None = None
    """The engine's name for the conversation; None = the trajectory's id."""
    verbatim: bool = False
    """The loop reads turns itself: messages hold the text as written, and a turn cut by length does not end the
    trajectory (`cut_reason` tells)."""
    cut_reason: StopReason | None = None
    """The length limit that cut the last turn; None where it ended itself."""
    message_rounds: dict[int, int] = field(default_factory=dict)
    """Place of a message that this record's turns wrote -> its number (`Trajectory.round_of`)."""
    message_prefix: str = ""
    """How the last assistant message began before its first sampled token in this record."""
    _edits: _Edits = _Edits()

    @property
    def message_start(self) -> int:
        """Where the last assistant message's first sampled token is in the record; the record's end without one."""
        turns, trajectory = self.record.assistant_turns, self.trajectory
        starts = [span.start for span in turns if trajectory.rounds[span.turn - 1] == trajectory.rounds[-1]]
        return min(starts, default=len(self.record.token_ids))

    def ignore_loss_scale(self) -> None:
        """The loop decides itself which tokens are trained: the run's loss scale is not applied."""
        self.context = replace(self.context, loss_scale=None)

    # ---- edits

    def extend(self, messages: Sequence[Message]) -> None:
        super().extend(messages)
        self._edits = replace(self._edits, continues=False)

    def extend_ids(self, ids: Sequence[int], message: Message) -> None:
        """Queue a text of the environment as ids that the caller encoded; `message` is how to show it.

        Raises:
            LedgerError: the trajectory has ended, or messages are queued that would have to be rendered first.
        """
        self._refuse_after_the_end("extend_ids")
        if self._queue:
            raise LedgerError(f"{self.trajectory.trajectory_id}: extend_ids() behind messages not rendered yet")
        self._edits = replace(self._edits, tail_ids=(*self._edits.tail_ids, *ids))
        self.trajectory.messages.append(message)

    def reopen(self, content: str, *, keep: int, ids: Sequence[int]) -> None:
        """Go on inside the last assistant message: take back tokens from its end, and put `ids` in their place.

        Args:
            content: the message's text as it now stands.
            keep: this many tokens of the record stay. Tokens that are cut are counted.
            ids: they follow the kept tokens, not sampled, not trained. Recorded with the next turn, if they fit.

        Raises:
            LedgerError: the trajectory has ended, or `keep` reaches before the last assistant message.
        """
        self._refuse_after_the_end("reopen")
        record, first = self.record, self.message_start
        if not first <= keep <= len(record.token_ids):
            raise LedgerError(
                f"{self.trajectory.trajectory_id}: cannot keep {keep} tokens: the last assistant message is "
                f"[{first}, {len(record.token_ids)}) of the record"
            )
        touched = [s.turn for s in record.assistant_turns if s.end > keep]
        self.count("cut_tokens", self.ledger.cut(keep))
        left = {s.turn: record.token_ids[s.start : s.end] for s in record.assistant_turns}
        for turn in touched:
            self.trajectory.turn_texts[turn - 1] = self.context.chat.turn_text(left.get(turn, []))
        self._edits = replace(self._edits, tail_ids=tuple(ids), continues=True)
        self.messages[-1] = {**self.messages[-1], "content": content}

    def prefill(self, content: str) -> None:
        """The next assistant message begins with `content`: not sampled, not trained.

        Raises:
            LedgerError: the trajectory has ended.
        """
        self._refuse_after_the_end("prefill")
        ids = self.context.chat.continuation_ids(content)
        self._edits = replace(self._edits, opening=content, opening_ids=tuple(ids))

    def rewrite(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """The next turn reads other messages than the record holds. Sampled tokens stay, in their own record.

        A last assistant message is unfinished: the next turn goes on inside it. Messages that the data set's prompt
        begins with too are trusted, all others are plain text.

        Raises:
            LedgerError: the trajectory has ended.
        """
        self._refuse_after_the_end("rewrite")
        trajectory, chat, given = self.trajectory, self.context.chat, self._given
        # The sanity check compares the old record with the messages that it has seen. Nobody else remembers them.
        if any(self.record.sampled):
            self.record.messages = self._seen
            if list(tools) != trajectory.tools:
                self.record.tools = trajectory.tools
        continues = bool(messages) and messages[-1]["role"] == "assistant"
        shown = list(messages[:-1] if continues else messages)
        # Only what the data set said, word for word and from the beginning, may hold control tokens. Who rewrites the
        # history hands back everything as messages, and cannot be believed that a tool's text is the data set's.
        trusted = 0
        while trusted < min(len(shown), len(given)) and shown[trusted] == given[trusted]:
            trusted += 1
        trajectory.messages, trajectory.tools = list(messages), list(tools)
        self._num_given, self.message_rounds = trusted, {}
        prompt = chat.mixed_prompt_ids(shown[:trusted], shown[trusted:], tools or None)
        if continues:
            self.message_prefix = str(messages[-1]["content"] or "")
            prompt += chat.continuation_ids(self.message_prefix)
        self._queue, self._edits = (), _Edits(new_prompt=tuple(prompt), continues=continues)

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """Take back what the block queued if it raises before anything was recorded (a template refuses a role, say).
        The conversation then stands where it stood."""
        trajectory, record = self.trajectory, self.record
        told = (list(trajectory.messages), trajectory.tools, record.messages, record.tools)
        queued = (self._queue, self._edits, self._num_given, dict(self.message_rounds), self.message_prefix)
        stood = (len(trajectory.records), len(record.token_ids))
        try:
            yield
        except BaseException:
            if (len(trajectory.records), len(self.record.token_ids)) == stood and self.record is record:
                trajectory.messages, trajectory.tools, record.messages, record.tools = told
                self._queue, self._edits, self._num_given, self.message_rounds, self.message_prefix = queued
            raise

    # ---- how edits enter the record and the messages

    def _flush(self, before: Sequence[int] = (), behind: Sequence[int] = ()) -> bool:
        edits = self._edits
        if edits.new_prompt is not None:
            fits = self._fork(edits.new_prompt)
        else:
            fits = super()._flush([*before, *edits.tail_ids], [*behind, *edits.opening_ids])
        if fits:
            self._edits = _Edits(opening=edits.opening, continues=edits.continues)
        elif self.cut_reason is not None:
            self.end(self.cut_reason)
        return fits

    def _fork(self, prompt_ids: Sequence[int]) -> bool:
        return super()._fork([*prompt_ids, *self._edits.opening_ids])

    @property
    def _answered(self) -> list[Message]:
        return self.messages[: len(self.messages) - self._edits.continues]

    @property
    def _engine_session(self) -> str:
        return self.engine_session or super()._engine_session

    def _end_if_cut(self, finish_reason: FinishReason, limit: StopReason) -> None:
        self.cut_reason = limit if finish_reason == "length" else None
        if self.cut_reason is None or not self.verbatim:
            super()._end_if_cut(finish_reason, limit)

    def _add_message(self, text: str, parsed: ParsedTurn) -> Message:
        """Write the turn into the messages: as a new message, or at the end of the one that it goes on inside."""
        messages, rounds, edits = self.messages, self.trajectory.rounds, self._edits
        last_round = rounds[-1] if rounds else -1
        if edits.continues:
            rounds.append(max(last_round, 0))
            messages[-1] = {**messages[-1], "content": str(messages[-1]["content"] or "") + text}
        else:
            rounds.append(last_round + 1)
            self.message_prefix = edits.opening
            super()._add_message(self.message_prefix + text, parsed)
        self._edits = replace(edits, opening=edits.opening if edits.continues else "", continues=False)
        self.message_rounds[len(messages) - 1] = rounds[-1]
        return messages[-1]

    def _message(self, text: str, parsed: ParsedTurn) -> Message:
        return {"role": "assistant", "content": text} if self.verbatim else super()._message(text, parsed)


def session_of(episode: Episode) -> EditableSession:
    """The episode's session, for a driver that says `session_class = EditableSession`."""
    assert isinstance(episode.session, EditableSession)
    return episode.session
