"""The interactions that a YAML file declares, and one trajectory's conversation with the one that its row picks."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_mt.config.declarations import load_declarations
from verl_mt.data.conversation import Message
from verl_mt.data.trajectory import MAX_REWARD, TimeSpan, is_trainable
from verl_mt.data.user_values import WrongValue, bool_of, number_of, plain_of
from verl_mt.errors import ConfigError, DataError, EngineError, PluginError, UserCodeError, error_text, value_text
from verl_mt.interactions.base import BaseInteraction, default_name
from verl_mt.plugins import listing, suggest
from verl_mt.user_code import closing_task, user_code_of

CONFIG_KEY = "actor_rollout_ref.rollout.interaction_config_file"


def load_interactions(path: str | Path | None, *, config_key: str = CONFIG_KEY) -> dict[str, BaseInteraction]:
    """Make the interactions that a YAML file declares, one object per entry, by name::

        interaction:
          - name: gsm8k        # optional: the class name without "Interaction", lower-cased
            class_name: verl_mt.interactions.gsm8k_interaction.Gsm8kInteraction
            config: {}

    Args:
        path: the file; None = no interactions.
        config_key: where the path came from, for the error.

    Raises:
        ConfigError: the file is absent or has another shape.
        PluginError: a class does not resolve or is no interaction, its constructor raised, or two have one name.
    """
    if path is None:
        return {}
    found: dict[str, BaseInteraction] = {}
    places: dict[str, str] = {}
    for declaration in load_declarations(path, key="interaction", config_key=config_key, fields=("name",)):
        name = declaration.values.get("name")
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise ConfigError(f"{declaration.where}: name must be a text, got {name!r}. Leave it out for the default")
        made = declaration.load()
        kind = type(made) if isinstance(made, BaseInteraction) else declaration.load_class(BaseInteraction)
        name = name or default_name(kind.__name__)
        if name in found:
            raise PluginError(
                f"{declaration.where}: an interaction named {name!r} exists already ({places[name]}). "
                "Give one of them another `name`"
            )
        if made is not kind and declaration.config:
            raise ConfigError(f"{declaration.where}: an interaction that is made already takes no config")
        found[name] = made if made is not kind else declaration.build(kind, config={**declaration.config, "name": name})
        places[name] = declaration.where
    return found


def pick_interaction(
    interactions: Mapping[str, BaseInteraction], interaction_kwargs: Mapping[str, Any] | None
) -> BaseInteraction | None:
    """The interaction of one row.

    Args:
        interactions: from `load_interactions`.
        interaction_kwargs: the row's `extra_info.interaction_kwargs`; its `name` picks one.

    Returns:
        The named one; the only one where the row names none; None where none is configured.

    Raises:
        DataError: an unknown name, or none where several are configured.
    """
    if not interactions:
        return None
    if interaction_kwargs is not None and not isinstance(interaction_kwargs, Mapping):
        raise DataError(f"extra_info.interaction_kwargs must be a mapping, got {interaction_kwargs!r}")
    name = (interaction_kwargs or {}).get("name")
    if name is None and len(interactions) == 1:
        return next(iter(interactions.values()))
    if name is None:
        raise DataError(
            f"extra_info.interaction_kwargs names no interaction and several are configured: {listing(interactions)}. "
            "Set interaction_kwargs.name"
        )
    if name not in interactions:
        raise DataError(
            f"extra_info.interaction_kwargs.name: unknown interaction {name!r}{suggest(str(name), interactions)}. "
            f"Configured: {listing(interactions)}"
        )
    return interactions[name]


def check_row(interactions: Mapping[str, BaseInteraction], interaction_kwargs: Mapping[str, Any] | None) -> None:
    """Before anything is sampled: the row picks an interaction and gives what that one needs.

    Raises:
        DataError: it does not.
    """
    interaction = pick_interaction(interactions, interaction_kwargs)
    if interaction is None:
        return
    for name in interaction.needs:
        if (interaction_kwargs or {}).get(name) is None:
            raise DataError(
                f"interaction {interaction.name!r} needs extra_info.interaction_kwargs.{name}, which the row does not "
                "give: write it into the rows"
            )


@dataclass(frozen=True)
class InteractionTurn:
    """What the interaction said."""

    done: bool
    text: str
    """The next user message; not shown to the model where `done`."""
    score: float
    extra: dict[str, Any] = field(default_factory=dict)


class InteractionSession:
    """Starts the interaction at the first `respond`, ends it in `finish`, each once.

    Args:
        interaction: the interaction of the row.
        trajectory_id: for instance ids and errors.
        interaction_kwargs: the row's `extra_info.interaction_kwargs`; nulls that parquet fills in are dropped.
        timeout_s: deadline of each call.
    """

    def __init__(
        self,
        interaction: BaseInteraction,
        trajectory_id: str,
        interaction_kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
    ):
        self.trajectory_id, self.timeout_s = trajectory_id, timeout_s
        self.turn_scores: list[float] = []
        self.time_spans: list[TimeSpan] = []
        self._interaction = interaction
        self._kwargs = {k: v for k, v in (interaction_kwargs or {}).items() if v is not None}
        self._code = user_code_of(interaction, BaseInteraction, f"interaction {interaction.name}")
        self._instance_id: str | None = None
        self._finishing: asyncio.Task[float | None] | None = None

    @classmethod
    def open(
        cls,
        interactions: Mapping[str, BaseInteraction],
        interaction_kwargs: Mapping[str, Any] | None,
        *,
        trajectory_id: str,
        timeout_s: float = 60.0,
    ) -> InteractionSession | None:
        """The session of one row; None where no interaction is configured.

        Raises:
            DataError: the row names an unknown interaction, or none where several are configured.
        """
        try:
            interaction = pick_interaction(interactions, interaction_kwargs)
        except DataError as error:
            raise DataError(f"trajectory {trajectory_id}: {error}") from error
        if interaction is None:
            return None
        return cls(interaction, trajectory_id, interaction_kwargs, timeout_s=timeout_s)

    async def start(self) -> None:
        """`start_interaction`; does nothing when it has started.

        Raises:
            UserCodeError: it raised or timed out.
        """
        if self._instance_id is None:
            proposed = f"{self.trajectory_id}/{self._interaction.name}"
            answer = await self._call("start_interaction", (proposed,), turn=0)
            self._instance_id = answer if isinstance(answer, str) and answer else proposed
            if answer is not None and not isinstance(answer, str):
                raise self._error("start_interaction", 0, f"must return a str id, got {value_text(answer)}")

    async def respond(self, messages: Sequence[Message], *, turn: int = 0) -> InteractionTurn:
        """`generate_response` to a conversation whose last message is the model's.

        Args:
            messages: all messages; the interaction gets a copy.
            turn: the assistant turn it reacts to, for errors and spans.

        Raises:
            UserCodeError: it raised, timed out, or returned something else than
                (should_terminate, text, turn_score, extra).
        """
        await self.start()
        started = time.monotonic()
        returned = await self._call("generate_response", (self._instance_id, copy.deepcopy(list(messages))), turn=turn)
        self.time_spans.append(TimeSpan("interaction", started, time.monotonic(), turn, self._interaction.name))
        result = self._as_turn(returned, turn)
        self.turn_scores.append(result.score)
        return result

    async def finish(self) -> float | None:
        """`calculate_score`, then `finalize_interaction`, exactly once, however often this is called.

        Goes on in the background if its caller is cancelled.

        Returns:
            The score; None where the interaction never started.

        Raises:
            UserCodeError: one of the two raised or timed out; `finalize_interaction` has been called all the same.
        """
        if self._finishing is None:
            self._finishing = closing_task(self._finish())
        return await asyncio.shield(self._finishing)

    async def _finish(self) -> float | None:
        if self._instance_id is None:
            return None
        try:
            score = await self._call("calculate_score", (self._instance_id,), turn=None)
            return self._as_score(score, "calculate_score", None)
        finally:
            await self._call("finalize_interaction", (self._instance_id,), turn=None)

    async def _call(self, method: str, args: tuple[Any, ...], *, turn: int | None) -> Any:
        kwargs = copy.deepcopy(self._kwargs)
        if method in ("calculate_score", "finalize_interaction"):
            args, kwargs = _what_fits(getattr(self._interaction, method), args, kwargs)
        try:
            return await self._code.call(method, args, kwargs, timeout_s=self.timeout_s)
        except EngineError:
            raise
        except Exception as error:
            raise self._error(method, turn, error_text(error)) from error

    def _as_turn(self, returned: Any, turn: int) -> InteractionTurn:
        method = "generate_response"
        if not isinstance(returned, tuple | list) or len(returned) != 4:
            got = value_text(returned)
            raise self._error(method, turn, f"must return (should_terminate, text, turn_score, extra), got {got}")
        done, text, score, extra = returned
        try:
            done = bool_of(done, "should_terminate")
            extra = plain_of({} if extra is None else extra, "extra")
        except WrongValue as error:
            raise self._error(method, turn, str(error)) from None
        if not isinstance(text, str) and not (text is None and done):
            raise self._error(method, turn, f"the text must be a str, got {value_text(text)}")
        if not isinstance(extra, dict):
            raise self._error(method, turn, f"extra must be a dict, got {value_text(extra)}")
        return InteractionTurn(done, text or "", self._as_score(score, method, turn), dict(extra))

    def _as_score(self, value: Any, method: str, turn: int | None) -> float:
        try:
            score = 0.0 if value is None else number_of(value, "the score")
        except WrongValue:
            score = math.nan
        if not is_trainable(score):
            reason = f"the score must be a finite number of at most {MAX_REWARD:.2g}, got {value_text(value)}"
            raise self._error(method, turn, reason)
        return score

    def _error(self, method: str, turn: int | None, reason: str) -> UserCodeError:
        when = "at its end" if turn is None else f"turn {turn}"
        return UserCodeError(
            f"interaction {self._interaction.name!r} failed in {method}, trajectory {self.trajectory_id}, "
            f"{when}: {reason}"
        )


def _what_fits(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """verl never calls these two methods, and its base class declares them without arguments: so may a subclass."""
    signature = inspect.signature(method)
    for fitting in ((args, kwargs), (args, {}), ((), {})):
        try:
            signature.bind(*fitting[0], **fitting[1])
        except TypeError:
            continue
        return fitting
    return args, kwargs
