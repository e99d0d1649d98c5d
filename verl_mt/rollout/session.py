"""One conversation and its ledger: the only code that appends tokens to a trajectory.

Two verbs. `generate`: the engine samples a turn; ids, log-probs and policy version are recorded as they came.
`extend`: messages of a tool, an interaction or a user are queued, and rendered as one delta when the next turn begins,
so that adjacent ones merge the way the template merges them, and nothing is rendered that no model ever reads.

Loops (`tool_loop`, a scheduler, a custom function) decide what happens next; they see messages, not tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mt.chat.parsers.base import ToolParser
from verl_mt.chat.sanity import SanityMonitor, check, combine
from verl_mt.chat.template import ChatTemplate
from verl_mt.chat.text_delta import turn_ids
from verl_mt.data.conversation import Message, ParsedTurn
from verl_mt.data.requests import FinishReason, GenerationOutput, GenerationRequest, SamplingParams
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryRecord
from verl_mt.engines.base import InferenceEngine
from verl_mt.errors import DeadlineError, EngineGoneError, LedgerError, VerlMTError
from verl_mt.rollout.limits import Limits

_CLOCK_SLACK_S = 0.05


@dataclass(frozen=True)
class SessionContext:
    """What all conversations of a run share."""

    chat: ChatTemplate
    engine: InferenceEngine
    limits: Limits
    parser: ToolParser | None
    sampling: SamplingParams
    """`max_new_tokens` and `seed` are set per turn."""
    sanity: SanityMonitor
    use_inference_chat_template: bool = False
    deterministic: bool = False
    seed: int = 0


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
    """The ledger of one trajectory.

    `order` ranks conversations that run at the same time; `attempt` counts restarts after the engine went away.
    """

    context: SessionContext
    trajectory: Trajectory
    order: int = 0
    attempt: int = 0
    prompt_truncated: bool = False
    """The first prompt was cut to fit; the sanity check does not blame the template for it."""
    _pending: list[Message] = field(default_factory=list)
    _started_s: float = field(default_factory=time.monotonic)
    _num_given: int = 0
    """Messages of the data set's prompt: the ones that are trusted."""
    _prompt_messages: int = 0
    """Messages that the current record's prompt renders."""
    _message_ends: list[int] = field(default_factory=list)
    """For every record but the last: how many messages it has seen."""

    def start(self, prompt_ids: list[int], messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Begin with a first prompt, its generation prompt included."""
        trajectory = self.trajectory
        trajectory.messages = [dict(m) for m in messages]
        trajectory.tools = list(tools)
        trajectory.records = [TrajectoryRecord()]
        self._num_given = self._prompt_messages = len(trajectory.messages)
        self.record.append_given(list(prompt_ids), kind="prompt", turn=0)

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
    def turns_left(self) -> int | None:
        """Assistant turns that remain; None = no limit."""
        limit = self.context.limits.max_assistant_turns
        return None if limit is None else limit - self.trajectory.num_turns

    def end(self, reason: StopReason) -> None:
        """The trajectory is over. The first reason stands."""
        if self.trajectory.stop_reason is None:
            self.trajectory.stop_reason = reason

    def extend(self, messages: Sequence[Message]) -> None:
        """Queue what the environment says; rendered with the next turn's generation prompt.

        Raises:
            LedgerError: the trajectory has ended.
        """
        if self.ended:
            raise self._after_the_end("extend")
        self._pending += messages
        self.trajectory.messages += messages

    async def generate(self) -> AssistantTurn | None:
        """Sample the next assistant turn and record it.

        Returns:
            The turn, or None if there was no room for one. `ended` says whether a limit cut the trajectory.

        Raises:
            EngineGoneError: the engine went away; the trajectory is to be thrown away and started again.
            LedgerError: the trajectory has ended, or the engine's output does not fit together.
        """
        if self.ended:
            raise self._after_the_end("generate")
        if self.turns_left == 0:
            self.end(StopReason.MAX_ASSISTANT_TURNS)
            return None
        if not self._flush():
            self.end(StopReason.CONTEXT_FULL)
            return None
        remaining_s = self._remaining_s()
        if remaining_s is not None and remaining_s <= 0:
            self._refuse_if_deterministic(f"rollout.max_seconds={self.context.limits.max_seconds}")
            self.end(StopReason.TIME_LIMIT)
            return None
        turn = self.trajectory.num_turns + 1
        max_new_tokens, cut_reason = self.context.limits.next_turn(
            len(self.record.token_ids), self._num_response_tokens
        )
        output = await self._ask(turn, max_new_tokens, remaining_s)
        self.trajectory.num_turns = turn
        return self._record_turn(turn, output, cut_reason)

    def finish(self) -> None:
        """Verify the ledger and run the sanity check on every record. Call once, after the trajectory ended."""
        trajectory = self.trajectory
        if self._pending:
            trajectory.counters["unread_messages"] = len(self._pending)
        ends = [*self._message_ends, len(trajectory.messages) - len(self._pending)]
        cut = trajectory.stop_reason is not None and trajectory.stop_reason.status == "truncated"
        findings = []
        for k, (record, end) in enumerate(zip(trajectory.records, ends, strict=True)):
            record.check()
            finding = check(
                self.context.chat,
                messages=trajectory.messages[:end],
                tools=trajectory.tools or None,
                token_ids=record.token_ids,
                sampled=record.sampled,
                mode=self.context.sanity.mode,
                stop_length=cut and record is self.record,
                prompt_truncated=self.prompt_truncated and k == 0,
            )
            findings.append(finding)
        found = combine(findings)
        self.context.sanity.observe(found)
        trajectory.sanity = found.to_row() if found is not None else None

    @property
    def _num_response_tokens(self) -> int:
        """Tokens after the first prompt, over all records; a later record's prompt repeats what was counted."""
        return sum(len(r.token_ids) - r.num_prompt_tokens for r in self.trajectory.records)

    def _flush(self) -> bool:
        """Render what is queued. False if it, the generation prompt and one more token do not fit."""
        record, limits, chat = self.record, self.context.limits, self.context.chat
        if not self._pending:
            return limits.room(len(record.token_ids), self._num_response_tokens)[0] >= 1
        tools = self.trajectory.tools or None
        history = self.trajectory.messages[: len(self.trajectory.messages) - len(self._pending)]
        if self.context.use_inference_chat_template and self._production_differs(tools):
            return self._fork(tools)
        delta = chat.delta_ids(self._pending, history=history, tools=tools, last_ids=record.token_ids)
        if limits.room(len(record.token_ids) + len(delta.ids), self._num_response_tokens + len(delta.ids))[0] < 1:
            return False
        if delta.inserted_end:
            self._count("inserted_end_tokens", delta.inserted_end)
        record.append_given(delta.ids, kind="observation", turn=self.trajectory.num_turns)
        self._pending = []
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
        """History was rewritten: keep what the model really saw in its own record and open a new one."""
        limits, messages, given = self.context.limits, self.trajectory.messages, self._num_given
        prompt_ids = self.context.chat.mixed_prompt_ids(messages[:given], messages[given:], tools)
        if limits.room(len(prompt_ids), self._num_response_tokens)[0] < 1:
            return False
        record = TrajectoryRecord()
        record.append_given(prompt_ids, kind="prompt", turn=self.trajectory.num_turns)
        self.trajectory.records.append(record)
        self._message_ends.append(len(messages) - len(self._pending))
        self._prompt_messages = len(messages)
        self._pending = []
        self._count("forks", 1)
        return True

    async def _ask(self, turn: int, max_new_tokens: int, remaining_s: float | None) -> GenerationOutput:
        context, trajectory = self.context, self.trajectory
        deadline_s = min(context.limits.request_timeout_s, remaining_s if remaining_s is not None else float("inf"))
        request = GenerationRequest(
            input_ids=list(self.record.token_ids),
            sampling=replace(context.sampling, max_new_tokens=max_new_tokens, seed=self._turn_seed(turn)),
            request_id=f"{trajectory.trajectory_id}/{self.attempt}/{turn}",
            session_id=trajectory.trajectory_id,
            deadline_s=deadline_s,
        )
        begun = time.monotonic()
        output = await context.engine.generate(request)
        self._time_spans(begun, output, turn)
        if output.finish_reason == "abort":
            # An engine's clock may be a little ahead of ours.
            if time.monotonic() - begun < deadline_s - _CLOCK_SLACK_S:
                raise EngineGoneError(f"{request.request_id}: the engine aborted the request")
            self._refuse_if_deterministic(f"the request's deadline of {deadline_s:.1f} s")
            self._count("deadlines", 1)
        return output

    def _record_turn(self, turn: int, output: GenerationOutput, cut_reason: StopReason) -> AssistantTurn:
        context = self.context
        start = len(self.record.token_ids)
        if output.token_ids is None:
            self._record_text(turn, output)
        else:
            versions = [span.version for span in output.version_spans for _ in range(span.num_tokens)]
            self.record.append_sampled(output.token_ids, output.log_probs, versions, turn=turn)
        ids = self.record.token_ids[start:]
        text = context.chat.turn_text(ids) if output.text is None or output.token_ids is not None else output.text
        if context.parser is not None:
            parsed = context.parser.parse(text, self.trajectory.tools, in_reasoning=context.chat.prefilled_reasoning)
            parsed = parsed.with_ids(f"call_{turn}_")
        else:
            parsed = ParsedTurn(content=text)
        self.trajectory.turn_texts.append(text)
        message = self._message(text, parsed)
        self.trajectory.messages.append(message)
        self._count("cached_tokens", output.cached_tokens)
        self._count("input_tokens", start)
        if output.finish_reason == "length":
            self.end(cut_reason)
        elif output.finish_reason == "abort":
            self.end(StopReason.TIME_LIMIT)
        return AssistantTurn(text, message, parsed, output.finish_reason)

    def _record_text(self, turn: int, output: GenerationOutput) -> None:
        """An engine that yields only text: find the ids by the delta method."""
        assert output.text is not None, "an engine returns token_ids or text"
        message = {"role": "assistant", "content": output.text}
        # What a stop string ended has no end of turn, and none is invented.
        stopped = any(output.text.endswith(string) for string in self.context.sampling.stop)
        complete = output.finish_reason == "stop" and not stopped
        tools = self.trajectory.tools or None
        ids = turn_ids(self.context.chat, self.trajectory.messages, message, tools=tools, complete=complete)
        version = output.version_spans[0].version if output.version_spans else self.context.engine.version
        self.record.append_sampled(ids, None, [version] * len(ids), turn=turn)

    def _message(self, text: str, parsed: ParsedTurn) -> Message:
        parser = self.context.parser
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            if self.context.chat.capabilities.reasoning_content != "ignored":
                message["reasoning_content"] = parsed.reasoning
            elif not parsed.calls:
                # This template ignores `reasoning_content`; the text as written is what it can render.
                message["content"] = text
        if parsed.calls and not (parser is not None and parser.calls_in_content):
            message["tool_calls"] = [call.to_message() for call in parsed.calls]
        return message

    def _refuse_if_deterministic(self, what: str) -> None:
        if self.context.deterministic:
            raise deadline_error(self.trajectory, what)

    def _after_the_end(self, verb: str) -> LedgerError:
        trajectory = self.trajectory
        return LedgerError(f"{trajectory.trajectory_id}: {verb}() after the end ({trajectory.stop_reason})")

    def _turn_seed(self, turn: int) -> int:
        """From (run, trajectory, turn, attempt); the trajectory's id holds step, prompt and sample."""
        text = f"{self.context.seed}/{self.trajectory.trajectory_id}/{turn}/{self.attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def _remaining_s(self) -> float | None:
        limit = self.context.limits.max_seconds
        return None if limit is None else limit - (time.monotonic() - self._started_s)

    def _time_spans(self, begun: float, output: GenerationOutput, turn: int) -> None:
        edge = begun
        timings = output.timings
        for phase, seconds in (
            ("queue", timings.queue_s),
            ("prefill", timings.prefill_s),
            ("decode", timings.decode_s),
        ):
            if seconds > 0:
                self.trajectory.time_spans.append(TimeSpan(phase, edge, edge + seconds, turn))  # type: ignore[arg-type]
                edge += seconds

    def _count(self, name: str, amount: float) -> None:
        if amount:
            self.trajectory.counters[name] = self.trajectory.counters.get(name, 0) + amount


def deadline_error(trajectory: Trajectory, what: str) -> DeadlineError:
    """A deadline fired in a run that promises the same bits every time."""
    return DeadlineError(
        f"{trajectory.trajectory_id} (row {trajectory.row_index}, turn {trajectory.num_turns}): {what} was over, and "
        "with trainer.deterministic=True no deadline may fire; raise it, or switch determinism off"
    )


def session_error(trajectory: Trajectory, error: BaseException) -> str:
    """One line that names trajectory, row and turn."""
    kind = "" if isinstance(error, VerlMTError) else f"{type(error).__name__}: "
    return f"{trajectory.trajectory_id} (row {trajectory.row_index}, turn {trajectory.num_turns}): {kind}{error}"
