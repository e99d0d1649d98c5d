"""Another model behind an OpenAI-compatible URL: settings, client and limit, for whoever asks one (a judge, a user)."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping
from typing import Any

from verl_mt.errors import ConfigError

Settings = Mapping[str, tuple[type | tuple[type, ...], Any]]
"""Name -> (type, default); a default of None = required."""

CONNECTION: Settings = {
    "base_url": (str, None),
    "model": (str, None),
    "api_key_env": (str, ""),
    "request_timeout_s": ((int, float), 30.0),
    "extra_body": (dict, {}),
}
"""What every one of them has: the URL with /v1, the model's name there, the environment variable that holds the key,
seconds of one attempt, further fields of the request."""


def read_settings(given: Mapping[str, Any], known: Settings) -> tuple[dict[str, Any], list[str]]:
    """The settings with their defaults, and all that is wrong with them."""
    problems = [f"unknown setting {key!r}; there are {', '.join(known)}" for key in given if key not in known]
    settings = {key: given.get(key, default) for key, (_, default) in known.items()}
    for key, (kind, default) in known.items():
        value = settings[key]
        if value is None and default is None:
            problems.append(f"{key} is required")
        elif not isinstance(value, kind) or isinstance(value, bool):
            problems.append(f"{key} has the wrong type: got {value!r}")
    if settings["api_key_env"] and settings["api_key_env"] not in os.environ:
        problems.append(f"api_key_env names {settings['api_key_env']}, which is not in the environment")
    return settings, problems


def import_openai(who: str) -> Any:
    """The `openai` package.

    Raises:
        ConfigError: it is not installed; names who needs it.
    """
    try:
        import openai
    except ImportError as error:
        raise ConfigError(f'{who} needs the openai package: pip install "verl_mt[openai]"') from error
    return openai


class RemoteModel:
    """A client and a limit of requests at once per event loop: connections belong to the loop that opened them, and a
    loop that hangs is replaced by another.

    Args:
        who: who asks, for errors.
        settings: read by `read_settings`, with `max_concurrent`.
        max_retries: attempts of the client itself after the first.
    """

    def __init__(self, who: str, settings: Mapping[str, Any], *, max_retries: int):
        self._who, self._set, self._max_retries = who, settings, max_retries
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, asyncio.Semaphore]]
        self._by_loop = weakref.WeakKeyDictionary()

    def client(self) -> tuple[Any, asyncio.Semaphore]:
        """(An `openai.AsyncOpenAI`, the limit) of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            key = os.environ.get(self._set["api_key_env"], "") if self._set["api_key_env"] else ""
            made = import_openai(self._who).AsyncOpenAI(
                base_url=self._set["base_url"],
                api_key=key or "none",
                timeout=self._set["request_timeout_s"],
                max_retries=self._max_retries,
            )
            self._by_loop[loop] = made, asyncio.Semaphore(self._set["max_concurrent"])
        return self._by_loop[loop]
