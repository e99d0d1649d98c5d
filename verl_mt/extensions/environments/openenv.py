"""OpenEnv: environments that a server runs, with a session for each conversation."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any
from urllib.request import Request, urlopen

from verl_mt.data.user_values import number_of
from verl_mt.environments.base import Done, Environment
from verl_mt.errors import ConfigError, PluginError, ToolCallError

_ANSWER_S = 86_400.0
"""Deadline of the client in seconds, longer than the deadlines of a run."""
_CONNECT_S = 10.0
_OWN_COLUMNS = ("prompt", "data_source", "environment", "reward_model", "extra_info", "ability", "images", "videos")
_OF_MCP = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action schemas of servers whose actions are calls of MCP tools."""
_STEP = "step"


class OpenEnv(Environment):
    """An environment of an OpenEnv server. The score is the sum of the rewards.

    The server's MCP tools are the model's tools. If an action is something else, the model's text is the action where
    the action has one required field, a text. Otherwise the tool `step` takes the fields of the action.

    Args:
        url: of the server, `http://HOST:PORT`.
        headers: sent with each request, such as `{Authorization: Bearer ...}`.
        shown: the field of an observation that the model reads; None = the only text of it, or all fields as JSON.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, shown: str | None = None):
        self._client = _client_class()(url, _CONNECT_S, _ANSWER_S, headers=dict(headers or {}))
        self._field = _actions(url, *sorted((headers or {}).items()))[0]
        self._shown, self._total = shown, 0.0

    @classmethod
    def tool_schemas(
        cls, *, url: str | None = None, headers: Mapping[str, str] | None = None, **config: Any
    ) -> list[dict[str, Any]]:
        """The server's tools, or one for its action. Waits for the server.

        Raises:
            ConfigError: no `url`.
            PluginError: the package is missing, or the server cannot be reached.
        """
        if url is None:
            raise ConfigError(
                "environment.config.url is not set. Give the address of the OpenEnv server: http://HOST:PORT"
            )
        return _actions(url, *sorted((headers or {}).items()))[1]

    async def reset(self, **row: Any) -> str | None:  # type: ignore[override]
        """The first observation. The row's columns are the arguments of the server's `reset`."""
        result = await self._client.reset(**{k: v for k, v in row.items() if k not in _OWN_COLUMNS})
        return self._seen(result)[0] or None

    async def reply(self, text: str) -> tuple[str, float]:
        """The text is the action. Where actions are calls, a turn without one ends the episode."""
        if self._field is None:
            raise Done("")
        return self._seen(await self._client.step({self._field: text}))

    async def call_tool(self, name: str, parameters: dict[str, Any]) -> tuple[str, float, dict[str, Any]]:
        """Take the action."""
        action = {"type": "call_tool", "tool_name": name, "arguments": parameters} if name != _STEP else parameters
        return *self._seen(await self._client.step(action)), {}

    def score(self) -> float:
        """The sum of the rewards."""
        self._client.check()
        return self._total

    async def close(self) -> None:
        """End the session at the server."""
        await self._client.close()

    def _seen(self, result: Any) -> tuple[str, float]:
        """The observation as text, and its reward."""
        gained = 0.0 if result.reward is None else number_of(result.reward, "the reward")
        self._total += gained
        self.done = bool(result.done)
        fields = {k: v for k, v in dict(result.observation).items() if k != "metadata" and v not in (None, "", [], {})}
        if self._shown is not None:
            return _text(result.observation[self._shown]), gained
        if "tool_name" not in fields:
            return _text(next(iter(fields.values())) if len(fields) == 1 else fields) if fields else "", gained
        if "error" in fields:
            raise ToolCallError(str(fields["error"].get("message")))
        answer = fields.get("result", "")
        parts = answer.get("content") if isinstance(answer, dict) else None
        text = "\n".join(part["text"] for part in parts if part.get("type") == "text") if parts else _text(answer)
        if isinstance(answer, dict) and answer.get("is_error"):
            raise ToolCallError(text)
        return text, gained


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@functools.cache
def _client_class() -> type[Any]:
    """A client with one session: the package's own connects again by itself, to another episode.

    Raises:
        PluginError: the package is not installed.
    """
    try:
        from openenv import GenericEnvClient
    except ImportError as error:
        raise PluginError(f"OpenEnv needs the package openenv ({error}): pip install openenv") from error

    class OneSession(GenericEnvClient):
        has_begun = False

        def check(self) -> None:
            if self.has_begun and (self._ws is None or self._ws.close_code is not None):
                raise ConnectionError(f"the connection to {self._ws_url} broke, so the episode failed")

        async def _ensure_connected(self) -> None:
            self.check()
            await super()._ensure_connected()
            self.has_begun = True

    return OneSession


@functools.cache
def _actions(url: str, *headers: tuple[str, str]) -> tuple[str | None, list[dict[str, Any]]]:
    """The field of an action that the model's text fills (None = it calls), and the OpenAI schemas of tools.

    Raises:
        PluginError: the package is missing, or the server cannot be reached.
    """
    client = _client_class()(url, _CONNECT_S, _ANSWER_S, headers=dict(headers))
    try:
        with urlopen(Request(f"{url.rstrip('/')}/schema", headers=dict(headers)), timeout=_CONNECT_S) as answer:
            action = json.load(answer)["action"]
        if action.get("title") in _OF_MCP:
            with client.sync() as session:
                session.reset()
                tools = session.step({"type": "list_tools"}).observation["tools"]
            return None, [_tool(t["name"], t["description"], t["input_schema"]) for t in tools]
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise PluginError(
            f"environment.config.url: the OpenEnv server {url} cannot be used: {error}. Start it, and give the address "
            "of its root"
        ) from error
    fields = {name: schema for name, schema in action.get("properties", {}).items() if name != "metadata"}
    required = [name for name in action.get("required", ()) if name in fields]
    if len(required) == 1 and fields[required[0]].get("type") == "string":
        return required[0], []
    return None, [_tool(_STEP, action.get("description", "Act."), {**action, "properties": fields})]


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, **parameters}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
