"""The conversations that one call of a generate function has with the engine, each with its ledger.

A function sends what it believes the conversation to be: as a text (`prompt + response`) or as ids. The part that was
recorded is mapped to the recorded ids, whatever ids a tokenizer would choose for it; only what follows is encoded. So
the engine reads exactly what was sampled before, and nobody's belief about tokens enters a record.

Which conversation is meant? The one whose recorded text the request begins with, the longest first. A request that
begins otherwise opens a new one; one that cuts the last sampled turn short takes its end back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mt.chat.differences import common_prefix
from verl_mt.chat.parsers.base import ToolParser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.errors import ConfigError, DeadlineError, EngineError, EngineGoneError, LedgerError
from verl_mt.extensions.compat.generate.align import Alignment, align
from verl_mt.extensions.compat.generate.api import EngineRequest, abort_reply, empty_reply, reply_to
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.extensions.toolbox.editing.reconcile import spelled
from verl_mt.extensions.toolbox.editing.session import EditableSession
from verl_mt.rollout.prompts import Prompt

log = logging.getLogger(__name__)


@dataclass
class RequestedConversation:
    """A session, and how the function sees it."""

    number: int
    session: EditableSession
    text: str
    """Everything so far, as it was sent and answered."""
    last: str = ""
    """What the function was told of the last sampled turn."""
    untold: str = ""
    """The end of that turn that it was not told: an end-of-turn token, a stop string. If it writes it, it is known."""
    busy: bool = False

    def align(self, sample: Sample) -> Alignment:
        """Where the tokens of the record are in a Sample.

        Raises:
            LedgerError: they are not there; names the first one that is another.
        """
        session = self.session
        return align(sample.tokens, session.record, session.context.chat.decode, wanted=sample.loss_mask)


@dataclass
class CallConversations:
    """All of one call.

    Args:
        main: the episode's own session; the first conversation uses it.
        prompt_text: how the prompt was shown to the function; asked for again it gets the prompt's ids.
        trust_text: control tokens in text that follows the recorded part stay what they are.
    """

    main: EditableSession
    prompt: Prompt
    prompt_text: str | None
    trust_text: bool = False
    items: list[RequestedConversation] = field(default_factory=list)
    lost: EngineGoneError | DeadlineError | None = None
    """The engine went away: nothing of this call counts."""
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._run = self.main.context

    @property
    def parser(self) -> ToolParser | None:
        """How the run reads tool calls."""
        return self._run.parser

    async def post(self, payload: Mapping[str, Any], own: Sequence[int]) -> tuple[int, dict[str, Any]]:
        """Answer a request as SGLang would.

        Args:
            own: numbers of the conversations that the asking task has had; of several that fit, these are preferred.

        Returns:
            The conversation's number, and the reply.

        Raises:
            LedgerError: the request cannot be served; says why.
        """
        if self.lost is not None:
            return -1, abort_reply(str(self.lost))
        request = EngineRequest.parse(payload, self._run.sampling)
        size = len(self._run.chat.tokenizer)
        unknown = [i for i in request.ids or () if not 0 <= i < size]
        if unknown and not any(unknown[0] in c.session.record.token_ids for c in self.items):
            raise LedgerError(f"payload of /generate: input_ids holds {unknown[0]}, but the vocabulary has {size} ids")
        if not self._run.engine.capabilities.returns_token_ids:
            raise EngineError("a generate function needs an engine that returns token ids. This one gives text only")
        if self._run.deterministic and any(c.busy for c in self.items):
            raise ConfigError(
                "trainer.deterministic: a generate function that has several requests at once in the engine cannot be "
                "reproduced bit for bit. Await them one after the other, or switch determinism off"
            )
        conversation = self._find(request, own)
        task = asyncio.current_task()
        assert task is not None
        conversation.busy = True
        self._tasks.add(task)
        try:
            return conversation.number, await self._sample(conversation, request)
        except (EngineGoneError, DeadlineError) as error:
            self.lost = error
            return conversation.number, abort_reply(str(error))
        finally:
            conversation.busy = False
            self._tasks.discard(task)

    async def close(self) -> None:
        """End requests that nobody waits for any more, and the engine's sessions."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._run.deterministic:
            for conversation in self.items[1:]:
                self._run.engine.close_session(conversation.session.trajectory.trajectory_id)

    def match(
        self, sample: Sample, among: Sequence[RequestedConversation] | None = None
    ) -> tuple[RequestedConversation, Alignment] | None:
        """The conversation whose tokens a Sample holds, the best fitting one; None where none fits."""
        fits = []
        for conversation in self.items if among is None else among:
            try:
                found = conversation.align(sample)
            except LedgerError:
                continue
            missing = len(conversation.session.record.token_ids) - len(found.places)
            fits.append(((missing, len(sample.tokens) - found.used, conversation.number), conversation, found))
        return min(fits, key=lambda fit: fit[0])[1:] if fits else None

    # ---- which conversation, and what is new in it

    def _find(self, request: EngineRequest, own: Sequence[int]) -> RequestedConversation:
        """The conversation that goes on, what is new in it queued; or a new one."""
        fitting = [c for c in self.items if not c.busy and self._continues(c, request, own)]
        if fitting:
            # Workers that were sent one prompt begin alike: the longest record holds most of what the request repeats,
            # and of equal ones (nothing but the prompt, say) a task goes on in its own.
            best = max(fitting, key=lambda c: (len(c.session.record.token_ids), c.number in own, c.number))
            self._extend(best, request)
            return best
        # One that is the only one is the task's own, also where the task asks through others (asyncio.wait_for).
        mine = [c for c in self.items if not c.busy and (c.number in own or len(self.items) == 1)]
        cut = [c for c in mine if self._cut(c, request)]
        return cut[0] if cut else self._begin(request)

    def _continues(self, conversation: RequestedConversation, request: EngineRequest, own: Sequence[int]) -> bool:
        if request.ids is not None:
            known = conversation.session.record.token_ids
            same = request.ids[: len(known)] == known
            is_longer = len(request.ids) > len(known)
        else:
            assert request.text is not None
            same = request.text.startswith(conversation.text)
            is_longer = len(request.text) > len(conversation.text)
        # Two workers may send the same prompt, and one of them may have been answered with nothing.
        return same and (is_longer or conversation.number in own)

    def _extend(self, conversation: RequestedConversation, request: EngineRequest) -> None:
        session = conversation.session
        if session.ended:
            return
        if request.ids is not None:
            ids = request.ids[len(session.record.token_ids) :]
            text = session.context.chat.decode(ids)
        else:
            assert request.text is not None
            text = request.text[len(conversation.text) :]
            ids = self._encode(text.removeprefix(conversation.untold))
        if ids:
            session.extend_ids(ids, {"role": "tool", "content": text})
        conversation.text += text

    def _cut(self, conversation: RequestedConversation, request: EngineRequest) -> bool:
        """Whether the request keeps a beginning of the last sampled turn; then the rest of that turn is taken back."""
        # Functions end turns themselves (at `</search>`, where the model wrote on). What they keep was sampled behind
        # exactly what the record holds, so it stays as it is; earlier turns were read by this one and cannot be cut.
        session, chat = conversation.session, self._run.chat
        record = session.record
        start = record.turns[-1].start
        if record.turns[-1].kind != "assistant":
            return False
        before = conversation.text[: len(conversation.text) - len(conversation.last)]
        if request.ids is not None:
            keep = common_prefix(request.ids, record.token_ids)
            ids = request.ids[keep:]
            text = chat.decode(request.ids[start:])
        else:
            assert request.text is not None
            if not request.text.startswith(before):
                return False
            text = request.text[len(before) :]
            kept, rest = spelled(chat.decode, record.token_ids[start:], text)
            keep, ids = start + kept, self._encode(rest)
        if keep <= start:
            return False
        if session.ended:
            return True
        session.reopen(text, keep=keep, ids=ids)
        conversation.text = before + text
        return True

    def _begin(self, request: EngineRequest) -> RequestedConversation:
        number, main = len(self.items), self.main
        text = request.text if request.text is not None else self._run.chat.decode(request.ids or [])
        is_row = text == self.prompt_text
        ids = request.ids if request.ids is not None else self.prompt.ids if is_row else self._prompt_ids(text)
        messages = self.prompt.messages if is_row else [{"role": "user", "content": text}]
        session = main if number == 0 else self._another(number)
        # The function alone decides about tokens and masks, and is checked when it returns: the run's rules are off.
        session.context = replace(
            self._run,
            parser=None,
            sanity=SanityMonitor(SanityMode.OFF),
            use_inference_chat_template=False,
            loss_scale=None,
            train_prompt_assistants=False,
        )
        session.verbatim = True
        session.start(list(ids), messages, self.prompt.tools if is_row else [])
        conversation = RequestedConversation(number, session, text)
        self.items.append(conversation)
        return conversation

    def _another(self, number: int) -> EditableSession:
        """A session beside the first one, under the same episode."""
        main, first = self.main, self.main.trajectory
        trajectory = Trajectory(
            f"{first.trajectory_id}.{number}",
            first.prompt_id,
            first.group_id,
            first.episode_id,
            first.data_source,
            first.row_index,
            source=first.source,
        )
        shared = first.trajectory_id if self._run.deterministic else None
        session = EditableSession(self._run, trajectory, main.order, main.attempt, engine_session=shared)
        if shared is None:
            self._run.engine.open_session(trajectory.trajectory_id, main.order)
        return session

    # ---- text to ids

    def _prompt_ids(self, text: str) -> list[int]:
        """Ids of a prompt that the function wrote itself."""
        chat = self._run.chat
        if chat.trust_prompts:
            return chat.encode_text(text, neutral=False)
        known = self.prompt_text
        if not known or known not in text:
            raise LedgerError(
                "actor_rollout_ref.model.trust_prompts=False: a prompt of the function's own may not be sent as text, "
                "nobody could tell its markup from the data's. Send input_ids"
            )
        before, _, after = text.partition(known)
        return [*chat.encode_text(before, neutral=True), *self.prompt.ids, *chat.encode_text(after, neutral=True)]

    def _encode(self, text: str) -> list[int]:
        chat = self._run.chat
        if self.trust_text:
            return chat.encode_text(text, neutral=False)
        markup = chat.generation_prompt_text
        if (
            markup
            and text.endswith(markup)
            and chat.encode_text(markup, neutral=True) != chat.encode_text(markup, neutral=False)
        ):
            raise LedgerError(
                f"the text after the recorded part ends with the template's own markup {markup!r}, which would become "
                "plain text: say `generate.trust_text = True` behind the function if all that it appends may hold "
                "control tokens (so no text of a tool or a user), or send input_ids"
            )
        return chat.continuation_ids(text)

    # ---- one turn

    async def _sample(self, conversation: RequestedConversation, request: EngineRequest) -> dict[str, Any]:
        session, turn = conversation.session, request.turn
        if session.ended:
            return self._no_turn(session)
        limits = self._run.limits
        if turn.max_new_tokens is not None and turn.max_new_tokens < limits.response_length:
            per_turn = min(turn.max_new_tokens, limits.max_tokens_per_turn or turn.max_new_tokens)
            limits = replace(limits, max_tokens_per_turn=per_turn)
        session.context = replace(session.context, sampling=turn.sampling, limits=limits)
        cached = session.trajectory.counters.get("cached_tokens", 0)
        answer = await session.generate()
        if answer is None:
            return self._no_turn(session)
        reply = reply_to(
            session,
            turn,
            answer.finish_reason,
            return_logprob=request.return_logprob,
            return_text=request.return_text,
        )
        reply["meta_info"]["cached_tokens"] = int(session.trajectory.counters.get("cached_tokens", 0) - cached)
        conversation.last = reply["text"]
        conversation.text += reply["text"]
        said = session.context.chat.decode(reply["output_ids"])
        conversation.untold = said[len(reply["text"]) :] if said.startswith(reply["text"]) else ""
        return reply

    @staticmethod
    def _no_turn(session: EditableSession) -> dict[str, Any]:
        """A limit was reached before anything could be sampled: an empty turn, cut by length (or by the clock)."""
        if session.trajectory.stop_reason is StopReason.TIME_LIMIT:
            return abort_reply("rollout.max_seconds is over")
        return empty_reply({"type": "length", "length": 0}, prompt_tokens=len(session.record.token_ids))
