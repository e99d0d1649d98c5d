"""Settings of a search: one dataclass for the tool's YAML, for rows that override it, and for custom functions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_mt.plugins import listing, suggest

BACKENDS = ("local", "google")
KEY_VARIABLE = "SERPER_API_KEY"
"""Environment variable of the key for backend `google` (serper.dev)."""

ROW_SETTINGS = ("topk", "backend", "retrieval_service_url", "gl", "hl")
"""What a row may override for its own searches: the others belong to the process."""


@dataclass(frozen=True)
class SearchSettings:
    """How to search.

    Raises:
        ValueError: a value of another type or outside its range, an unknown backend; or no key for `google`.
    """

    backend: str = "local"
    """`local` (a retrieval service) or `google` (through serper.dev; its key comes from the environment)."""
    retrieval_service_url: str = "http://127.0.0.1:8000/retrieve"
    """Where backend `local` posts `{queries, topk, return_scores}`."""
    topk: int = 3
    """Passages per query."""
    concurrency: int = 256
    """Requests under way at once, per tool object."""
    cache_size: int = 10_000
    """Answers that are kept, least recently used ones dropped; 0 = none."""
    timeout_s: float = 20.0
    """Deadline of one search from when it holds a slot, retries included."""
    retries: int = 2
    """How often a search is tried again that could not connect, was late, or was answered with 5xx or 429."""
    serper_url: str = "https://google.serper.dev/search"
    """Where backend `google` posts."""
    gl: str = "us"
    """Country of backend `google`."""
    hl: str = "en"
    """Language of backend `google`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
            if isinstance(value, bool) or not isinstance(value, accepted):
                raise ValueError(f"search setting {field.name} must be {_NAMES[kind]}, got {value!r}")
        for name, least in (("topk", 1), ("concurrency", 1), ("cache_size", 0), ("retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"search setting {name} must be at least {least}, got {getattr(self, name)}")
        if not self.timeout_s > 0:
            raise ValueError(f"search setting timeout_s must be above 0, got {self.timeout_s}")
        if self.backend not in BACKENDS:
            raise ValueError(
                f"unknown search backend {self.backend!r}{suggest(self.backend, BACKENDS)}. "
                f"Backends: {', '.join(BACKENDS)}"
            )
        for name in ("retrieval_service_url", "serper_url"):
            if not getattr(self, name).startswith(("http://", "https://")):
                raise ValueError(f"search setting {name} must be an http(s) URL, got {getattr(self, name)!r}")
        if self.backend == "google":
            self.api_key()

    def api_key(self) -> str:
        """The key of backend `google`.

        Raises:
            ValueError: the environment has none.
        """
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ValueError(f"search backend 'google' needs a key from serper.dev in the variable {KEY_VARIABLE}")
        return key

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> SearchSettings:
        """From a YAML entry's `config`; verl's `timeout`, `num_workers` and `rate_limit` are understood.

        Raises:
            ValueError: an unknown key, one setting under two names, or a value that cannot be.
        """
        given = {key: value for key, value in values.items() if key != "type"}
        if "timeout" in given:
            given["timeout_s"] = _only(given, "timeout", "timeout_s", where)
        workers = [given.pop(name) for name in ("num_workers", "rate_limit") if name in given]
        if workers:
            if "concurrency" in given:
                raise ValueError(f"{where}: concurrency is num_workers and rate_limit in one; give only concurrency")
            given["concurrency"] = min(workers)
        return cls(**_known(given, [field.name for field in dataclasses.fields(cls)], where))

    def overridden(self, values: Mapping[str, Any], where: str) -> SearchSettings:
        """These settings with those of a row.

        Raises:
            ValueError: a setting that a row cannot change, or a value that cannot be.
        """
        given = _known(dict(values), ROW_SETTINGS, where)
        try:
            return dataclasses.replace(self, **given) if given else self
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


_NAMES = {str: "text", int: "a whole number", float: "a number"}


def _only(given: dict[str, Any], alias: str, name: str, where: str) -> Any:
    value = given.pop(alias)
    if name in given:
        raise ValueError(f"{where}: {alias} and {name} are the same setting; give one of them")
    return value


def _known(given: dict[str, Any], names: Any, where: str) -> dict[str, Any]:
    for key in given:
        if key not in names:
            raise ValueError(f"{where}: unknown search setting {key!r}{suggest(key, names)}. Known: {listing(names)}")
    return given
