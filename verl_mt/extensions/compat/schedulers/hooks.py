"""One trajectory between its scheduler and its session.

The scheduler's code may run on another thread or loop; the session lives on the rollout's loop. Everything that
touches the session goes through `infer`, which crosses over.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from verl_mt.chat.template import ChatTemplate
from verl_mt.data import user_values
from verl_mt.data.conversation import Message, ParsedTurn
from verl_mt.data.media import KINDS, has_places, parts_of, place_media
from verl_mt.data.trajectory import StopReason
from verl_mt.errors import DataError, EngineError, LedgerError, UserCodeError, error_text, value_text
from verl_mt.extensions.compat.schedulers.requests import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
)
from verl_mt.extensions.toolbox.editing.reconcile import clear_bits, keep_loss_flags, take_messages
from verl_mt.extensions.toolbox.editing.session import EditableSession
from verl_mt.plugins import listing, suggest
from verl_mt.rollout.session import AssistantTurn
from verl_mt.rollout.tool_loop import run_calls
from verl_mt.tools.executor import ToolSession
from verl_mt.user_code import UserCode

T = TypeVar("T")

_TOOLS_KEY = "actor_rollout_ref.rollout.tool_kwargs.tools_config_file"
MEDIA = ("images", "videos", "audios")
STEP_KEYS = ("infer_request", "response_token_ids", "response_loss_mask", "rollout_infos", "rollout_logprobs")

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "length_penalty": (1,),
    "num_beams": (1,), "best_of": (1,), "stream": (False,), "seed": (), "top_logprobs": (0,),
}  # fmt: skip
"""What else a RequestConfig may hold, with the values at which it does nothing."""

running: ContextVar[SchedulerConversation | None] = ContextVar("scheduler_conversation", default=None)
"""The conversation whose hook is running."""


class TrajectoryOver(Exception):
    """No further turn can be sampled: a limit was reached. A custom `run` may let it pass: what was sampled counts."""


class InferEngine:
    """What a scheduler samples with. One per scheduler, whatever conversation it is called in."""

    def __init__(self, chat: ChatTemplate):
        self.chat = chat
        self.tokenizer = PlainTextTokenizer(chat)
        self.default_template = _Template(self.tokenizer)
        """ms-swift's place of the tokenizer."""

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        """Sample one turn behind `infer_request.messages`; the model goes on inside a last assistant message.

        The messages are not changed: append what was said before you ask again.

        Raises:
            TrajectoryOver: a limit of the trajectory was reached.
            LedgerError: called outside a scheduler's hooks.
        """
        return await current().infer(infer_request, request_config)

    async def run_tools(self) -> list[Message]:
        """Run the calls of the last turn with the run's own tools (`tool_kwargs.tools_config_file`), in order.

        Returns:
            One message per call, to append behind the turn; a failure is text for the model, as in the tool loop.

        Raises:
            TrajectoryOver: the trajectory's calls (`multi_turn.max_tool_calls`) are used up, and the model was told.
            EngineGoneError: a tool's infrastructure is gone; the trajectory starts again.
        """
        return await current().run_tools()


class PlainTextTokenizer:
    """The policy's tokenizer, except that encoding makes plain text of what reads like a control token.

    Every other attribute is the tokenizer's own.
    """

    def __init__(self, chat: ChatTemplate):
        self._chat = chat

    def encode(self, text: str, add_special_tokens: bool = False, **kwargs: Any) -> list[int]:
        """Ids of foreign text as it stands in the middle of a turn. Nothing is added at its ends."""
        return self._chat.continuation_ids(text)

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        """`input_ids` and `attention_mask` of one text."""
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def __len__(self) -> int:
        return len(self._chat.tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name == "_chat":  # while it is being copied
            raise AttributeError(name)
        return getattr(self._chat.tokenizer, name)


@dataclass(frozen=True)
class _Template:
    tokenizer: PlainTextTokenizer


def current() -> SchedulerConversation:
    """The conversation whose hook is running.

    Raises:
        LedgerError: none is.
    """
    conversation = running.get()
    if conversation is None:
        raise LedgerError("infer_async belongs to a scheduler's run(): outside of one there is no trajectory to go on")
    return conversation


@dataclass
class SchedulerConversation:
    """What one trajectory's hooks have said, and how they reach its session. Created on the rollout's loop."""

    session: EditableSession
    code: UserCode
    name: str
    """Of the scheduler, for errors."""
    timeout_s: float
    tools: ToolSession | None = None
    """Opened and closed by the runner; None where no tools are configured."""
    media: frozenset[str] = frozenset()
    """Kinds of media that the model takes."""
    request: RolloutInferRequest | None = None
    """As the last hook left it."""
    infos: dict[str, Any] = field(default_factory=dict)
    engine_error: Exception | None = None
    """User code may swallow it; the trajectory is lost all the same."""
    waiting_since: float | None = None
    """Since when user code has been running; None while the engine works for it."""
    choices: dict[str, tuple[int, ChatCompletionResponseChoice]] = field(default_factory=dict)
    """Response id -> turn and choice."""
    _ids: list[int] | None = None
    _parsed: ParsedTurn | None = None
    """The last turn, as the run's tool parser reads it."""
    _start: int = 0
    """Where the last sampled turn begins in its record."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def hook(self, method: str, *args: Any) -> Any:
        """Call one of the scheduler's methods, positionally.

        Runs on the rollout's loop. Waits for the scheduler's thread, at most `timeout_s`.

        Raises:
            UserCodeError: it raised or was late; names scheduler, hook, trajectory and turn.
        """
        try:
            return await self.code.call(method, args, {}, timeout_s=self.timeout_s)
        except (EngineError, TrajectoryOver):
            raise
        except Exception as error:
            raise self.error(method, error_text(error)) from error

    async def run_tools(self) -> list[Message]:
        """`InferEngine.run_tools` of this conversation, from whatever loop."""
        return await self._there(self._run_tools())

    async def infer(self, request: RolloutInferRequest, config: RequestConfig | None) -> ChatCompletionResponse:
        """`InferEngine.infer_async` of this conversation, from whatever loop."""
        return await self._there(self._infer(request, config))

    async def _there(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the rollout's loop. Runs on the loop of the scheduler's thread, or on the rollout's. Waits for the
        rollout's loop."""
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _run_tools(self) -> list[Message]:
        if self.tools is None:
            raise self.error("run_tools", f"no tools are configured ({_TOOLS_KEY})")
        if self._parsed is None:
            raise self.error("run_tools", "no turn has been sampled yet")
        if self.tools.budget_spent:
            self.session.end(StopReason.MAX_TOOL_CALLS)
            raise TrajectoryOver(str(StopReason.MAX_TOOL_CALLS))
        self.waiting_since = None
        try:
            return await run_calls(self.tools, self._parsed.actions, turn=self.session.trajectory.num_turns)
        except EngineError as error:
            self.engine_error = error
            raise
        finally:
            self.waiting_since = time.monotonic()

    def take_step(self, result: Any) -> RolloutInferRequest:
        """What `step` returned: check it, keep its parts for the next turn.

        Raises:
            UserCodeError: it is not what `step` may return.
        """
        if isinstance(result, RolloutInferRequest):
            result = {"infer_request": result}
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping | None):
            result = {"infer_request": result[0], "rollout_infos": result[1]}  # as its first releases had it
        if not isinstance(result, Mapping):
            raise self.error("step", f"it must return a dict with infer_request, got {value_text(result)}")
        for key in result:
            if key not in STEP_KEYS:
                raise self.error(
                    "step",
                    f"it returned an unknown key {key!r}{suggest(str(key), STEP_KEYS)}. Known: {listing(STEP_KEYS)}",
                )
        request = result.get("infer_request")
        if not isinstance(request, RolloutInferRequest):
            raise self.error(
                "step",
                f"it returned no request: infer_request is {value_text(request, 100)} (keys: "
                f"{listing(map(str, result))}). Return {{'infer_request': infer_request}}",
            )
        self.request = request
        ids, mask = result.get("response_token_ids"), result.get("response_loss_mask")
        if mask is not None and ids is None:
            raise self.error("step", "response_loss_mask needs response_token_ids of the same length. It returned none")
        try:
            self.hand_in(ids, mask, result.get("rollout_logprobs"))
        except (LedgerError, TypeError, ValueError) as error:
            raise self.error("step", error_text(error)) from error
        self.add_infos(result.get("rollout_infos"), "step")
        return request

    def take_turn_end(self, result: Any) -> bool | None:
        """What `on_turn_end` returned: whether the conversation is over, None where it leaves that open.

        Raises:
            UserCodeError: it is not what `on_turn_end` may return.
        """
        if result is None:
            return None
        if not isinstance(result, Mapping):
            raise self.error("on_turn_end", f"it must return a dict or None, got {value_text(result)}")
        known = ("done", "rollout_infos")
        for key in result:
            if key not in known:
                raise self.error(
                    "on_turn_end",
                    f"it returned an unknown key {key!r}{suggest(str(key), known)}. Known: {listing(known)}",
                )
        self.add_infos(result.get("rollout_infos"), "on_turn_end")
        try:
            return user_values.bool_of(result["done"], "done") if result.get("done") is not None else None
        except user_values.WrongValue as error:
            raise self.error("on_turn_end", str(error)) from None

    def hand_in(self, ids: Any, mask: Any, log_probs: Any = None) -> None:
        """Ids and mask of the last turn, as the scheduler wants them recorded."""
        if ids is None:
            return
        self._ids = user_values.ids_of(ids, "response_token_ids")
        size = len(self.session.context.chat.tokenizer)
        unknown = [i for i in self._ids if not 0 <= i < size and i not in self.session.record.token_ids]
        if unknown:
            raise LedgerError(f"response_token_ids holds {unknown[0]}, but the vocabulary has {size} ids")
        bits = [1] * len(self._ids) if mask is None else user_values.bits_of(mask, "response_loss_mask")
        user_values.log_probs_of(log_probs, "rollout_logprobs", len(self._ids), sum(bits))
        if mask is not None:
            self.session.ignore_loss_scale()
            clear_bits(self.session, self._start, self._ids, bits)

    def is_over(self, said: Any) -> bool:
        """What `check_finished` returned; nothing counts as no, what is neither True nor False fails the trajectory."""
        try:
            return said is not None and user_values.bool_of(said, "the answer")
        except user_values.WrongValue as error:
            raise self.error("check_finished", str(error)) from None

    def add_infos(self, infos: Any, where: str) -> None:
        """Merge `rollout_infos`; later ones win. Media keys replace the row's media."""
        if infos is None:
            return
        if not isinstance(infos, Mapping):
            raise self.error(where, f"rollout_infos must be a dict, got {value_text(infos, 100)}")
        plain = {str(key): value for key, value in infos.items() if key not in MEDIA}
        for key, value in plain.items():
            try:
                json.dumps(user_values.plain_of(value, f"rollout_infos[{key!r}]"))
            except user_values.WrongValue as error:
                raise self.error(where, str(error)) from None
            except (TypeError, ValueError) as error:
                reason = f"cannot be written as JSON ({error_text(error)}): {value_text(value, 100)}"
                raise self.error(where, f"rollout_infos[{key!r}] {reason}") from error
        for key in MEDIA:
            if infos.get(key) is not None:
                self._replace_media(key, infos[key], where)
        self.infos |= plain

    def error(self, method: str, reason: str) -> UserCodeError:
        """Names scheduler, hook, row, trajectory and turn."""
        trajectory = self.session.trajectory
        return UserCodeError(
            f"scheduler {self.name} failed in {method}, trajectory {trajectory.trajectory_id} "
            f"(row {trajectory.row_index + 1}), turn {trajectory.num_turns}: {reason}"
        )

    def _replace_media(self, kind: str, items: Any, where: str) -> None:
        if not isinstance(items, list | tuple):
            raise self.error(where, f"rollout_infos[{kind!r}] must be a list, got {value_text(items, 100)}")
        if items and kind not in self.media:
            takes = f"takes {listing(self.media)}" if self.media else "takes text only"
            raise self.error(where, f"rollout_infos[{kind!r}] holds {len(items)} items, but this model {takes}")
        self.session.trajectory.media[kind] = list(items)

    async def _infer(self, request: RolloutInferRequest, config: RequestConfig | None) -> ChatCompletionResponse:
        """Runs on the rollout's loop. Waits for the conversation's last turn, then for the engine."""
        async with self._lock:
            self.waiting_since = None
            try:
                return await self._turn(request, config)
            except EngineError as error:
                self.engine_error = error
                raise
            finally:
                self.waiting_since = time.monotonic()

    async def _turn(self, request: RolloutInferRequest, config: RequestConfig | None) -> ChatCompletionResponse:
        session = self.session
        if session.ended:
            raise TrajectoryOver(str(session.trajectory.stop_reason))
        self._check_request(request)
        self.request = request
        ids, self._ids = self._ids, None
        if self.media:
            try:
                show_new_media(request, session.messages)
            except DataError as error:
                raise self.error("infer_async", str(error)) from error
        take_messages(session, request.messages, request.tools, ids)
        max_tokens, stop = self._sampling(config)
        turn = await session.generate(max_tokens=max_tokens, stop=stop)
        if turn is None:
            raise TrajectoryOver(str(session.trajectory.stop_reason))
        self._start, self._parsed = session.record.turns[-1].start, turn.parsed
        return self._response(turn)

    def _response(self, turn: AssistantTurn) -> ChatCompletionResponse:
        session, record = self.session, self.session.record
        ids, number = record.token_ids[self._start :], session.trajectory.num_turns
        log_probs = None
        if record.has_log_probs:
            pairs = zip(ids, record.rollout_log_probs[self._start :])
            log_probs = {"content": [{"token_id": token, "logprob": value} for token, value in pairs]}
        choice = ChatCompletionResponseChoice(
            index=0,
            message=ChatMessage("assistant", turn.text, [c.to_message() for c in turn.parsed.calls] or None),
            finish_reason=turn.finish_reason,
            logprobs=log_probs,
            token_ids=ids,
        )
        name = f"{session.trajectory.trajectory_id}/{number}"
        self.choices[name] = (number, choice)
        usage = {"prompt_tokens": self._start, "completion_tokens": len(ids)}
        return ChatCompletionResponse([choice], id=name, usage=usage)

    def _check_request(self, request: Any) -> None:
        try:
            user_values.messages_of(getattr(request, "messages", None), "the request's messages")
            if request.tools is not None:
                user_values.tools_of(request.tools, "the request's tools")
        except user_values.WrongValue as error:
            raise self.error("infer_async", str(error)) from None

    def _sampling(self, config: Any) -> tuple[int | None, tuple[str, ...]]:
        """(tokens at most, further stop strings); everything else belongs to the run."""
        if config is None:
            return None, ()
        own = self.session.context.sampling
        for key in ("temperature", "top_p", "top_k"):
            value = getattr(config, key, None)
            if value is not None and value != getattr(own, key):
                reason = (
                    f"is {value_text(value)}, the run's is {getattr(own, key)}: log-probs would not be of the policy"
                )
                reason += f" that is trained; set actor_rollout_ref.rollout.{key}, or leave it None"
                raise self.error("infer_async", f"request_config.{key} {reason}")
        if (getattr(config, "n", None) or 1) != 1:
            raise self.error(
                "infer_async", f"request_config.n is {value_text(config.n)}: one turn at a time. Call it again"
            )
        for key, neutral in _NEUTRAL.items():
            value = getattr(config, key, None)
            if value is not None and value not in neutral:
                raise self.error(
                    "infer_async", f"request_config.{key} is {value_text(value)}: not offered. Leave it out"
                )
        limit = getattr(config, "max_tokens", None)
        try:
            limit = None if limit is None else user_values.count_of(limit, "request_config.max_tokens")
            return limit, user_values.stops_of(getattr(config, "stop", None) or None, "request_config.stop")
        except user_values.WrongValue as error:
            raise self.error("infer_async", str(error)) from None

    def conclude(self, max_turns: int | None) -> None:
        """The scheduler is done: name the reason, keep the last messages and infos."""
        session = self.session
        if session.cut_reason is not None:
            session.end(session.cut_reason)
        elif max_turns and session.trajectory.num_turns >= max_turns:
            session.end(StopReason.MAX_ASSISTANT_TURNS)
        else:
            session.end(StopReason.SCHEDULER)
        if self.request is not None:
            keep_loss_flags(session, self.request.messages)
        session.trajectory.info |= {**self.infos, "num_turns": session.trajectory.num_turns}
        if self.choices:
            last = max(self.choices.values(), key=lambda pair: pair[0])[1]
            last.messages = copy.deepcopy(session.messages)


def request_config(session: EditableSession) -> RequestConfig:
    """The run's own settings, for a scheduler to look at."""
    own = session.context.sampling
    return replace(RequestConfig(), temperature=own.temperature, top_p=own.top_p, top_k=own.top_k)


def show_new_media(request: RolloutInferRequest, shown: Sequence[Message]) -> None:
    """Put images and videos that a scheduler added to its request into the places `<image>` and `<video>` of the
    messages that it added. New messages without a place stay as they are: they may also hold parts with images.

    Args:
        request: its messages are changed in place.
        shown: the conversation so far; its images are the first ones of the request's.

    Raises:
        DataError: not as many places as new items; says both numbers.
    """
    new = request.messages[len(shown) :]
    if not has_places(new):
        return
    seen = [kind for kind, _ in parts_of(shown)]
    columns = {f"{kind}s": list(getattr(request, f"{kind}s"))[seen.count(kind) :] for kind in KINDS}
    request.messages[len(shown) :] = place_media(new, columns, "the messages that were added")
