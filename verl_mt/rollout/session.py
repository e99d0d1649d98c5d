"""One conversation: `RolloutSession` asks the engine for turns, reads them, and says when it is over.

Two verbs. `generate`: the engine samples a turn. Ids, log-probs and policy versions enter the ledger as they came.
`extend`: messages of a tool, an interaction or a user are queued. They are rendered as one delta when the next turn
begins, so adjacent messages merge as the template merges them, and no text is rendered that no model reads.

Loops (`tool_loop`) decide what happens next. They see messages, not tokens. Only the session's ledger
(`verl_mt.data.ledger`) appends tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mt.chat.sanity import Finding, SanityMode, check, combine
from verl_mt.chat.text_delta import turn_ids
from verl_mt.data.conversation import Message, ParsedTurn
from verl_mt.data.ledger import Ledger, TrajectoryRecord
from verl_mt.data.media import has_media
from verl_mt.data.requests import FinishReason, GenerationOutput, GenerationRequest
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory
from verl_mt.errors import EngineGoneError, LedgerError
from verl_mt.rollout.context import SessionContext, deadline_error, session_error, warn_of_deadline
from verl_mt.rollout.loss_scale import apply_loss_scale, train_prompt_assistants
from verl_mt.rollout.turn_log import log_turn
from verl_mt.user_code import fair_turn

__all__ = ["AssistantTurn", "RolloutSession", "SessionContext", "deadline_error", "session_error"]

_CLOCK_SLACK_S = 0.05
"""An engine's clock may be a little ahead of this process's."""


@dataclass(frozen=True)
class AssistantTurn:
    """One sampled turn as a loop sees it."""

    text: str
    """What the model wrote, without its end-of-turn token."""
    message: Message
    parsed: ParsedTurn
    finish_reason: FinishReason


@dataclass
class RolloutSession:
    """One trajectory, its ledger, and the engine that writes its turns."""

    context: SessionContext
    trajectory: Trajectory
    order: int = 0
    """Rank among the conversations that run at the same time."""
    attempt: int = 0
    """Restarts after the engine went away."""
    prompt_truncated: bool = False
    """The first prompt was cut to fit. The sanity check does not blame the template for it."""
    ledger: Ledger = field(default_factory=Ledger)
    _queue: tuple[Message, ...] = ()
    """Messages of the environment, rendered with the next turn's generation prompt. Recorded when all of them fit."""
    _given: list[Message] = field(default_factory=list)
    """The data set's prompt."""
    _given_tools: list[dict[str, Any]] = field(default_factory=list)
    _num_given: int = 0
    """The current record begins with this many messages of the data set's prompt. They are trusted."""
    _prompt_messages: int = 0
    """Messages that the current record's prompt renders."""
    _stop: tuple[str, ...] = ()
    """Strings that could end the last turn."""
    _started_s: float = field(default_factory=time.monotonic)

    # ---- where the conversation stands

    @property
    def record(self) -> TrajectoryRecord:
        """The token stream that the next turn extends."""
        return self.ledger.record

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, queued observations included."""
        return self.trajectory.messages

    @property
    def _seen(self) -> list[Message]:
        """The messages without the queued ones."""
        return self.messages[: len(self.messages) - len(self._queue)]

    @property
    def _answered(self) -> list[Message]:
        """The messages that the next turn answers."""
        return list(self.messages)

    @property
    def _engine_session(self) -> str:
        """The engine's name for the conversation."""
        return self.trajectory.trajectory_id

    @property
    def reasoning_key(self) -> str | None:
        """Where a message holds its reasoning, for this template and parser. None where the template shows none."""
        can, parser = self.context.chat.capabilities, self.context.parser
        if can.reasoning_content != "ignored":
            return can.reasoning_key
        return parser.reasoning_key if parser is not None and parser.reasoning_key != "reasoning_content" else None

    @property
    def turns_left(self) -> int | None:
        """Assistant turns that remain. None = no limit."""
        limit = self.context.limits.max_assistant_turns
        return None if limit is None else limit - self.trajectory.num_turns

    @property
    def ended(self) -> bool:
        return self.trajectory.stop_reason is not None

    def end(self, reason: StopReason) -> None:
        """The trajectory is over. The first reason stands."""
        if self.trajectory.stop_reason is None:
            self.trajectory.stop_reason = reason

    def count(self, name: str, amount: float) -> None:
        """Add to one of the trajectory's counters."""
        if amount:
            self.trajectory.counters[name] = self.trajectory.counters.get(name, 0) + amount

    # ---- what is given

    def start(
        self,
        prompt_ids: list[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        num_trusted: int | None = None,
    ) -> None:
        """Begin with a first prompt, its generation prompt included. A driver may begin again with another one.

        Args:
            num_trusted: this many of the messages, the first ones, are the data set's. None = all.
        """
        trajectory, self.ledger = self.trajectory, Ledger()
        trajectory.messages = [dict(m) for m in messages]
        trajectory.tools = list(tools)
        trajectory.records = self.ledger.records
        self._given, self._given_tools = list(trajectory.messages), list(tools)
        self._prompt_messages = len(trajectory.messages)
        self._num_given = self._prompt_messages if num_trusted is None else num_trusted
        self.ledger.append_observation(list(prompt_ids), turn=0)
        self._add_media(trajectory.messages, prompt_ids, 0)

    def extend(self, messages: Sequence[Message]) -> None:
        """Queue what the environment says.

        Raises:
            LedgerError: the trajectory has ended.
        """
        self._refuse_after_the_end("extend")
        self._queue = (*self._queue, *messages)
        self.trajectory.messages += messages

    # ---- what is sampled

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> AssistantTurn | None:
        """Sample the next assistant turn and record it. Runs on the rollout's loop. Waits for the engine.

        Args:
            max_tokens: fewer than the limits allow. None = those.
            stop: strings that end this turn, beside the run's own.

        Returns:
            The turn, or None if there was no room for one. `ended` says whether a limit cut the trajectory.

        Raises:
            EngineGoneError: the engine went away. The trajectory is to be thrown away and started again.
            LedgerError: the trajectory has ended, or the engine's output does not fit together.
        """
        self._refuse_after_the_end("generate")
        await fair_turn()
        limits = self.context.limits
        if self.turns_left == 0:
            self.end(StopReason.MAX_ASSISTANT_TURNS)
            return None
        if not self._flush():
            self.end(StopReason.CONTEXT_FULL)
            return None
        left_s = (limits.max_seconds or math.inf) - (time.monotonic() - self._started_s)
        if left_s <= 0:
            self._refuse_if_deterministic(f"rollout.max_seconds={limits.max_seconds}")
            self.end(StopReason.TIME_LIMIT)
            return None
        max_new_tokens, cut_reason = limits.next_turn(len(self.record.token_ids), self.ledger.num_response_tokens)
        if max_tokens is not None and max_tokens < max_new_tokens:
            max_new_tokens, cut_reason = max_tokens, StopReason.MAX_TOKENS_PER_TURN
        self._stop = tuple(dict.fromkeys((*self.context.sampling.stop, *stop)))
        turn = self.trajectory.num_turns + 1
        output = await self._ask(turn, max_new_tokens, left_s)
        self.trajectory.num_turns = turn
        return self._take_turn(turn, output, cut_reason)

    def _flush(self, before: Sequence[int] = (), behind: Sequence[int] = ()) -> bool:
        """Record the queued messages, with ids before and behind them that a subclass adds.

        Returns:
            Whether they, the generation prompt and one more token fit. If not, nothing is recorded.
        """
        queue, record, chat, messages = self._queue, self.record, self.context.chat, self.trajectory.messages
        ids, delta_ids, inserted_end = list(before), [], 0
        if queue:
            tools = self.trajectory.tools or None
            if self.context.use_inference_chat_template and self._production_differs(tools):
                self.record.messages = self._seen
                given = self._num_given
                foreign = len(self._given) - given
                return self._fork(chat.mixed_prompt_ids(messages[:given], messages[given:], tools, num_foreign=foreign))
            last_ids = (ids or record.token_ids)[-1:]
            delta = chat.delta_ids(list(queue), history=self._seen, tools=tools, last_ids=last_ids)
            delta_ids, inserted_end = delta.ids, delta.inserted_end
        media_start = len(record.token_ids) + len(ids)
        ids += [*delta_ids, *behind]
        if not self._fits(len(record.token_ids) + len(ids), len(ids)):
            return False
        self.count("inserted_end_tokens", inserted_end)
        self._add_media(queue, delta_ids, media_start)
        if ids:
            self.ledger.append_observation(ids, turn=self.trajectory.num_turns)
        self._queue = ()
        return True

    def _production_differs(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether production would show the model another text than the record holds.

        Texts are compared, not ids: a turn sampled in other ids than the tokenizer would choose reads the same. And
        only what follows the first prompt: the prompt was rendered once, by the same template.
        """
        chat, record = self.context.chat, self.record
        before = chat.decode(record.token_ids[: record.num_prompt_tokens])
        shown = chat.decode(record.token_ids)[len(before) :]
        production = chat.full_text(self.trajectory.messages, tools, add_generation_prompt=True)
        prompt = chat.full_text(self.trajectory.messages[: self._prompt_messages], tools, add_generation_prompt=True)
        return not (production.startswith(prompt) and production[len(prompt) :].startswith(shown))

    def _fork(self, prompt_ids: Sequence[int]) -> bool:
        """Begin a record with another history as its prompt. False if it and one more token do not fit."""
        trajectory = self.trajectory
        if not self._fits(len(prompt_ids), 0):
            return False
        self.count("forks", int(self.ledger.fork(list(prompt_ids), turn=trajectory.num_turns)))
        self._add_media(trajectory.messages, prompt_ids, 0)
        self._prompt_messages = len(trajectory.messages)
        self._queue = ()
        return True

    def _fits(self, num_tokens: int, num_new: int) -> bool:
        """Whether one more token fits a record of `num_tokens` tokens, `num_new` of them new in the response."""
        return self.context.limits.room(num_tokens, self.ledger.num_response_tokens + num_new)[0] >= 1

    def _add_media(self, messages: Sequence[Message], ids: Sequence[int], start: int) -> None:
        """Record the images and videos of messages whose rendering `ids` begins at token `start`."""
        if has_media(messages):
            self.record.media += [made.moved(start) for made in self.context.chat.media_inputs(messages, ids)]

    async def _ask(self, turn: int, max_new_tokens: int, left_s: float) -> GenerationOutput:
        context, trajectory, name = self.context, self.trajectory, self.trajectory.trajectory_id
        deadline_s = min(context.limits.request_timeout_s, left_s)
        # From names, not from the order of events: the same conversation draws the same numbers however many run beside
        # it. The name holds step, prompt and sample. Another attempt draws the same again (the 0): with other numbers,
        # conversations that last longer than an engine, or than an update, would draw until they are short.
        name_of_turn = f"{context.seed}/{name}/{turn}/0"
        seed = int.from_bytes(hashlib.blake2b(name_of_turn.encode(), digest_size=8).digest(), "big") >> 1
        request = GenerationRequest(
            input_ids=list(self.record.token_ids),
            sampling=replace(context.sampling, max_new_tokens=max_new_tokens, seed=seed, stop=self._stop),
            request_id=f"{name}/{self.attempt}/{turn}",
            session_id=self._engine_session,
            deadline_s=deadline_s,
            limit_s=left_s,
            media={"inputs": list(self.record.media)} if self.record.media else {},
        )
        begun = time.monotonic()
        output = await context.engine.generate(request)
        seconds = time.monotonic() - begun
        await fair_turn()
        trajectory.time_spans += _time_spans(begun, seconds, output, turn)
        if output.finish_reason == "abort":
            # An abort before the deadline is the engine's own: it is shutting down, or was restarted. What it sampled
            # until then is thrown away with the whole trajectory, which is started again.
            if seconds < deadline_s - _CLOCK_SLACK_S:
                raise EngineGoneError(f"{request.request_id}: the engine aborted the request")
            self._refuse_if_deterministic(f"the request's deadline of {deadline_s:.1f} s")
            self.count("deadlines", 1)
            if deadline_s == context.limits.request_timeout_s:
                warn_of_deadline(deadline_s)
        return output

    def _take_turn(self, turn: int, output: GenerationOutput, cut_reason: StopReason) -> AssistantTurn:
        """Record the engine's output, read it, and end the trajectory where it was cut."""
        trajectory, chat, parser = self.trajectory, self.context.chat, self.context.parser
        start = len(self.record.token_ids)
        if output.token_ids is None:
            text = self._take_text(turn, output)
        else:
            self._refuse_placeholders(output.token_ids)
            versions = [span.version for span in output.version_spans for _ in range(span.num_tokens)]
            self.ledger.sampled(output.token_ids, output.log_probs, versions, turn=turn)
            text = chat.turn_text(self.record.token_ids[start:])
        parsed = ParsedTurn(content=text)
        if parser is not None:
            parsed = parser.parse(text, trajectory.tools, in_reasoning=chat.prefilled_reasoning)
            parsed = parsed.with_ids(f"call_{turn}_")
        trajectory.turn_texts.append(text)
        if output.replica is not None:
            trajectory.replicas.append(output.replica)
        message = self._add_message(text, parsed)
        for name, amount in (("cached_tokens", output.cached_tokens), ("input_tokens", start)):
            self.count(name, amount)
            self.count(f"{name}/{turn}", amount)
        self._end_if_cut(output.finish_reason, cut_reason)
        log_turn(trajectory, self.record, parsed, text, output.finish_reason)
        return AssistantTurn(text, message, parsed, output.finish_reason)

    def _end_if_cut(self, finish_reason: FinishReason, limit: StopReason) -> None:
        """End the trajectory if its last turn was cut by `limit` or by the request's deadline."""
        if finish_reason == "length":
            self.end(limit)
        elif finish_reason == "abort":
            self.end(StopReason.TIME_LIMIT)

    def _refuse_placeholders(self, ids: Sequence[int]) -> None:
        """A model must not say the token of an image: no forward pass could tell it from an image that is missing."""
        forged = self.context.chat.placeholder_ids.intersection(ids)
        if forged:
            raise LedgerError(
                f"{self.trajectory.trajectory_id}: the model sampled {self.context.chat.decode(sorted(forged))!r}, "
                "which stands for an image or a video that does not exist. The trajectory cannot be trained"
            )

    def _take_text(self, turn: int, output: GenerationOutput) -> str:
        """An engine that yields only text: find the ids by the delta method."""
        assert output.text is not None, "an engine returns token_ids or text"
        message = {"role": "assistant", "content": output.text}
        # What a stop string ended has no end of turn, and none is invented.
        stopped = any(output.text.endswith(string) for string in self._stop)
        complete = output.finish_reason == "stop" and not stopped
        tools = self.trajectory.tools or None
        ids = turn_ids(self.context.chat, self._answered, message, tools=tools, complete=complete)
        version = output.version_spans[0].version if output.version_spans else self.context.engine.version
        self.ledger.sampled(ids, None, [version] * len(ids), turn=turn)
        return output.text

    def _add_message(self, text: str, parsed: ParsedTurn) -> Message:
        """Write the turn into the messages."""
        self.messages.append(self._message(text, parsed))
        return self.messages[-1]

    def _message(self, text: str, parsed: ParsedTurn) -> Message:
        parser = self.context.parser
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            if (key := self.reasoning_key) is not None:
                message[key] = parsed.reasoning
            elif not parsed.calls:
                # This template ignores `reasoning_content`; the text as written is what it can render.
                message["content"] = text
        if parsed.calls and not (parser is not None and parser.calls_in_content):
            message["tool_calls"] = [call.to_message() for call in parsed.calls]
        return message

    # ---- when it is over

    async def finish(self) -> None:
        """Verify the ledger and run the sanity check on every record. Call once, after the trajectory ended.

        Runs on the rollout's loop. Waits for the sanity check, in the thread `sanity`.

        A long conversation takes a second to render and compare: a thread does it, so that others go on meanwhile. In
        a deterministic run all wait for each other anyway, and the order in which findings are counted may not depend
        on a clock.
        """
        context, trajectory = self.context, self.trajectory
        if self._queue:
            trajectory.counters["unread_messages"] = len(self._queue)
        for record in trajectory.records:
            record.check()
        if context.sanity.mode is SanityMode.OFF or context.deterministic:
            found = self._checked()
        else:
            found = await asyncio.get_running_loop().run_in_executor(context.sanity.thread, self._checked)
        # Only now: the check asks what was sampled, and a mask that trains more or less of it is no finding.
        if context.train_prompt_assistants and not self.prompt_truncated:
            first, tools = trajectory.records[0], self._given_tools or None
            added = train_prompt_assistants(context.chat, first, self._given, tools)
            self.count("trained_given_tokens", added)
        if context.loss_scale is not None and trajectory.num_turns:
            apply_loss_scale(context.loss_scale, context.chat, trajectory)
        context.sanity.observe(found, trajectory.prompt_id.rpartition(".")[0])
        trajectory.sanity = found.to_row() if found is not None else None

    def _checked(self) -> Finding | None:
        """The sanity check's finding; changes nothing."""
        trajectory = self.trajectory
        cut = trajectory.stop_reason is not None and trajectory.stop_reason.status == "truncated"
        findings = [
            check(
                self.context.chat,
                messages=record.messages or self._seen,
                tools=(trajectory.tools if record.tools is None else record.tools) or None,
                token_ids=record.token_ids,
                sampled=record.sampled,
                mode=self.context.sanity.mode,
                stop_length=cut and record is self.record,
                prompt_truncated=self.prompt_truncated and k == 0,
            )
            for k, record in enumerate(trajectory.records)
        ]
        return combine(findings)

    def _refuse_after_the_end(self, verb: str) -> None:
        if self.ended:
            trajectory = self.trajectory
            raise LedgerError(f"{trajectory.trajectory_id}: {verb}() after the end ({trajectory.stop_reason})")

    def _refuse_if_deterministic(self, what: str) -> None:
        if self.context.deterministic:
            raise deadline_error(self.trajectory, what)


def _time_spans(begun: float, seconds: float, output: GenerationOutput, turn: int) -> list[TimeSpan]:
    """A request's phases. What the engine cannot have seen (on the way to it and back, in a lock step) is waiting."""
    edge, timings, spans = begun, output.timings, []
    unseen = seconds - timings.queue_s - timings.prefill_s - timings.decode_s
    phases = (
        ("queue", timings.queue_s + max(0.0, unseen)),
        ("prefill", timings.prefill_s),
        ("decode", timings.decode_s),
    )
    for phase, taken in phases:
        if taken > 0:
            spans.append(TimeSpan(phase, edge, edge + taken, turn))  # type: ignore[arg-type]
            edge += taken
    return spans
