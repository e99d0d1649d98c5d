"""The ledger of one conversation: what is recorded, and what the next turn will read behind it.

Everything that is not sampled comes in here: messages of the environment (`extend`), ids or text inside an unfinished
assistant message (`extend_ids`, `reopen`, `prefill`), another history (`rewrite`). It is queued, and recorded when the
next turn begins, if there is room for it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.data.media import has_media
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import LedgerError
from verl_mt.rollout.session_context import SessionContext

_QUEUED = (
    "message_rounds", "message_prefix", "_pending", "_tail_ids", "_prefill", "_prefill_ids", "_new_prompt",
    "_continues", "_num_given",
)  # fmt: skip
"""Fields that say what the next turn will read."""


@dataclass
class Ledger:
    """What is recorded of one trajectory, and what is queued for its next turn.

    `order` ranks conversations that run at the same time; `attempt` counts restarts after the engine went away.
    """

    context: SessionContext
    trajectory: Trajectory
    order: int = 0
    attempt: int = 0
    prompt_truncated: bool = False
    """The first prompt was cut to fit; the sanity check does not blame the template for it."""
    engine_session: str | None = None
    """The engine's name for the conversation; None = the trajectory's id."""
    verbatim: bool = False
    """The loop reads turns itself: messages hold the text as written, and a turn cut by length does not end the
    trajectory (`cut_reason` tells)."""
    cut_reason: StopReason | None = None
    """The length limit that cut the last turn; None where it ended itself."""
    rounds: list[int] = field(default_factory=list)
    """For each assistant turn, the number of its message among the assistant messages, from 0: turns that go on inside
    one message share it."""
    mask_given: bool = False
    """A loop decided itself what is trained (`response_loss_mask`): the run's loss scale is not applied."""
    message_rounds: dict[int, int] = field(default_factory=dict)
    """Place of a message that this record's turns wrote -> its round."""
    message_prefix: str = ""
    """How the last assistant message began before its first sampled token in this record."""
    _pending: list[Message] = field(default_factory=list)
    _tail_ids: list[int] = field(default_factory=list)
    """Given ids that go on inside the last assistant message; recorded with the next turn."""
    _prefill: str = ""
    _prefill_ids: list[int] = field(default_factory=list)
    """Given ids that begin the next assistant message; recorded with the next turn."""
    _new_prompt: list[int] | None = None
    """History was rewritten: what the next turn reads instead of the record."""
    _continues: bool = False
    """The next turn goes on inside the last message."""
    _num_cut_tokens: int = 0
    _started_s: float = field(default_factory=time.monotonic)
    _given: list[Message] = field(default_factory=list)
    """The data set's prompt."""
    _given_tools: list[dict[str, Any]] = field(default_factory=list)
    _num_given: int = 0
    """How many messages of it the current record begins with: the ones that are trusted."""
    _prompt_messages: int = 0
    """Messages that the current record's prompt renders."""

    def start(self, prompt_ids: list[int], messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Begin with a first prompt, its generation prompt included."""
        trajectory = self.trajectory
        trajectory.messages = [dict(m) for m in messages]
        trajectory.tools = list(tools)
        trajectory.records = [TrajectoryRecord()]
        self._given, self._given_tools = list(trajectory.messages), list(tools)
        self._num_given = self._prompt_messages = len(trajectory.messages)
        self.record.append_given(list(prompt_ids), kind="prompt", turn=0)
        self._add_media(trajectory.messages, prompt_ids, 0)

    @property
    def record(self) -> TrajectoryRecord:
        """The token stream that the next turn extends."""
        return self.trajectory.records[-1]

    @property
    def ended(self) -> bool:
        return self.trajectory.stop_reason is not None

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, queued observations included."""
        return self.trajectory.messages

    @property
    def message_start(self) -> int:
        """Where the last assistant message's first sampled token is in the record; the record's end without one."""
        starts = [
            span.start
            for span in self.record.turns
            if span.kind == "assistant" and self.rounds[span.turn - 1] == self.rounds[-1]
        ]
        return min(starts, default=len(self.record.token_ids))

    @property
    def turns_left(self) -> int | None:
        """Assistant turns that remain; None = no limit."""
        limit = self.context.limits.max_assistant_turns
        return None if limit is None else limit - self.trajectory.num_turns

    def end(self, reason: StopReason) -> None:
        """The trajectory is over. The first reason stands."""
        if self.trajectory.stop_reason is None:
            self.trajectory.stop_reason = reason

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """What is queued in the block is taken back if it raises before anything was recorded (a template that refuses
        a role, say): the conversation then stands where it stood."""
        trajectory, record = self.trajectory, self.record
        queued = {name: copy.copy(getattr(self, name)) for name in _QUEUED}
        told = (list(trajectory.messages), trajectory.tools, record.messages, record.tools)
        stood = (len(trajectory.records), len(record.token_ids))
        try:
            yield
        except BaseException:
            if (len(trajectory.records), len(self.record.token_ids)) == stood and self.record is record:
                trajectory.messages, trajectory.tools, record.messages, record.tools = told
                for name, value in queued.items():
                    setattr(self, name, value)
            raise

    def extend(self, messages: Sequence[Message]) -> None:
        """Queue what the environment says; rendered with the next turn's generation prompt.

        Raises:
            LedgerError: the trajectory has ended.
        """
        if self.ended:
            raise self._after_the_end("extend")
        self._continues = False
        self._pending += messages
        self.trajectory.messages += messages

    def extend_ids(self, ids: Sequence[int], message: Message) -> None:
        """Queue what the environment says as ids that somebody else made; `message` is how to show it.

        Raises:
            LedgerError: the trajectory has ended, or messages are queued that would have to be rendered first.
        """
        if self.ended:
            raise self._after_the_end("extend_ids")
        if self._pending:
            raise LedgerError(f"{self.trajectory.trajectory_id}: extend_ids() behind messages not rendered yet")
        self._tail_ids = [*self._tail_ids, *ids]
        self.trajectory.messages.append(message)

    def reopen(self, content: str, *, keep: int, ids: Sequence[int]) -> None:
        """Go on inside the last assistant message: take back tokens from its end, and put given ones in their place.

        Args:
            content: the message's text as it now stands.
            keep: how many tokens of the record stay; what is cut is counted.
            ids: what follows them; not sampled, not trained. Recorded with the next turn, if it fits.

        Raises:
            LedgerError: the trajectory has ended, or `keep` reaches before the last assistant message.
        """
        if self.ended:
            raise self._after_the_end("reopen")
        first = self.message_start
        if not first <= keep <= len(self.record.token_ids):
            raise LedgerError(
                f"{self.trajectory.trajectory_id}: cannot keep {keep} tokens: the last assistant message is "
                f"[{first}, {len(self.record.token_ids)}) of the record"
            )
        self._cut(keep)
        self._tail_ids = list(ids)
        self._continues = True
        self.messages[-1] = {**self.messages[-1], "content": content}

    def prefill(self, content: str) -> None:
        """The next assistant message begins like this: not sampled, not trained."""
        if self.ended:
            raise self._after_the_end("prefill")
        self._prefill, self._prefill_ids = content, self.context.chat.continuation_ids(content)

    def rewrite(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """The next turn reads other messages than the record holds: what was sampled stays, in its own record.

        A last assistant message is unfinished: the next turn goes on inside it. Messages that the data set's prompt
        begins with too are trusted, all others are plain text.
        """
        if self.ended:
            raise self._after_the_end("rewrite")
        trajectory, chat, given = self.trajectory, self.context.chat, self._given
        seen = trajectory.messages[: len(trajectory.messages) - len(self._pending)]
        if any(self.record.sampled):
            self.record.messages = seen
            if list(tools) != trajectory.tools:
                self.record.tools = trajectory.tools
        self._continues = bool(messages) and messages[-1]["role"] == "assistant"
        shown = list(messages[:-1] if self._continues else messages)
        trusted = 0
        while trusted < min(len(shown), len(given)) and shown[trusted] == given[trusted]:
            trusted += 1
        trajectory.messages, trajectory.tools = list(messages), list(tools)
        self._num_given, self._pending, self._tail_ids = trusted, [], []
        self.message_rounds = {}
        self._prefill, self._prefill_ids = "", []
        self._new_prompt = chat.mixed_prompt_ids(shown[:trusted], shown[trusted:], tools or None)
        if self._continues:
            self.message_prefix = str(messages[-1]["content"] or "")
            self._new_prompt += chat.continuation_ids(self.message_prefix)

    @property
    def _num_response_tokens(self) -> int:
        """Tokens after the first prompt, over all records; a later record's prompt repeats what was counted. What was
        taken back counts too: a loop that does so again and again must come to an end."""
        kept = sum(len(r.token_ids) - r.num_prompt_tokens for r in self.trajectory.records)
        return kept + self._num_cut_tokens

    def _flush(self) -> bool:
        """Record what is queued. False if it, the generation prompt and one more token do not fit."""
        record, limits, chat = self.record, self.context.limits, self.context.chat
        if self._new_prompt is not None:
            return self._open_record(self._new_prompt)
        ids = list(self._tail_ids)
        delta_ids: list[int] = []
        inserted_end = 0
        if self._pending:
            tools = self.trajectory.tools or None
            history = self.trajectory.messages[: len(self.trajectory.messages) - len(self._pending)]
            if self.context.use_inference_chat_template and self._production_differs(tools):
                return self._fork(tools)
            delta = chat.delta_ids(self._pending, history=history, tools=tools, last_ids=(ids or record.token_ids)[-1:])
            ids += delta.ids
            delta_ids, inserted_end = delta.ids, delta.inserted_end
        ids += self._prefill_ids
        if limits.room(len(record.token_ids) + len(ids), self._num_response_tokens + len(ids))[0] < 1:
            return False
        self.count("inserted_end_tokens", inserted_end)
        self._add_media(self._pending, delta_ids, len(record.token_ids) + len(self._tail_ids))
        if ids:
            record.append_given(ids, kind="observation", turn=self.trajectory.num_turns)
        self._pending, self._tail_ids, self._prefill_ids = [], [], []
        return True

    def _production_differs(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether production would show the model another text than the record holds.

        Texts are compared, not ids: a turn sampled in other ids than the tokenizer would choose reads the same.
        """
        chat, record = self.context.chat, self.record
        before = chat.decode(record.token_ids[: record.num_prompt_tokens])
        shown = chat.decode(record.token_ids)[len(before) :]
        production = chat.full_text(self.trajectory.messages, tools, add_generation_prompt=True)
        prompt = chat.full_text(self.trajectory.messages[: self._prompt_messages], tools, add_generation_prompt=True)
        return not (production.startswith(prompt) and production[len(prompt) :].startswith(shown))

    def _fork(self, tools: list[dict[str, Any]] | None) -> bool:
        """Production would show another history: the next turn reads that."""
        messages, given = self.trajectory.messages, self._num_given
        self.record.messages = messages[: len(messages) - len(self._pending)]
        return self._open_record(self.context.chat.mixed_prompt_ids(messages[:given], messages[given:], tools))

    def _open_record(self, prompt_ids: list[int]) -> bool:
        """History was rewritten: what the model really saw stays in its own record, and a new one begins."""
        trajectory, prompt_ids = self.trajectory, [*prompt_ids, *self._prefill_ids]
        if self.context.limits.room(len(prompt_ids), self._num_response_tokens)[0] < 1:
            return False
        if any(self.record.sampled):
            trajectory.records.append(TrajectoryRecord())
            self.count("forks", 1)
        else:  # nobody has read the old one
            trajectory.records[-1] = TrajectoryRecord()
        self.record.append_given(prompt_ids, kind="prompt", turn=trajectory.num_turns)
        self._add_media(trajectory.messages, prompt_ids, 0)
        self._prompt_messages = len(trajectory.messages)
        self._pending, self._tail_ids, self._prefill_ids, self._new_prompt = [], [], [], None
        return True

    def _add_media(self, messages: Sequence[Message], ids: Sequence[int], start: int) -> None:
        """Record the images and videos of messages whose rendering `ids` begins at token `start`."""
        if has_media(messages):
            self.record.media += [made.moved(start) for made in self.context.chat.media_inputs(messages, ids)]

    def _cut(self, keep: int) -> None:
        record, texts = self.record, self.trajectory.turn_texts
        turns = [s.turn for s in record.turns if s.kind == "assistant" and s.end > keep]
        self._num_cut_tokens += len(record.token_ids) - keep
        self.count("cut_tokens", record.cut(keep))
        left = {s.turn: record.token_ids[s.start : s.end] for s in record.turns if s.kind == "assistant"}
        for turn in turns:
            texts[turn - 1] = self.context.chat.turn_text(left.get(turn, []))

    def _after_the_end(self, verb: str) -> LedgerError:
        trajectory = self.trajectory
        return LedgerError(f"{trajectory.trajectory_id}: {verb}() after the end ({trajectory.stop_reason})")

    def count(self, name: str, amount: float) -> None:
        """Add to one of the trajectory's counters."""
        if amount:
            self.trajectory.counters[name] = self.trajectory.counters.get(name, 0) + amount
