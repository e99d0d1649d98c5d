"""A running HTTP server of an engine, as seen from the rollout's event loop and from a rank."""

from __future__ import annotations

import abc
import asyncio
import json
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx

from verl_mt.engines.base import Receiver
from verl_mt.errors import ConfigError, EngineError, EngineGoneError, error_text
from verl_mt.extensions.cluster.replicas import open_files
from verl_mt.extensions.cluster.replicas.clients import CONNECT_S, Client, Endpoint
from verl_mt.extensions.cluster.replicas.options import is_local

KEY = "actor_rollout_ref.rollout.servers"
_START_S = 30.0
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


class Post(NamedTuple):
    """One request to a server."""

    path: str
    body: dict[str, Any] = {}
    query: dict[str, Any] = {}


class ServerClient(Client):
    """One server, from when it answers until it does not.

    Args:
        url: `http://host:port`.
        headers: of each request; None = the key of `key_variable`, if there is one.
    """

    kind: ClassVar[str]
    """The engine's name in messages."""
    tested: ClassVar[str]
    """The version that the tests run."""
    key_variable: ClassVar[str]
    """Environment variable of the API key."""
    asks: ClassVar[str]
    """A path that shows whether such a server is there."""

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        super().__init__()
        self.name = f"{self.kind} server {url}"
        self.url = url
        self.local = is_local(url)
        key = os.environ.get(self.key_variable)
        self._headers = headers if headers is not None else {"Authorization": f"Bearer {key}"} if key else {}
        self._life = uuid.uuid4().hex

    @staticmethod
    @abc.abstractmethod
    def posts(name: str, body: dict[str, Any]) -> list[Post]:
        """What a call of `Client.call` is at this server, one after the other."""

    @abc.abstractmethod
    async def _attach(self, http: httpx.AsyncClient) -> None:
        """Compare the server with what is wanted, and learn what it is.

        Args:
            http: a connection for the start.

        Raises:
            ConfigError: it is another one.
            httpx.HTTPError: it does not answer.
        """

    def receiver(self) -> Receiver:
        call = _AtServer(self.name, self.url, self._life, type(self), tuple(self._headers.items()))
        return Receiver(call, self.num_ranks, self.on_gpu)

    @property
    def endpoint(self) -> Endpoint | None:
        return Endpoint(self.name, self._life, self.url, tuple(self._headers.items()))

    async def start(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(min(timeout_s, _START_S)), self._alone() as http:
                await self._attach(http)
        except (httpx.HTTPError, TimeoutError) as error:
            raise ConfigError(
                f"{KEY}: {self.url} does not answer ({type(error).__name__}: {error}). Does {self.kind} run there, "
                f"and can this machine reach it? `curl URL{self.asks}` must answer"
            ) from error

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        for post in self.posts(name, body):
            asked = self._post(post, self._connections().calls)
            response = await self._in_time(name, asked, timeout_s)
            _require_done(self.name, self.tested, name, response)

    async def answers(self) -> bool:
        """Whether the server serves."""
        try:
            response = await self._connections().calls.get(f"{self.url}/health", self._headers, CONNECT_S)
        except (httpx.HTTPError, EngineError):
            return False
        return response.status_code == 200

    async def stop(self) -> None:
        self.give_up("it was closed")
        await open_files.leave(self)

    def _connections(self) -> open_files.Shared:
        """Raises:
        EngineGoneError: the run has stopped using the server (`stop`), or is about to.
        """
        if self._reason is not None:
            raise self._gone_error()
        return open_files.shared(self)

    def _alone(self) -> httpx.AsyncClient:
        """A connection for the start."""
        # A server in the cluster is reached directly, whatever proxy this machine has for the world outside.
        return httpx.AsyncClient(base_url=self.url, headers=self._headers, timeout=CONNECT_S, trust_env=False)

    async def _generated(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Waits for the server's answer to a request.

        Raises:
            EngineError: it refused the request.
        """
        response = await self._post(Post(path, body), self._connections().requests)
        if response.status_code != 200:
            raise EngineError(f"{self.name} refused the request: {refusal(response)}")
        return response.json()

    async def _post(self, post: Post, by: open_files.Connections) -> httpx.Response:
        try:
            return await self._unless_gone(by.post(self.url + post.path, post.body, self._headers, post.query))
        except httpx.TransportError as error:
            self.give_up(f"{post.path} failed: {type(error).__name__}: {error}")
            raise self._gone_error() from error


@dataclass(frozen=True)
class _AtServer:
    """`ServerClient.call` for a thread, here or in a rank."""

    server: str
    url: str
    life: str
    client: type[ServerClient]
    headers: tuple[tuple[str, str], ...] = field(repr=False)

    def __call__(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        """Runs in a thread that publishes weights. Waits for the server."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        with httpx.Client(timeout=timeout, headers=dict(self.headers), trust_env=False) as http:
            for post in self.client.posts(name, body):
                try:
                    response = http.post(f"{self.url}{post.path}", json=post.body, params=post.query)
                except httpx.HTTPError as error:
                    reason = f"{name} failed: {error_text(error, named=True)}"
                    raise EngineGoneError(f"the {self.server} is gone: {reason}") from error
                _require_done(self.server, self.client.tested, name, response)


def _require_done(server: str, tested: str, name: str, response: httpx.Response) -> None:
    """Raises:
    EngineError: the server refused the call.
    """
    if response.status_code == 404:
        raise EngineError(f"{server} has no call {name}: it is too old. Start {tested} there")
    try:
        answer = response.json()
    except json.JSONDecodeError:
        answer = None
    if response.status_code != 200 or (isinstance(answer, dict) and answer.get("success") is False):
        raise EngineError(f"{server} refused {name}: {refusal(response)}")


def refusal(response: httpx.Response) -> str:
    """What a server said."""
    return f"status {response.status_code}: {response.text.strip()[:500]}"


async def fetch(http: httpx.AsyncClient, client: type[ServerClient], path: str) -> dict[str, Any]:
    """What a running server says at this path.

    Raises:
        ConfigError: it wants a key, or is no server of this kind.
        httpx.HTTPError: it does not answer.
    """
    url, response = str(http.base_url).rstrip("/"), await http.get(path)
    if response.status_code in (401, 403):
        raise ConfigError(
            f"{KEY}: {url} wants a key ({response.status_code}): put it in the variable {client.key_variable}"
        )
    if response.status_code != 200:
        raise ConfigError(f"{KEY}: {url}{path} answers with status {response.status_code}. Is that {client.tested}?")
    try:
        answer = response.json()
    except json.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise ConfigError(f"{KEY}: {url}{path} answers with something else than JSON. Is that {client.tested}?")
    return answer


def require_same_model(url: str, served: str, architectures: list[str] | None, wanted: str) -> None:
    """By the two folders' config.json where both are on this machine, else by the architecture.

    Args:
        url: of the server.
        served: path of its model.
        architectures: of its model, as far as it says.
        wanted: path of the trainer's model.

    Raises:
        ConfigError: the models differ, or cannot be compared.
    """
    if served == wanted:
        return
    want, have = _config_of(wanted), _config_of(served)
    if want is not None and have is not None:
        different = [key for key in ("architectures", *_SHAPE) if want.get(key) != have.get(key)]
        if not different:
            return
        what = ", ".join(f"{key} {have.get(key)} instead of {want.get(key)}" for key in different[:3])
    elif want is not None and architectures is not None:
        if want.get("architectures") == architectures:
            return
        what = f"architectures {architectures} instead of {want.get('architectures')}"
    else:
        what = "it cannot be told from here whether they are the same"
    raise ConfigError(
        f"{KEY}: {url} was started with another model: {served!r}, but actor_rollout_ref.model.path is {wanted!r} "
        f"({what}). Start the server with that model"
    )


def _config_of(path: str) -> dict[str, Any] | None:
    file = Path(path) / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
