"""What the client uses of the `mcp` package, under one name in its versions 1.24 and newer, and 2."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from mcp import ClientSession
from mcp.shared.message import SessionMessage

try:
    import httpx2 as httpx
    import mcp_types as types
    from mcp import Client, MCPError
except ImportError:
    if not TYPE_CHECKING:
        import httpx
        from mcp import McpError as MCPError
        from mcp import types

__all__ = ["IS_FIRST", "MCPError", "SessionMessage", "httpx", "types"]

IS_FIRST = not hasattr(types, "jsonrpc_message_adapter")
"""Whether it is version 1."""
_any: Any = types


@contextlib.asynccontextmanager
async def open_client(
    transport: AbstractAsyncContextManager[tuple[Any, Any]], *, has_session: bool = False
) -> AsyncIterator[Any]:
    """A client with `call_tool(name, arguments)` and `list_tools(cursor=...)`.

    Args:
        has_session: agree on a version of the protocol in which a server over HTTP knows its connections apart.
    """
    if IS_FIRST:
        async with transport as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            yield session
    else:
        async with Client(transport, mode="legacy" if has_session else "auto") as client:
            yield client


def read_message(text: str) -> Any:
    """Raises:
    ValueError: the text is no JSON-RPC message.
    """
    if IS_FIRST:
        return _any.JSONRPCMessage.model_validate_json(text)
    return types.jsonrpc_message_adapter.validate_json(text, by_name=False)


def error_message(request_id: int, text: str) -> Any:
    """The answer to a request that a server answered with nothing that can be read."""
    error = types.ErrorData(code=types.PARSE_ERROR, message=text)
    message = types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)
    return _any.JSONRPCMessage(message) if IS_FIRST else message


def result_of(message: Any) -> Any:
    """The `result` of an answer; None of every other message."""
    return getattr(getattr(message, "root", message), "result", None)


def get(model: Any, name: str) -> Any:
    """An attribute of one of the protocol's models by its name in version 2: `is_error` is `isError` in version 1."""
    first, *others = name.split("_")
    return getattr(model, name if hasattr(model, name) else first + "".join(map(str.capitalize, others)))
