"""One trajectory's environment: made, reset, called, scored, and closed exactly once."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.data.trajectory import TimeSpan
from verl_mt.data.user_values import WrongValue, bool_of, messages_of, number_of, text_of
from verl_mt.environments.base import Done, Environment
from verl_mt.environments.kinds import Kind, place_of
from verl_mt.errors import EngineError, UserCodeError, error_text
from verl_mt.interactions.session import InteractionTurn
from verl_mt.rewards.contract import InvalidScore, Scores, as_scores
from verl_mt.tools.schemas import ToolResponse
from verl_mt.user_code import CallTimeout, OwnThread, closing_task

NOT_RUN = "not run: the episode is over"
_BUSY_S = 5.0
"""How long `close` waits for a constructor or a call that passed its deadline. Then it runs beside it."""


class EnvironmentSession:
    """Owns one `Environment` object.

    `start` makes and resets it, `run_tool` and `reply` act in it, `close` ends it, whatever happened before.

    Args:
        kind: the class and its configuration.
        trajectory_id: for errors.
    """

    def __init__(self, kind: Kind, trajectory_id: str):
        self.kind, self.trajectory_id = kind, trajectory_id
        self.over = False
        """The episode is over (`done`)."""
        self.time_spans: list[TimeSpan] = []
        self._environment: Environment | None = None
        self._broken: UserCodeError | None = None
        self._thread = OwnThread(f"environment {kind.title}")
        self._making = threading.Lock()
        self._given_up = False
        self._closing: asyncio.Task[None] | None = None

    async def start(self, row: Mapping[str, Any]) -> str | list[Message] | None:
        """Make and reset the environment.

        Runs on the rollout's loop. Waits for the environment.

        Args:
            row: the data set's row; the environment gets copies of its columns.

        Returns:
            What `reset` returned, checked.

        Raises:
            UserCodeError: one of them raised, timed out, or returned something else.
        """
        kind, begun = self.kind, time.monotonic()
        await self._checked(kind.cls.__init__, self._make, copy.deepcopy(kind.config_of(row)))
        assert self._environment is not None
        said = await self._checked(kind.cls.reset, self._environment.reset, copy.deepcopy(kind.columns_of(row)))
        self.over = await self._is_done()
        self.time_spans.append(TimeSpan("tool", begun, time.monotonic(), 0, kind.title))
        try:
            if said is None or isinstance(said, str):
                return said if said is None else text_of(said, "the prompt")
            return messages_of(copy.deepcopy(said), "the prompt")
        except WrongValue as error:
            raise self._error(kind.cls.reset, f"must return a text, a list of messages or None: {error}") from None

    async def run_tool(self, name: str, parameters: dict[str, Any]) -> Any:
        """Run one call. Runs on the rollout's loop, under the deadline of the tool executor. Waits for the environment.

        Returns:
            What the method returned, in any of the forms of `BaseTool.execute`.

        Raises:
            ToolCallError: the model's mistake.
            Exception: what the method raised.
        """
        environment, kind = self._environment, self.kind
        if self.over or self._has_set_done():
            self.over = True
            return ToolResponse(text=NOT_RUN)
        assert environment is not None
        method, kwargs = environment.call_tool, {"name": name, "parameters": parameters}
        if name in kind.methods:
            method, kwargs = getattr(environment, name), kind.converted(name, parameters)
        returned = await self._until_done(method, kwargs, timeout_s=math.inf)
        return ToolResponse(text="") if returned is None else returned

    async def respond(self, messages: Sequence[Message], *, turn: int = 0) -> InteractionTurn:
        """`reply` to the model's text, as an interaction's turn. Runs on the rollout's loop. Waits for the environment.

        Raises:
            UserCodeError: `reply` raised, timed out, or returned something else than a text, or (text, turn score).
        """
        reply = self._environment.reply  # type: ignore[union-attr]
        content, begun = messages[-1].get("content"), time.monotonic()
        try:
            text = content if isinstance(content, str) else ""
            returned = await self._until_done(reply, {}, text, timeout_s=self.kind.timeout_s)
        except EngineError:
            raise
        except Exception as error:
            raise self._error(reply, error_text(error, named=True)) from error
        self.time_spans.append(TimeSpan("interaction", begun, time.monotonic(), turn, self.kind.title))
        text, score = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, 0.0)
        try:
            score = number_of(score, "the turn score")
            if not (text is None and self.over):
                text = text_of(text, "the text")
        except WrongValue as error:
            raise self._error(reply, f"must return a text, or (text, turn score): {error}") from None
        return InteractionTurn(self.over, text or "", score)

    async def outcome(self) -> dict[str, Any]:
        """For `rollout_infos`: `{name, done, score}`. Runs on the rollout's loop. Waits for the environment.

        Raises:
            UserCodeError: `done` is neither True nor False, or raised; or as `score`.
        """
        if self._broken is not None:  # its text was told to the model, as that of a failed call
            raise self._broken
        told = {"name": self.kind.title, "done": self.over}
        return {**told, "score": await self.score()} if self.kind.scores else told

    async def score(self) -> Scores:
        """What `score` returned. Runs on the rollout's loop. Waits for the environment.

        Raises:
            UserCodeError: it raised, timed out, or returned no finite number.
        """
        score = self._environment.score  # type: ignore[union-attr]
        value = await self._checked(score, score, {})
        try:
            return as_scores(value, f"{self.kind.title}.score")
        except InvalidScore as error:
            raise self._error(score, str(error)) from error

    async def close(self) -> None:
        """End the environment, exactly once, however often this is called. Runs on the rollout's loop. Waits for the
        environment. Goes on in the background if its caller is cancelled.

        Raises:
            UserCodeError: `close` raised or timed out.
        """
        if self._closing is None:
            self._closing = closing_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if not self._thread.started:
            return  # nothing was made
        limit_s, claimed, hangs = self.kind.timeout_s, threading.Lock(), False
        other = OwnThread(f"close of environment {self.kind.title}")

        def close() -> Any:
            """Runs in a thread. Waits for the object's `close`."""
            return None if (own := getattr(self._environment, "close", None)) is None else own()

        def in_turn() -> Any:
            """Runs in the environment's thread, behind its calls."""
            return close() if claimed.acquire(blocking=False) else None

        waiting = asyncio.ensure_future(self._call(in_turn, {}, timeout_s=limit_s + _BUSY_S))
        try:
            await asyncio.wait([waiting], timeout=min(limit_s, _BUSY_S))
            if hangs := claimed.acquire(blocking=False):
                waiting.cancel()
                with self._making:  # an object that is still being made is closed where it is made
                    self._given_up = True
                waiting = asyncio.ensure_future(self.kind.code.run(close, (), {}, timeout_s=limit_s, thread=other))
            await waiting
        except Exception as error:
            raise self._error(getattr(self._environment, "close", None), error_text(error, named=True)) from error
        finally:
            self._thread.end(hangs=hangs)
            other.end(hangs=hangs)

    def _make(self, **config: Any) -> None:
        """Runs in the environment's thread."""
        environment = self.kind.cls(**config)
        with self._making:
            if not (given_up := self._given_up):
                self._environment = environment
        if given_up and callable(close := getattr(environment, "close", None)):
            closed = close()
            if asyncio.iscoroutine(closed):
                asyncio.run(closed)

    async def _until_done(
        self, method: Callable[..., Any], kwargs: dict[str, Any], *args: Any, timeout_s: float
    ) -> Any:
        """What a method returns, or the text of the `Done` that it raises; sets `over`."""
        try:
            returned = await self._call(method, kwargs, *args, timeout_s=timeout_s)
        except Done as end:
            self.over, returned = True, error_text(end, whole=True)
        except (CallTimeout, asyncio.CancelledError):  # it still runs: a property would wait for it
            self.over = self.over or self._has_set_done()
            raise
        except Exception:
            self.over = self.over or await self._is_done()
            raise
        self.over = self.over or await self._is_done()
        return returned

    def _has_set_done(self) -> bool:
        return getattr(self._environment, "__dict__", {}).get("done") is True

    async def _is_done(self) -> bool:
        done, environment = getattr(self.kind.cls, "done", None), self._environment
        try:
            if isinstance(done, property):
                return bool_of(await self._checked(done.fget, lambda: environment.done, {}), "done")  # type: ignore[union-attr]
            return bool_of(getattr(environment, "done", False), "done")
        except (UserCodeError, WrongValue) as error:
            self.over = True
            self._broken = error if isinstance(error, UserCodeError) else self._error(None, str(error))
            raise self._broken from None

    async def _call(
        self, function: Callable[..., Any], kwargs: dict[str, Any], *args: Any, timeout_s: float | None = None
    ) -> Any:
        timeout_s = self.kind.timeout_s if timeout_s is None else timeout_s
        return await self.kind.code.run(function, args, kwargs, timeout_s=timeout_s, thread=self._thread)

    async def _checked(self, named: Any, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """A call that is no tool's."""
        try:
            return await self._call(function, kwargs)
        except EngineError:
            raise
        except Exception as error:
            raise self._error(named, error_text(error, named=True)) from error

    def _error(self, method: Any, reason: str) -> UserCodeError:
        where = place_of(self.kind.cls, method)
        return UserCodeError(f"environment {where} of trajectory {self.trajectory_id}: {reason}")
