"""verl's helpers of its MCP clients."""

from __future__ import annotations

import threading
import time
from typing import Any

__all__ = ["TokenBucket", "mcp2openai"]


class TokenBucket:
    """A limit of calls per second: `acquire` says whether one may begin now. From any thread.

    Args:
        rate_limit: tokens per second, and how many can be saved up.
    """

    def __init__(self, rate_limit: float):
        self.rate_limit = rate_limit
        self._lock = threading.Lock()
        self._tokens, self._counted_s = float(rate_limit), time.monotonic()

    def acquire(self) -> bool:
        """Take one token; False where there is none. Runs in any thread and waits for nothing."""
        with self._lock:
            now = time.monotonic()
            grown = self._tokens + (now - self._counted_s) * self.rate_limit
            self._tokens, self._counted_s = min(self.rate_limit, grown), now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


def mcp2openai(mcp_tool: Any) -> dict[str, Any]:
    """The OpenAI schema of a tool that an MCP server lists (`mcp_types.Tool`, or one of an older `mcp` package)."""
    schema = mcp_tool.input_schema if hasattr(mcp_tool, "input_schema") else mcp_tool.inputSchema
    parameters = {**schema, "required": schema.get("required") or []}
    function = {"name": mcp_tool.name, "description": mcp_tool.description or "", "parameters": parameters}
    return {"type": "function", "function": {**function, "strict": False}}
