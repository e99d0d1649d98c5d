"""The OpenAI-compatible endpoint of agents: its server, its requests, its answers.

One server on loopback while agents run, one base URL for each conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_mt.bounds import MAX_BODY_BYTES
from verl_mt.data.conversation import Message, reasoning_of
from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.user_values import WrongValue, bool_of, count_of, messages_of, plain_of, stops_of, text_of
from verl_mt.errors import ConfigError, EngineError, value_text
from verl_mt.rollout.session import AssistantTurn

_SET_BY_THE_RUN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)
"""How the policy samples is the run's matter: the importance ratios and advantages belong to its distribution."""
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "parallel_tool_calls", "reasoning_effort", "service_tier", "stream_options",
    "prompt_cache_key", "safety_identifier", "verbosity",
)  # fmt: skip
_READ = (
    "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "n", "logprobs",
    "top_logprobs", "response_format",
)  # fmt: skip
_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class RequestError(Exception):
    """A request that cannot be served: HTTP 400, with what is wrong and what to do."""


@dataclass(frozen=True)
class ChatRequest:
    """`POST /v1/chat/completions`, understood."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    """Schemas; empty where there are none or `tool_choice` is none."""
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    set_by_the_run: tuple[str, ...]
    """Sampling settings of the request that the run's own replace."""


def read_request(body: Any) -> ChatRequest:
    """Understand a body, whatever JSON it is.

    Raises:
        RequestError: names the field, what was got, and what to do.
    """
    try:
        plain_of(body, "the body")
        text_of(json.dumps(body, ensure_ascii=False), "the body")
        return _read(body)
    except WrongValue as error:
        raise RequestError(str(error)) from None


def _read(body: Any) -> ChatRequest:
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RequestError("messages: expected a list of messages with at least one")
    given = {key: value for key, value in body.items() if value is not None}
    unknown = [key for key in given if key not in (*_SET_BY_THE_RUN, *_WITHOUT_EFFECT, *_READ)]
    if unknown:
        raise RequestError(f"{', '.join(unknown)}: not offered by this endpoint. Leave it out")
    if given.get("n", 1) != 1:
        raise RequestError(
            f"n is {value_text(given['n'])}: one choice per request. The run samples several whole trajectories"
        )
    if given.get("top_logprobs"):
        raise RequestError("top_logprobs: only the sampled token's own log-prob is known. Leave it out")
    if _mapping(given, "response_format").get("type", "text") != "text":
        raise RequestError("response_format: constrained decoding would change the policy's distribution. Leave it out")
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(f"tool_choice is {value_text(choice)}: a policy is not forced to call. Use auto or none")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body["messages"])]
    tools = _tools(given.get("tools", []))
    return ChatRequest(
        messages=messages_of(messages, "messages"),
        tools=tools if choice != "none" else [],
        max_tokens=_positive(given, "max_completion_tokens") or _positive(given, "max_tokens"),
        stop=stops_of(given.get("stop"), "stop"),
        stream=bool_of(given.get("stream", False), "stream"),
        include_usage=bool_of(_mapping(given, "stream_options").get("include_usage", False), "include_usage"),
        logprobs=bool_of(given.get("logprobs", False), "logprobs"),
        set_by_the_run=tuple(key for key in _SET_BY_THE_RUN if key in given),
    )


def _mapping(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = given.get(key, {})
    if not isinstance(value, dict):
        raise RequestError(f"{key} is {value_text(value)}, must be an object")
    return value


def _positive(given: Mapping[str, Any], key: str) -> int | None:
    return None if given.get(key) is None else count_of(given[key], key)


def _tools(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RequestError(f"tools is {value_text(value)}, must be a list of functions")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{index}]: expected a function with a name, got {value_text(tool, 80)}")
    return value


def _message(value: Any, where: str) -> Message:
    """A message with the keys that templates know; typed text parts become one text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RequestError(f"{where}: expected a message with a role, got {value_text(value, 80)}")
    message = {key: value[key] for key in _MESSAGE_KEYS if value.get(key) is not None}
    if not message.get("reasoning_content") and (reasoning := reasoning_of(value)) is not None:
        message["reasoning_content"] = reasoning
    if message["role"] == "developer":
        message["role"] = "system"
    message["content"] = _text(value.get("content"), where)
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise RequestError(f"{where}.tool_calls: expected a list, got {value_text(message['tool_calls'], 80)}")
        message["tool_calls"] = [_call(call, where) for call in message["tool_calls"]]
    return message


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(f"{where}.content: expected a text or a list of parts, got {value_text(content, 80)}")
    odd = [part.get("type") for part in content if part.get("type") != "text"]
    if odd:
        kind = odd[0] if isinstance(odd[0], str) else value_text(odd[0], 80)
        raise RequestError(f"{where}.content: parts of type {kind} are not offered by this endpoint. Send text")
    return "".join(text_of(part.get("text", ""), f"{where}.content") for part in content)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.tool_calls: expected functions with a name, got {value_text(call, 80)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # What is no JSON object, or none that can be encoded, stays the text that somebody else wrote.
        with contextlib.suppress(ValueError, RecursionError):
            read = plain_of(json.loads(arguments), "arguments")
            text_of(json.dumps(read, ensure_ascii=False), "arguments")
            arguments = read if isinstance(read, dict) else arguments
    return {
        "id": text_of(call.get("id") or "", f"{where}.tool_calls: id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def likeness(message: Message) -> tuple[Any, ...]:
    """What must agree for two messages to be the same. Reasoning does not count: most clients never send it back."""
    calls = [(c["function"]["name"], _comparable(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    return message["role"], content, calls, message.get("tool_call_id") if message["role"] == "tool" else None


def _comparable(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)


def completion(
    turn: AssistantTurn, message: Message, record: TrajectoryRecord, chat: Any, request: ChatRequest, reply_id: str
) -> dict[str, Any]:
    """The response body for the turn that a session has just recorded at the end of `record`."""
    span = record.turns[-1]
    ids = record.token_ids[span.start : span.end]
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    shown: dict[str, Any] = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if (reasoning := reasoning_of(message)) is not None:
        shown["reasoning_content"] = reasoning
    if calls:
        shown["tool_calls"] = calls
    choice: dict[str, Any] = {"index": 0, "message": shown, "finish_reason": _finish(turn, bool(calls))}
    if request.logprobs:
        items = zip(ids, record.rollout_log_probs[span.start : span.end])
        content = [{"token": chat.decode([i]), "logprob": p, "bytes": None, "top_logprobs": []} for i, p in items]
        choice["logprobs"] = {"content": content, "refusal": None}
    return {
        "id": reply_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [choice],
        "usage": {
            "prompt_tokens": span.start,
            "completion_tokens": len(ids),
            "total_tokens": span.end,
        },
    }


def _finish(turn: AssistantTurn, calls: bool) -> str:
    if turn.finish_reason != "stop":
        return "length"
    return "tool_calls" if calls else "stop"


def chunks(body: Mapping[str, Any], include_usage: bool) -> Sequence[dict[str, Any]]:
    """The same answer as the events of a stream: role, reasoning, text, calls, and the finish reason."""
    choice = body["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    head = {"id": body["id"], "object": "chat.completion.chunk", "created": body["created"], "model": body["model"]}
    events = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    if "logprobs" in choice:
        last["logprobs"] = choice["logprobs"]
    events.append({**head, "choices": [last]})
    if include_usage:
        events.append({**head, "choices": [], "usage": body["usage"]})
    return events


Answer = Callable[[Any], Awaitable[tuple[int, Any]]]
"""Body of a request -> (HTTP status, body of the answer: JSON data, or a list of the events of a stream)."""


class AgentServer:
    """Starts with the first conversation that is opened and ends with the last that is closed. One event loop only."""

    def __init__(self) -> None:
        _require()
        self._answers: dict[str, Answer] = {}
        self._lock: asyncio.Lock | None = None
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, answer: Answer) -> str:
        """The base URL under which `answer` is asked, such as `http://127.0.0.1:PORT/KEY/v1`.

        Runs on the rollout's loop, which also serves the requests. Waits for the server's start.

        Raises:
            EngineError: the server does not start.
        """
        self._lock = self._lock or asyncio.Lock()
        key = secrets.token_urlsafe(9)
        async with self._lock:
            if not self._answers:
                await self._start()
            self._answers[key] = answer
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/{key}/v1"

    async def close(self, url: str) -> None:
        """Requests to this URL are refused from now on. Runs on the rollout's loop. The last one waits for the server's
        end."""
        assert self._lock is not None
        async with self._lock:
            self._answers.pop(url.split("/")[-2], None)
            if not self._answers and self._task is not None:
                self._server.should_exit = True
                await self._task
                self._task = None

    async def _start(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/{key}/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/{key}/v1/models", self._models, methods=["GET"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve(), name="agent server")
        while not self._server.started:
            if self._task.done():
                raise EngineError(f"the agents' server did not start: {self._task.exception()!r}")
            await asyncio.sleep(0.005)

    async def _models(self, request: Any) -> Any:
        if request.path_params["key"] not in self._answers:
            return _over()
        return _json({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "verl_mt"}]})

    async def _complete(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        answer = self._answers.get(request.path_params["key"])
        if answer is None:
            return _over()
        read = bytearray()
        async for part in request.stream():
            read += part
            if len(read) > MAX_BODY_BYTES:
                words = f"the body has more than {MAX_BODY_BYTES} bytes; send fewer or shorter messages"
                # What is left of the body is not read: the connection cannot carry another request.
                return _json(error_body(words, "invalid_request_error"), 413, {"Connection": "close"})
        try:
            body = json.loads(read)
        except (ValueError, RecursionError) as error:
            return _json(error_body(f"the body is not JSON that can be read: {error}", "invalid_request_error"), 400)
        # Shielded: a client that hangs up does not leave half a turn in the record.
        status, content = await asyncio.shield(asyncio.ensure_future(answer(body)))
        if isinstance(content, list):
            return StreamingResponse(_events(content), media_type="text/event-stream")
        return _json(content, status)


def _over() -> Any:
    return _json(error_body("this conversation is over", "conversation_over"), 404)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    """Signs beyond ASCII are escaped: half of a surrogate pair, which a model may write into a call, has no UTF-8."""
    from starlette.responses import Response

    return Response(json.dumps(content), status, headers, media_type="application/json")


async def _events(content: list[Any]) -> Any:
    for event in content:
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


def error_body(message: str, kind: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "code": kind, "param": None}}


def _require() -> None:
    try:
        import starlette
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            'rollout.agent_function_path needs a web server that is not installed: pip install "verl_mt[openai]"'
        ) from error
    assert starlette
