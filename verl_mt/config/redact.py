"""Secrets never reach a file: every mapping that a run writes goes through `redact`."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "***"
_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:api_?key|access_?key|secret|secret_?key|password|passwd|token|authorization|credentials?|bearer)$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/?#:@]*):((?:\$\{[^}]*\}|[^\s/?#])+)@")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^}]*\}")
_HARMLESS = {
    "eos_token",
    "pad_token",
    "bos_token",
    "unk_token",
    "stop_token",
    "mask_token",
    "end_token",
    "start_token",
}


def is_secret_name(name: str) -> bool:
    """`api_key`, `X-API-KEY`, `hf_token`, `password`, `authorization`, ...; not `max_tokens` or `eos_token`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return snake not in _HARMLESS and bool(_SECRET_NAME.search(snake))


def redact(value: Any) -> Any:
    """A copy with every non-empty string under a secret's name replaced by `***`, at any depth, and so the password of
    every URL in any string (`http://user:***@host`).

    Numbers, booleans and null stay: a limit is not a secret. An interpolation of the environment
    (`${oc.env:WANDB_API_KEY}`) stays too: it names the secret and does not hold it.
    """
    if isinstance(value, dict):
        return {k: _hide(v) if is_secret_name(str(k)) else redact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(v) for v in value]
    return _URL_PASSWORD.sub(_hide_password, value) if isinstance(value, str) else value


def redacted_keys(value: Any, key: str = "", *, secret: bool = False) -> list[str]:
    """Dotted keys of the values in which `redact` replaced something.

    Args:
        key: where `value` is.
        secret: it is under a secret's name.
    """
    if isinstance(value, dict):
        below = [(f"{key}.{k}" if key else str(k), v, is_secret_name(str(k))) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        below = [(f"{key}[{k}]", v, secret) for k, v in enumerate(value)]
    else:
        lost = isinstance(value, str) and (value == REDACTED if secret else f":{REDACTED}@" in value)
        return [key] if lost else []
    return [found for name, v, hidden in below for found in redacted_keys(v, name, secret=hidden)]


def _hide_password(found: re.Match[str]) -> str:
    user, password = found.groups()
    return found.group() if _ENVIRONMENT.fullmatch(password) else f"{user}:{REDACTED}@"


def _hide(value: Any) -> Any:
    if isinstance(value, str):
        return value if not value or _ENVIRONMENT.fullmatch(value) else REDACTED
    if isinstance(value, list | tuple):
        return [_hide(v) for v in value]
    return redact(value)
