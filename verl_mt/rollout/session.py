"""One conversation and its ledger: the only code that appends tokens to a trajectory.

Two verbs. `generate`: the engine samples a turn; ids, log-probs and policy version are recorded as they came.
`extend`: messages of a tool, an interaction or a user are queued, and rendered as one delta when the next turn begins,
so that adjacent ones merge the way the template merges them, and nothing is rendered that no model ever reads.

Loops (`tool_loop`, a scheduler, a custom function) decide what happens next; they see messages, not tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl_mt.chat.sanity import Finding, SanityMode, check, combine
from verl_mt.chat.text_delta import turn_ids
from verl_mt.data.conversation import Message, ParsedTurn
from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.data.trajectory import StopReason, TimeSpan
from verl_mt.errors import EngineGoneError, LedgerError
from verl_mt.rollout.ledger import Ledger
from verl_mt.rollout.mask import apply_loss_scale, train_prompt_assistants
from verl_mt.rollout.session_context import AssistantTurn, SessionContext, deadline_error, session_error
from verl_mt.rollout.turn_log import log_turn

__all__ = ["AssistantTurn", "RolloutSession", "SessionContext", "deadline_error", "session_error"]

_CLOCK_SLACK_S = 0.05


@dataclass
class RolloutSession(Ledger):
    """The ledger of one trajectory, and the engine that writes its turns."""

    _stop: tuple[str, ...] = ()
    """Strings that could end the last turn."""

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> AssistantTurn | None:
        """Sample the next assistant turn and record it.

        Args:
            max_tokens: fewer than the limits allow; None = those.
            stop: strings that end this turn, beside the run's own.

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
            self.end(self.cut_reason or StopReason.CONTEXT_FULL)
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
        if max_tokens is not None and max_tokens < max_new_tokens:
            max_new_tokens, cut_reason = max_tokens, StopReason.MAX_TOKENS_PER_TURN
        output = await self._ask(turn, max_new_tokens, remaining_s, stop)
        self.trajectory.num_turns = turn
        return self._record_turn(turn, output, cut_reason)

    async def finish(self) -> None:
        """Verify the ledger and run the sanity check on every record. Call once, after the trajectory ended.

        A long conversation takes a second to render and compare: a thread does it, so that others go on meanwhile. In
        a deterministic run all wait for each other anyway, and the order in which findings are counted may not depend
        on a clock.
        """
        trajectory, sanity = self.trajectory, self.context.sanity
        if self._pending:
            trajectory.counters["unread_messages"] = len(self._pending)
        for record in trajectory.records:
            record.check()
        if sanity.mode is SanityMode.OFF or self.context.deterministic:
            found = self._checked()
        else:
            found = await asyncio.get_running_loop().run_in_executor(sanity.thread, self._checked)
        self._set_masks()
        sanity.observe(found)
        trajectory.sanity = found.to_row() if found is not None else None

    def _checked(self) -> Finding | None:
        """The sanity check's finding; changes nothing."""
        trajectory = self.trajectory
        seen = trajectory.messages[: len(trajectory.messages) - len(self._pending)]
        cut = trajectory.stop_reason is not None and trajectory.stop_reason.status == "truncated"
        findings = []
        for k, record in enumerate(trajectory.records):
            finding = check(
                self.context.chat,
                messages=record.messages or seen,
                tools=(trajectory.tools if record.tools is None else record.tools) or None,
                token_ids=record.token_ids,
                sampled=record.sampled,
                mode=self.context.sanity.mode,
                stop_length=cut and record is self.record,
                prompt_truncated=self.prompt_truncated and k == 0,
            )
            findings.append(finding)
        return combine(findings)

    def _set_masks(self) -> None:
        context, trajectory = self.context, self.trajectory
        first = trajectory.records[0]
        if context.train_prompt_assistants and not self.prompt_truncated:
            added = train_prompt_assistants(context.chat, first, self._given, self._given_tools or None)
            self.count("trained_given_tokens", added)
        if context.loss_scale is not None and not self.mask_given and self.rounds:
            apply_loss_scale(context.loss_scale, context.chat, trajectory, self.rounds)

    async def _ask(
        self, turn: int, max_new_tokens: int, remaining_s: float | None, stop: Sequence[str]
    ) -> GenerationOutput:
        context, trajectory = self.context, self.trajectory
        deadline_s = min(context.limits.request_timeout_s, remaining_s if remaining_s is not None else float("inf"))
        self._stop = tuple(dict.fromkeys((*context.sampling.stop, *stop)))
        seed = self._turn_seed(turn)
        request = GenerationRequest(
            input_ids=list(self.record.token_ids),
            sampling=replace(context.sampling, max_new_tokens=max_new_tokens, seed=seed, stop=self._stop),
            request_id=f"{trajectory.trajectory_id}/{self.attempt}/{turn}",
            session_id=self.engine_session or trajectory.trajectory_id,
            deadline_s=deadline_s,
            media={"inputs": list(self.record.media)} if self.record.media else {},
        )
        begun = time.monotonic()
        output = await context.engine.generate(request)
        self._time_spans(begun, output, turn)
        if output.finish_reason == "abort":
            # An engine's clock may be a little ahead of ours.
            if time.monotonic() - begun < deadline_s - _CLOCK_SLACK_S:
                raise EngineGoneError(f"{request.request_id}: the engine aborted the request")
            self._refuse_if_deterministic(f"the request's deadline of {deadline_s:.1f} s")
            self.count("deadlines", 1)
        return output

    def _record_turn(self, turn: int, output: GenerationOutput, cut_reason: StopReason) -> AssistantTurn:
        context = self.context
        start = len(self.record.token_ids)
        if output.token_ids is None:
            self._record_text(turn, output)
        else:
            versions = [span.version for span in output.version_spans for _ in range(span.num_tokens)]
            self._refuse_placeholders(output.token_ids)
            self.record.append_sampled(output.token_ids, output.log_probs, versions, turn=turn)
        ids = self.record.token_ids[start:]
        text = context.chat.turn_text(ids) if output.text is None or output.token_ids is not None else output.text
        if context.parser is not None:
            parsed = context.parser.parse(text, self.trajectory.tools, in_reasoning=context.chat.prefilled_reasoning)
            parsed = parsed.with_ids(f"call_{turn}_")
        else:
            parsed = ParsedTurn(content=text)
        self.trajectory.turn_texts.append(text)
        message = self._add_message(text, parsed)
        for name, amount in (("cached_tokens", output.cached_tokens), ("input_tokens", start)):
            self.count(name, amount)
            self.count(f"{name}/{turn}", amount)
        self.cut_reason = cut_reason if output.finish_reason == "length" else None
        if self.cut_reason is not None and not self.verbatim:
            self.end(self.cut_reason)
        elif output.finish_reason == "abort":
            self.end(StopReason.TIME_LIMIT)
        log_turn(self.trajectory, parsed, text, output.finish_reason)
        return AssistantTurn(text, message, parsed, output.finish_reason)

    def _refuse_placeholders(self, ids: Sequence[int]) -> None:
        """A model must not say the token of an image: no forward pass could tell it from an image that is missing."""
        forged = self.context.chat.placeholder_ids.intersection(ids)
        if forged:
            raise LedgerError(
                f"{self.trajectory.trajectory_id}: the model sampled {self.context.chat.decode(sorted(forged))!r}, "
                "which stands for an image or a video that does not exist; the trajectory cannot be trained"
            )

    def _record_text(self, turn: int, output: GenerationOutput) -> None:
        """An engine that yields only text: find the ids by the delta method."""
        assert output.text is not None, "an engine returns token_ids or text"
        message = {"role": "assistant", "content": output.text}
        # What a stop string ended has no end of turn, and none is invented.
        stopped = any(output.text.endswith(string) for string in self._stop)
        complete = output.finish_reason == "stop" and not stopped
        tools = self.trajectory.tools or None
        history = self.trajectory.messages[: len(self.trajectory.messages) - self._continues]
        ids = turn_ids(self.context.chat, history, message, tools=tools, complete=complete)
        version = output.version_spans[0].version if output.version_spans else self.context.engine.version
        self.record.append_sampled(ids, None, [version] * len(ids), turn=turn)

    def _add_message(self, text: str, parsed: ParsedTurn) -> Message:
        """Write the turn into the messages: as one of its own, or at the end of the one that it goes on inside."""
        messages = self.trajectory.messages
        last_round = self.rounds[-1] if self.rounds else -1
        if self._continues:
            self.rounds.append(max(last_round, 0))
            messages[-1] = {**messages[-1], "content": str(messages[-1]["content"] or "") + text}
        else:
            self.rounds.append(last_round + 1)
            self.message_prefix, self._prefill = self._prefill, ""
            messages.append(self._message(self.message_prefix + text, parsed))
        self._continues = False
        self.message_rounds[len(messages) - 1] = self.rounds[-1]
        return messages[-1]

    @property
    def reasoning_key(self) -> str | None:
        """Where a message holds its reasoning, for this template and parser; None where the template shows none."""
        can, parser = self.context.chat.capabilities, self.context.parser
        if can.reasoning_content != "ignored":
            return can.reasoning_key
        return parser.reasoning_key if parser is not None and parser.reasoning_key != "reasoning_content" else None

    def _message(self, text: str, parsed: ParsedTurn) -> Message:
        if self.verbatim:
            return {"role": "assistant", "content": text}
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

    def _refuse_if_deterministic(self, what: str) -> None:
        if self.context.deterministic:
            raise deadline_error(self.trajectory, what)

    def _turn_seed(self, turn: int) -> int:
        """From (run, trajectory, turn, attempt); the trajectory's id holds step, prompt and sample."""
        text = f"{self.context.seed}/{self.trajectory.trajectory_id}/{turn}/{self.attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def _remaining_s(self) -> float | None:
        limit = self.context.limits.max_seconds
        return None if limit is None else limit - (time.monotonic() - self._started_s)

    def _time_spans(self, begun: float, output: GenerationOutput, turn: int) -> None:
        """What the engine cannot have seen (on the way to it and back, in a lock step) counts as waiting."""
        edge, timings = begun, output.timings
        unseen = time.monotonic() - begun - timings.queue_s - timings.prefill_s - timings.decode_s
        for phase, seconds in (
            ("queue", timings.queue_s + max(0.0, unseen)),
            ("prefill", timings.prefill_s),
            ("decode", timings.decode_s),
        ):
            if seconds > 0:
                self.trajectory.time_spans.append(TimeSpan(phase, edge, edge + seconds, turn))  # type: ignore[arg-type]
                edge += seconds
