"""The scheduler's rollout driver: a `MultiTurnScheduler` decides what is asked next.

What its own `run` returns is brought onto what the session recorded: each output is one record of the trajectory. It
covers the turns of its response's record, up to that response, that no earlier output covers. What none covers
(candidates that `run` threw away) is taken out of the loss and counted.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from verl_mt.config.schema import Config
from verl_mt.data.conversation import Message
from verl_mt.data.ledger import TrajectoryRecord, TurnSpan
from verl_mt.data.media import Kind, parts_of
from verl_mt.data.user_values import WrongValue, bits_of, bool_of, ids_of, is_nested, log_probs_of, messages_of
from verl_mt.errors import (
    ConfigError,
    DataError,
    EngineError,
    EngineGoneError,
    LedgerError,
    PluginError,
    UserCodeError,
    error_text,
    value_text,
)
from verl_mt.extensions.compat.schedulers.base import MultiTurnScheduler, missing_methods
from verl_mt.extensions.compat.schedulers.hooks import (
    InferEngine,
    SchedulerConversation,
    TrajectoryOver,
    request_config,
    running,
)
from verl_mt.extensions.compat.schedulers.requests import RolloutInferRequest, RolloutOutput
from verl_mt.extensions.compat.schedulers.shipped import schedulers
from verl_mt.extensions.toolbox.editing.reconcile import match_ids
from verl_mt.extensions.toolbox.editing.session import EditableSession, session_of
from verl_mt.plugins import load_object
from verl_mt.rollout.drivers import DriverParts, Episode, RolloutDriver
from verl_mt.user_code import CallTimeout, user_code_of

log = logging.getLogger(__name__)

_NO_DEADLINE_S = float("inf")
_LOOK_S = 1.0
_UNHAPPY = ("error", "engine", "cancelled")
_OWN_COLUMNS = ("prompt", "messages", "images", "audios", "videos", "tools", "objects", "data_dict")
CONFIG_KEY = "actor_rollout_ref.rollout.multi_turn.scheduler"


_NOT_CALLED = {
    "async_infer": "run is called once per conversation: do work that several requests share in run",
    "get_response_token_data": "a turn's ids are recorded as they were sampled; step returns response_token_ids",
    "append_assistant_completion": "what a turn adds to the messages is the run's business; step may change them",
    "set_assistant_message_token_ids": "sampled ids are kept by the ledger, and never encoded again",
    "snapshot_and_materialize_assistant_messages": "messages hold texts at all times",
}
"""Methods of ms-swift's schedulers that nothing calls here, so that overriding one would change nothing."""


class NotAScheduler(PluginError, NotImplementedError):
    """A class that decides nothing: neither `step` nor `run`."""


def load_scheduler(path: str, *, max_turns: int | None = None, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Make the scheduler that the config names.

    Args:
        path: registered name, dotted path, or `file.py:Name`.
        max_turns: of the run; `kwargs` may give another.
        kwargs: of the constructor.

    Raises:
        PluginError: nothing there, no scheduler, or its constructor raised.
        NotAScheduler: it has neither `step` nor `run`.
    """
    kind = load_object(path, what=CONFIG_KEY, registry=schedulers)
    if not isinstance(kind, type) or not issubclass(kind, MultiTurnScheduler):
        raise PluginError(f"{CONFIG_KEY}: {path} is no subclass of MultiTurnScheduler, got {kind!r:.100}")
    for name, instead in _NOT_CALLED.items():
        if hasattr(kind, name):
            raise PluginError(f"{CONFIG_KEY}: {kind.__name__} overrides {name}, which is not called here: {instead}")
    if kind.step is MultiTurnScheduler.step and kind.run is MultiTurnScheduler.run:
        raise NotAScheduler(f"{CONFIG_KEY}: {missing_methods(kind)}")
    arguments = {"max_turns": max_turns, **(kwargs or {})}
    try:
        signature = inspect.signature(kind)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = [] if takes_any else sorted(set(arguments) - set(signature.parameters) - {"max_turns"})
        if unknown:
            raise ConfigError(
                f"{CONFIG_KEY}_kwargs: {kind.__name__} takes no {', '.join(unknown)}. Its parameters: "
                f"{', '.join(signature.parameters)}"
            )
        if not takes_any and "max_turns" not in signature.parameters:
            del arguments["max_turns"]
        scheduler = kind(**arguments)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        text = error_text(error, named=True)
        raise PluginError(f"{CONFIG_KEY}: making {kind.__name__}({arguments}) failed: {text}") from error
    if not hasattr(scheduler, "max_turns"):
        scheduler.max_turns = max_turns  # a constructor that does not call its base's
    return scheduler


def build(config: Config, parts: DriverParts) -> SchedulerDriver:
    """The rollout driver that `multi_turn.scheduler` asks for."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    assert turns.scheduler is not None
    scheduler = load_scheduler(turns.scheduler, max_turns=turns.max_assistant_turns, kwargs=turns.scheduler_kwargs)
    return SchedulerDriver(scheduler, timeout_s=turns.interaction_timeout_s, media=parts.media)


class SchedulerDriver(RolloutDriver):
    """Hands every episode to one scheduler.

    Args:
        scheduler: shared by all trajectories.
        timeout_s: deadline of each hook; of a custom `run`, of the time between two turns.
        media: kinds of media that the model takes.
    """

    session_class = EditableSession

    def __init__(self, scheduler: MultiTurnScheduler, *, timeout_s: float = 60.0, media: frozenset[str] = frozenset()):
        self.scheduler, self.timeout_s, self.media = scheduler, timeout_s, media
        self._custom_run = type(scheduler).run is not MultiTurnScheduler.run
        name = type(scheduler).__name__
        self._code = user_code_of(scheduler, MultiTurnScheduler, f"scheduler {name}")

    async def run(self, episode: Episode) -> None:
        """Drive the episode to its end; `on_trajectory_end` is called once, whatever that is."""
        session = session_of(episode)
        session.verbatim = True
        engine = getattr(self.scheduler, "infer_engine", None)
        if not isinstance(engine, InferEngine) or engine.chat is not session.context.chat:
            self.scheduler.infer_engine = InferEngine(session.context.chat)
        conversation = SchedulerConversation(
            session, self._code, type(self.scheduler).__name__, self.timeout_s, tools=episode.tools, media=self.media
        )
        conversation.request = make_request(episode)
        token = running.set(conversation)
        reason = "error"
        raised: BaseException | None = None
        try:
            await self._drive(conversation)
            conversation.conclude(self.scheduler.max_turns)
            reason = str(session.trajectory.stop_reason)
        except BaseException as error:
            raised = error
            if isinstance(error, EngineGoneError | asyncio.CancelledError):
                reason = "engine" if isinstance(error, EngineGoneError) else "cancelled"
            raise
        finally:
            await self._end(conversation, reason, raised)
            running.reset(token)

    async def _drive(self, conversation: SchedulerConversation) -> None:
        try:
            returned = await self._run(conversation)
        except TrajectoryOver:
            returned = None
        except Exception:
            if conversation.engine_error is not None:
                raise conversation.engine_error from None
            raise
        if conversation.engine_error is not None:
            raise conversation.engine_error
        if self._custom_run and returned is not None:
            take_outputs(conversation, returned)
        elif self._custom_run and not conversation.session.ended:
            raise conversation.error("run", "it returned None: return a RolloutOutput, or a list of them")

    async def _run(self, conversation: SchedulerConversation) -> Any:
        """Runs on the rollout's loop. Waits for the scheduler's `run`, in its own thread."""
        request, config = conversation.request, request_config(conversation.session)
        if not self._custom_run:
            return await self.scheduler.run(request, config)  # type: ignore[arg-type]
        conversation.waiting_since = time.monotonic()
        # A deadline for the whole call would count the engine's time too, which grows with the batch. So only the time
        # is measured in which nothing is asked of the engine.
        task = asyncio.ensure_future(self._code.call("run", (request, config), {}, timeout_s=_NO_DEADLINE_S))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=min(_LOOK_S, self.timeout_s))
                since = conversation.waiting_since
                if not task.done() and since is not None and time.monotonic() - since > self.timeout_s:
                    cause = CallTimeout(f"nothing was asked of the engine for {self.timeout_s:g} s")
                    raise conversation.error("run", str(cause)) from cause
            return await task
        except (TrajectoryOver, EngineError, UserCodeError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise conversation.error("run", error_text(error)) from error
        finally:
            task.cancel()

    async def _end(self, conversation: SchedulerConversation, reason: str, raised: BaseException | None) -> None:
        """Goes on in the background if the rollout is cancelled."""
        request = conversation.request
        if type(self.scheduler).on_trajectory_end is MultiTurnScheduler.on_trajectory_end:
            return
        takes = inspect.signature(self.scheduler.on_trajectory_end).parameters.values()
        positional = [p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        args: tuple[Any, ...] = (reason,) if len(positional) == 1 else (copy.copy(request), reason)
        if positional and positional[0].name == "requests":  # ms-swift's own form
            args = ([request], raised)[: len(positional)]
        call = conversation.hook("on_trajectory_end", *args)
        try:
            await asyncio.shield(asyncio.ensure_future(call))
        except UserCodeError as error:
            if reason not in _UNHAPPY:
                raise
            log.warning("%s", error)  # what ended the trajectory is what is reported of it


def make_request(episode: Episode) -> RolloutInferRequest:
    """A new request for one trajectory: messages, media and the row's other columns in `data_dict`.

    Raises:
        DataError: the row's column `data_dict` or `objects` is no mapping.
    """
    session = episode.session
    return RolloutInferRequest(
        messages=copy.deepcopy(session.messages),
        images=_media(episode, "image"),
        videos=_media(episode, "video"),
        tools=copy.deepcopy(session.trajectory.tools) or None,
        objects=_mapping(episode, "objects"),
        data_dict=_data_dict(episode),
        uuid=session.trajectory.trajectory_id,
    )


def _data_dict(episode: Episode) -> dict[str, Any]:
    """The row's columns that a conversation has no field for, nulls dropped; its own `data_dict` wins over them."""
    row = episode.prompt.row
    columns = {k: v for k, v in row.raw.items() if k not in _OWN_COLUMNS and v is not None}
    if row.ground_truth is not None:
        columns.setdefault("solution", row.ground_truth)
    return copy.deepcopy({**columns, **_mapping(episode, "data_dict")})


def _media(episode: Episode, kind: Kind) -> list[Any]:
    """Those of the prompt, a path beside the data file as a whole path; else what the row's column holds."""
    shown = [value for k, value in parts_of(episode.session.messages) if k == kind]
    value = shown or episode.prompt.row.raw.get(f"{kind}s")
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _mapping(episode: Episode, column: str) -> dict[str, Any]:
    row = episode.prompt.row
    value = row.raw.get(column)
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{row.place}: column {column} must be a mapping, got {value!r:.100}")
    return copy.deepcopy(value or {})


def take_outputs(conversation: SchedulerConversation, returned: Any) -> None:
    """Split records so that each output has one, apply masks and infos.

    Raises:
        UserCodeError: not outputs, or ids and masks that do not fit what was recorded (with both numbers).
    """
    outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
    wrong = [o for o in outputs if not isinstance(o, RolloutOutput)]
    if wrong or not outputs:
        got = value_text(wrong[0], 100) if wrong else "an empty list"
        raise conversation.error("run", f"it must return a RolloutOutput or a list of them, got {got}")
    last = 0
    for output in outputs:
        _check(conversation, output)
        turn = _turn_of(conversation, output)
        if turn <= last:
            raise conversation.error(
                "run", f"its outputs must end in different turns, in order. Got turn {turn} after turn {last}"
            )
        if not output.whole:
            _take(conversation, output, last, turn)
        last = turn
        conversation.add_infos(output.rollout_infos, "run")
    if not any(output.whole for output in outputs):
        _discard_uncovered(conversation, {_turn_of(conversation, o) for o in outputs})


def _turn_of(conversation: SchedulerConversation, output: RolloutOutput) -> int:
    name = getattr(output.response, "id", None)
    known = conversation.choices.get(name) if isinstance(name, str) else None
    if known is None:
        got = value_text(output.response, 100)
        raise conversation.error("run", f"the response of an output must be one that infer_async returned, got {got}")
    return known[0]


def _check(conversation: SchedulerConversation, output: RolloutOutput) -> None:
    """The types of an output's fields; ids and masks become plain lists of the shape that they came in."""
    ids, mask = output.response_token_ids, output.response_loss_mask
    try:
        output.whole = bool_of(output.whole, "whole")
        if output.messages is not None:
            output.messages = messages_of(output.messages, "messages")
        if ids is not None:
            output.response_token_ids = _each(ids_of, ids, "response_token_ids")
        if mask is not None:
            output.response_loss_mask = _each(bits_of, mask, "response_loss_mask")
            if ids is not None and is_nested(ids) != is_nested(mask):
                raise WrongValue("response_loss_mask must be flat, or a list per turn, as response_token_ids is")
        num_ids, bits = len(_flat(output.response_token_ids)), _flat(output.response_loss_mask)
        if ids is not None:
            log_probs_of(output.rollout_logprobs, "rollout_logprobs", num_ids, num_ids if mask is None else sum(bits))
        elif output.rollout_logprobs is not None:
            raise WrongValue("rollout_logprobs needs response_token_ids. Leave it out, the engine's own are recorded")
    except WrongValue as error:
        raise conversation.error("run", str(error)) from None


def _each(check: Callable[[Any, str], list[int]], value: Any, what: str) -> list[Any]:
    """A flat list, or one list per turn."""
    if not is_nested(value):
        return check(value, what)
    return [check(part, f"{what}[{place}]") for place, part in enumerate(value)]


def _flat(value: list[Any] | None) -> list[int]:
    return [item for part in value or () for item in (part if isinstance(part, list) else (part,))]


def _take(conversation: SchedulerConversation, output: RolloutOutput, after: int, turn: int) -> None:
    trajectory = conversation.session.trajectory
    place = next(k for k, r in enumerate(trajectory.records) if _span(r, turn) is not None)
    record = trajectory.records[place]
    own = [s for s in record.assistant_turns if after < s.turn <= turn]
    # A record that an earlier output ends in is cut in two, so that each output has one: the second part begins with
    # its first own turn, and all before it becomes a prompt, whose tokens are trained in the first part only.
    if any(s.turn <= after for s in record.assistant_turns):
        first, record = record.split(own[0].start)
        first.messages = first.messages or _seen(conversation, after)
        trajectory.records[place : place + 1] = [first, record]
    if output.messages is not None:
        record.messages = copy.deepcopy(list(output.messages))
    if output.response_token_ids is None:
        if output.response_loss_mask is not None:
            raise conversation.error("run", "response_loss_mask needs response_token_ids of the same length")
        return
    try:
        _mask(conversation, record, own, output)
    except LedgerError as error:
        raise conversation.error("run", str(error)) from error


def _seen(conversation: SchedulerConversation, turn: int) -> list[Message]:
    """The messages up to a turn of the last record."""
    session = conversation.session
    places = [p for p, number in session.message_rounds.items() if number == session.trajectory.round_of(turn)]
    return copy.deepcopy(session.messages[: places[0] + 1]) if places else []


def _mask(
    conversation: SchedulerConversation, record: TrajectoryRecord, own: Sequence[TurnSpan], output: RolloutOutput
) -> None:
    """Compare an output's ids with the record, and clear the bits that its mask clears."""
    stretches = conversation.session.trajectory.message_ranges(own)
    ids, mask = output.response_token_ids or [], output.response_loss_mask
    if is_nested(ids):
        if len(ids) != len(stretches):
            raise LedgerError(f"response_token_ids has {len(ids)} lists for {len(stretches)} assistant messages")
        if mask is not None and [len(m) for m in mask] != [len(i) for i in ids]:
            raise LedgerError(
                f"response_loss_mask has lists of {[len(m) for m in mask]} entries for response_token_ids of "
                f"{[len(i) for i in ids]}"
            )
        ids, mask = _flat(ids), None if mask is None else _flat(mask)
    if mask is not None and len(mask) != len(ids):
        raise LedgerError(f"response_loss_mask has {len(mask)} entries for {len(ids)} response_token_ids")
    positions = [p for start, end in stretches.values() for p in range(start, end)]
    matched = match_ids(ids, [record.token_ids[p] for p in positions], conversation.session.context.chat.end_token_ids)
    if mask is None:
        return
    conversation.session.ignore_loss_scale()
    foreign = [j for j, p in matched.items() if mask[j] and not record.sampled[positions[p]]]
    if foreign:
        raise LedgerError(f"response_loss_mask sets {len(foreign)} bits on ids that the engine did not sample")
    cleared = record.clear_mask([positions[p] for j, p in matched.items() if not mask[j]])
    conversation.session.count("masked_tokens", cleared)


def _discard_uncovered(conversation: SchedulerConversation, ends: Collection[int]) -> None:
    """Turns behind the last output of their record."""
    session = conversation.session
    for record in session.trajectory.records:
        covered = max((s.turn for s in record.assistant_turns if s.turn in ends), default=0)
        lost = [p for s in record.assistant_turns if s.turn > covered for p in range(s.start, s.end)]
        session.count("discarded_tokens", record.clear_mask(lost))


def _span(record: TrajectoryRecord, turn: int) -> TurnSpan | None:
    return next((s for s in record.assistant_turns if s.turn == turn), None)
