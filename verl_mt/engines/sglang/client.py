"""One SGLang engine as seen from the rollout's event loop, wherever it runs."""

from __future__ import annotations

import abc
from typing import Any


class Client(abc.ABC):
    """Names of calls are those of SGLang's HTTP endpoints; bodies are theirs, too.

    A client serves one life of an engine: after `wait_gone` has returned it is of no more use.
    """

    name: str
    """For messages."""
    local: bool
    """It runs on this machine and can open this machine's shared memory."""
    url: str = ""
    """Of an HTTP server."""
    num_ranks = 1
    """Over which the model is split (tensor parallelism)."""
    on_gpu = False
    """A server whose weights are on a GPU, as far as it says."""
    pristine = True
    """Since it was started, nobody has changed the weights of the model's files."""

    @property
    def pid(self) -> int | None:
        """Of the engine's main process; None where it is not ours."""
        return None

    @abc.abstractmethod
    async def start(self, timeout_s: float) -> None:
        """Connect, and wait until the engine serves.

        Raises:
            ConfigError: it cannot be started or reached, or is not the engine that is wanted.
        """

    @abc.abstractmethod
    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/generate` to a request with `input_ids`.

        Raises:
            EngineError: the engine refused the request.
            EngineGoneError: the engine went away.
        """

    @abc.abstractmethod
    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        """Anything else, by its endpoint's name.

        Raises:
            EngineError: the engine refused.
            EngineGoneError: the engine went away, or did not answer in time and was given up.
        """

    @property
    @abc.abstractmethod
    def is_gone(self) -> bool:
        """Whether `wait_gone` would return at once."""

    @abc.abstractmethod
    async def wait_gone(self) -> str:
        """Return, with the reason, when the engine has gone away."""

    @abc.abstractmethod
    def give_up(self, reason: str) -> None:
        """Treat the engine as gone: what waits for it raises `EngineGoneError`, and `wait_gone` returns."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End the engine if it is ours, else leave it in peace. Idempotent; never raises."""
