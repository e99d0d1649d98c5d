"""The rollout driver for agents: a program that talks to an OpenAI-compatible URL is the policy.

    async def run(row, base_url, api_key):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...                                  # tools, loops, frameworks: whatever the agent does
        return {"answer": ...}               # reaches the reward as extra_info["rollout_infos"]["agent"]

Each call of the function has a separate URL, and its requests there are one trajectory. A request whose messages go on
where the last answer ended extends the record: what was sampled stays as it was sampled, and only the new messages are
encoded. Any other history (compacted, edited, another tool list, a sub-agent's) opens a new record of the same
trajectory, so every sampled token is trained once, in the context in which it was sampled.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from dataclasses import replace
from typing import Any

from verl_mt.chat.parsers.base import ToolParser
from verl_mt.config.schema import Config
from verl_mt.data.conversation import Message
from verl_mt.data.trajectory import StopReason
from verl_mt.data.user_values import plain_of
from verl_mt.errors import ConfigError, DeadlineError, EngineGoneError, UserCodeError, VerlMTError, error_text
from verl_mt.extensions.toolbox.agent.endpoint import (
    AgentServer,
    ChatRequest,
    RequestError,
    chunks,
    completion,
    error_body,
    likeness,
    read_request,
)
from verl_mt.extensions.toolbox.editing.reconcile import take_request
from verl_mt.extensions.toolbox.editing.session import EditableSession, session_of
from verl_mt.plugins import load_object
from verl_mt.rollout.drivers import DriverParts, Episode, RolloutDriver
from verl_mt.user_code import CallTimeout, UserCode, in_daemon_thread

log = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.agent_function_path"


class AgentDriver(RolloutDriver):
    """Runs the function once per episode, behind a separate URL.

    Args:
        path: of the function, `package.module:function` or `file.py:function`; `async def` or a plain `def` (which
            runs in a thread).
        parser: reads tool calls where a request brings tools.

    Raises:
        PluginError: nothing there.
        ConfigError: it does not take (row, base_url, api_key), or the web server is not installed.
    """

    session_class = EditableSession

    def __init__(self, path: str, parser: ToolParser):
        self._agent = _Agent(path)
        self._code = UserCode(self._agent, object, "verl_mt-agent")
        self._parser = parser
        self._server = AgentServer()

    async def run(self, episode: Episode) -> None:
        """Runs on the rollout's loop. Waits for the agent, in its own thread."""
        session, row = session_of(episode), episode.prompt.row
        conversation = AgentConversation(session, self._parser)
        url = await self._server.open(conversation.answer)
        timeout_s = session.context.limits.conversation_s
        failure: Exception | None = None
        try:
            result = await self._code.call("run", (copy.deepcopy(row.raw), url, "verl_mt"), {}, timeout_s=timeout_s)
            if result is not None:
                session.trajectory.info["agent"] = plain_of(result, "what it returned")
        except DeadlineError:
            raise
        except Exception as error:
            failure = error
        finally:
            await self._server.close(url)
            await conversation.close()
        if conversation.lost is not None:
            raise conversation.lost from failure
        if session.ended:
            return  # a limit; what the agent made of its refusal does not count
        limits, deterministic = session.context.limits, session.context.deterministic
        if isinstance(failure, CallTimeout) and limits.max_seconds is not None and not deterministic:
            session.end(StopReason.TIME_LIMIT)
            return
        if failure is not None:
            raise UserCodeError(
                f"agent {self._agent.path}, row {row.index + 1}: {error_text(failure, named=True)}"
            ) from failure
        if session.trajectory.num_turns == 0:
            raise UserCodeError(
                f"agent {self._agent.path}, row {row.index + 1}: it returned without asking {url} for anything. Give "
                "its client base_url and api_key"
            )
        session.end(StopReason.FINISHED)


def build(config: Config, parts: DriverParts) -> AgentDriver:
    """The rollout driver that `rollout.agent_function_path` asks for."""
    path = config.actor_rollout_ref.rollout.agent_function_path
    assert path is not None
    assert parts.parser is not None
    return AgentDriver(path, parts.parser)


class AgentConversation:
    """What is asked under one URL, one request after the other."""

    def __init__(self, session: EditableSession, parser: ToolParser):
        self.session = session
        self.lost: EngineGoneError | DeadlineError | None = None
        """The engine went away (the trajectory starts again), or a deadline fired where none may."""
        self._parser = parser
        self._lock = asyncio.Lock()
        self._closed = False
        self._told: set[str] = set()
        self._shown: dict[int, Message] = {}
        """Place of an assistant message -> what the client was shown instead, where that differs."""

    async def answer(self, body: Any) -> tuple[int, Any]:
        """HTTP status and body for the body of a request. Runs on the rollout's loop. Waits for an earlier request,
        then for the engine."""
        try:
            request = read_request(body)
        except RequestError as error:
            return 400, error_body(str(error), "invalid_request_error")
        # One after the other: an agent may ask several things at once, but each extends or leaves the one record that
        # the one before it has written.
        async with self._lock:
            try:
                return await self._answer(request)
            except (EngineGoneError, DeadlineError) as error:
                self.lost = error
                return 503, error_body(str(error), "engine_gone")
            except VerlMTError as error:
                return 400, error_body(str(error), "invalid_request_error")
            except Exception as error:  # an answer all the same: the server would close the client's connection
                log.exception("%s: a request could not be answered", self.session.trajectory.trajectory_id)
                return 500, error_body(error_text(error, named=True), "internal_error")

    async def close(self) -> None:
        """Wait for a request that is under way, and refuse later ones. Runs on the rollout's loop."""
        self._closed = True
        async with self._lock:
            pass

    async def _answer(self, request: ChatRequest) -> tuple[int, Any]:
        session = self.session
        if self._closed or self.lost is not None:
            return 404, error_body("this conversation is over", "conversation_over")
        self._tell(request)
        turn = None
        if not session.ended:
            shown = dict(self._shown)
            try:
                with session.unless_refused():
                    self._continue(request)
                    turn = await session.generate(max_tokens=request.max_tokens, stop=request.stop)
            except Exception:
                self._shown = shown
                raise
        if turn is None:
            reason = session.trajectory.stop_reason
            assert reason is not None
            return 400, error_body(f"no further turn: {reason} ({reason.name.lower()})", "context_length_exceeded")
        message = turn.message
        if turn.parsed.malformed and not turn.parsed.calls:
            # As servers do: what cannot be read as a call is text.
            message = {"role": "assistant", "content": turn.text}
            self._shown[len(session.messages) - 1] = message
        trajectory = session.trajectory
        reply_id = f"{trajectory.trajectory_id}/{session.attempt}/{trajectory.num_turns}"
        reply = completion(turn, message, session.record, session.context.chat, request, reply_id)
        return 200, list(chunks(reply, request.include_usage)) if request.stream else reply

    def _continue(self, request: ChatRequest) -> None:
        """Queue what the request adds to the record, or begin a new record with what it says."""
        session = self.session
        parser = self._parser if request.tools else None
        session.context = replace(session.context, parser=parser)
        messages = [_with_reasoning_under(session.reasoning_key, message) for message in request.messages]
        if not take_request(session, messages, request.tools, shown=self._shown, likeness=likeness):
            self._shown.clear()

    def _tell(self, request: ChatRequest) -> None:
        for key in request.set_by_the_run:
            self.session.count(f"agent/replaced_{key}", 1)
            if key not in self._told:
                self._told.add(key)
                log.info("an agent asks for its own %s; the run's is used", key)


class _Agent:
    """The user's function behind one name."""

    def __init__(self, path: str):
        self.path = path
        function = load_object(path, what=KEY)
        if not callable(function):
            raise ConfigError(f"{KEY}: {path} is {function!r:.80}, expected a function")
        try:
            inspect.signature(function).bind({}, "", "")
        except TypeError as error:
            raise ConfigError(
                f"{KEY}: {path}{inspect.signature(function)} cannot be called as (row, base_url, api_key): {error}"
            ) from error
        self._function = function

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        """Runs on the agent's loop. Waits for a plain function in a daemon thread."""
        if inspect.iscoroutinefunction(inspect.unwrap(self._function)):
            return await self._function(row, base_url, api_key)
        return await in_daemon_thread(self._function, row, base_url, api_key)


def _with_reasoning_under(key: str | None, message: Message) -> Message:
    """Clients are shown `reasoning_content`, whatever the template calls it; sent back, it goes where that reads."""
    if key is None or "reasoning_content" not in message:
        return message
    return {key if name == "reasoning_content" else name: value for name, value in message.items()}
