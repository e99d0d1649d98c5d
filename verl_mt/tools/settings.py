"""A tool's `config` mapping, checked: every key known, every value of its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from verl_mt.config.redact import redact
from verl_mt.errors import ConfigError
from verl_mt.plugins import suggest


class ToolSettings(BaseModel):
    """Base of the settings of shipped tools: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Settings = TypeVar("Settings", bound=ToolSettings)


def parse_settings(kind: type[Settings], config: Mapping[str, Any]) -> Settings:
    """The settings of one YAML entry. `config.type: native` says nothing and is left out.

    Raises:
        ConfigError: an unknown key (with "did you mean") or a value that its field refuses; names all of them.
    """
    given = {key: value for key, value in config.items() if (key, value) != ("type", "native")}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(kind, item) for item in error.errors())) from error


def _explain(kind: type[ToolSettings], item: Any) -> str:
    key = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        return f"config: unknown key {key!r}{suggest(key, kind.model_fields)}. Known: {', '.join(kind.model_fields)}"
    message = item["msg"].removeprefix("Value error, ")
    if not key:  # of several keys together: their values may hold a secret
        return message
    name = str(item["loc"][0])  # a wrong value may be a key or a token too
    return f"config.{key}: {message}, got {redact({'config': {name: item['input']}})['config'][name]!r}"
