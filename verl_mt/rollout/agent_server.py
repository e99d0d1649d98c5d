"""The HTTP side of agents: one server on loopback while agents run, one base URL for each conversation."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from verl_mt.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

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
        """Requests to this URL are refused from now on."""
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
        return _json({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "verl_mt"}]})

    async def _complete(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        answer = self._answers.get(request.path_params["key"])
        if answer is None:
            return _json(error_body("this conversation is over", "conversation_over"), 404)
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return _json(error_body(f"the body is not JSON that can be read: {error}", "invalid_request_error"), 400)
        # Shielded: a client that hangs up does not leave half a turn in the record.
        status, content = await asyncio.shield(asyncio.ensure_future(answer(body)))
        if isinstance(content, list):
            return StreamingResponse(_events(content), media_type="text/event-stream")
        return _json(content, status)


def _json(content: Any, status: int = 200) -> Any:
    """Signs beyond ASCII are escaped: half of a surrogate pair, which a model may write into a call, has no UTF-8."""
    from starlette.responses import Response

    return Response(json.dumps(content), status, media_type="application/json")


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
