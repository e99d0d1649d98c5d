"""Secrets never reach a file: every mapping that a run writes goes through `redact`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

REDACTED = "***"
_LONG_NUMBER = 100_000
"""From here on a number under a secret's name is a secret, below it a limit or a switch."""
_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:(?:api|access|secret|private|auth|ssh|signing|encryption|account|subscription|master|service|"
    r"license|wandb|swanlab|comet|neptune|serper|serpapi|tavily|brave|bing|exa|jina|firecrawl|openai|anthropic|gemini|"
    r"google|azure|aws|gcp|mistral|groq|cohere|deepseek|together|fireworks|e2b|modal|hf|huggingface|langsmith|langfuse|"
    r"github|gitlab|slack|discord|telegram|stripe|twilio|sendgrid)_?keys?|"
    r"secrets?|passwords?|passwd|passcode|passphrase|pwd|pw|pat|(?:^|db_|user_|smtp_|redis_|mysql_|pg_)pass|"
    r"account_sid|webhook(?:_?url)?|token|(?:api|access|auth)_?tokens|authorization|o?auth|credentials?|"
    r"bearer|cookies?|jwt)$",
    re.IGNORECASE,
)
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
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^}]*\}")
_TEMPLATE = re.compile(r"\{[{%]")
_HIDDEN = re.escape(REDACTED)

_IN_URL = (
    re.compile(r"(?<=://)[^\s/?#:@]*:(?P<secret>(?:\$\{[^}]*\}|[^\s/?#])+)@"),
    re.compile(rf"(?<=[?&])(?:key|sig|signature)=(?P<secret>{_HIDDEN}|[\w\-.~%+/]{{16,}})"),
    re.compile(r"\bcurl\b[^\n]{0,200}?\s(?:-u|--user)[ =]+[^\s:'\"/]+:(?P<secret>[^\s'\"$/][^\s'\"]*)"),
)
_NAMED = (
    # token=..., --token=..., ?token=..., a.b.token=...
    re.compile(r"(?<![\w.\-])(?:--?)?(?P<name>[A-Za-z][\w.\-]*)=(?P<secret>[^\s&;,#'\"<>{}$()\[\]]+)"),
    re.compile(r"(?<!\S)--?(?P<name>[A-Za-z][\w.\-]*)\s+(?P<secret>[^\s\-$'\"<{]\S*)"),
    re.compile(r"\A(?P<name>[A-Za-z][\w\-]*):[ \t]+(?P<secret>[^\s$<{].*)\Z"),
    # JSON, and lines of YAML, in a text
    re.compile(r"(?P<quote>[\"'])(?P<name>[A-Za-z][\w.\-]*)(?P=quote)\s*:\s*[\"'](?P<secret>[^\"'\n$]+)[\"']"),
    re.compile(
        rf"^[ \t\-]*(?P<name>[A-Za-z][\w\-]*):[ \t]+(?P<secret>{_HIDDEN}|(?=\S*\d)[^\s$<{{\"'][^\s\"']{{7,}})[ \t]*$",
        re.MULTILINE,
    ),
)
_TOKENS = (
    # what a service's tokens begin with, and the rest of them
    (r"A[KSBC][IC]A", r"[A-Z\d]{16}"),  # AWS
    (r"AIza", r"[\w\-]{30,}"),  # Google
    (r"ya29\.", r"[\w\-]{20,}"),
    (r"github_pat_", r"\w{20,}"),
    (r"eyJ", r"[\w\-]{8,}\.eyJ[\w\-]{8,}(?:\.[\w\-]*)?"),  # JSON web token
    (r"https://hooks\.slack\.com/(?:services|workflows)/", r"[\w/+\-]{20,}"),
    (r"https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/", r"\d+/[\w\-]{20,}"),
    (r"xapp-|xox[a-z]-", r"[\w\-]{10,}"),
    (r"X-Amz-(?:Signature|Security-Token)=", r"[\w%+/=\-]{16,}"),
    (r"nvapi-|tvly-", r"[\w\-]{16,}"),
    (r"xai-|gsk_|r8_|pplx-|jina_|lsv2_\w\w_|whsec_", r"\w{16,}"),
    (r"[srp]k_(?:live|test|prod)_", r"\w{10,}"),
    (r"npm_", r"[A-Za-z\d]{30,}"),
    (r"pypi-", r"[\w\-]{30,}"),
    (r"SG\.", r"[\w\-]{16,}\.[\w\-]{16,}"),
    (r"\d{8,10}:(?=AA|\*\*\*)", r"[\w\-]{35}"),  # Telegram
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----", r"(?:(?!-----END)[\s\S])+"),
)
_SERVICES = re.compile(
    r"(?<![\w/.\-])(?:"
    + "|".join(rf"(?:{head})(?P<t{k}>{_HIDDEN}|{rest})" for k, (head, rest) in enumerate(_TOKENS))
    + r")(?![\w/])"
)
_SHAPED = re.compile(
    r"(?<![\w/.\-])(?:"
    # Of 6 characters or more with a digit or a capital, or long: no word that a person would write after the prefix.
    rf"sk-(?!learn)(?P<sk>{_HIDDEN}|(?=\S*[A-Z\d])[\w\-]{{6,}}|[\w\-]{{14,}})|"
    rf"(?:hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-)(?P<hf>{_HIDDEN}|(?=\w*[A-Z\d])[A-Za-z\d]{{6,}}|[A-Za-z\d]{{14,}})|"
    rf"[Bb]earer[ ]+(?P<bearer>{_HIDDEN}|(?=\S*\d)[\w\-.~+/=]{{8,}})"
    r")(?![\w/.\-])"
)
"""What begins as the tokens of well-known services do."""
_NAME_OF_A_THING = re.compile(r"(?:^|_)(?:name|path|dir|file|model|backend|format)$", re.IGNORECASE)
"""There `hf_mistral7b` is somebody's word, and only what is as long as a real token is taken for one."""


def is_secret_name(name: str) -> bool:
    """`api_key`, `X-API-KEY`, `hf_token`, `password`, `Cookie`, ...; not `max_tokens`, `author` or `eos_token`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return snake not in _HARMLESS and bool(_SECRET_NAME.search(snake))


def redact(value: Any, name: str = "") -> Any:
    """A copy with `***` in the place of every secret, at any depth: of a non-empty string under a secret's name, and in
    any string of a URL's password, of what follows a secret's name (`?token=`, `--token=`, `api_key=`, `X-Auth: `), and
    of what looks as tokens do (`sk-`, `hf_`, `Bearer `). In a list, also of the word after `--token`.

    Short numbers, booleans and null stay: a limit is not a secret. An interpolation of the environment
    (`${oc.env:WANDB_API_KEY}`) stays too: it names the secret and does not hold it.

    Args:
        name: the key under which `value` stands.
    """
    if isinstance(value, dict):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(v, n) for v, n in _names_in_list(value, name)]
    if isinstance(value, bytes) and value and is_secret_name(name):
        return REDACTED
    if isinstance(value, int) and abs(value) >= _LONG_NUMBER and is_secret_name(name):
        return REDACTED
    if not isinstance(value, str):
        return value
    shown, end = "", 0
    for start, stop in _secrets(value, name):
        shown += value[end:start] + REDACTED
        end = stop
    return shown + value[end:]


def redacted_keys(value: Any, key: str = "", name: str = "") -> list[str]:
    """Dotted keys of the values in which `redact` replaced something.

    Args:
        key: where `value` is.
        name: as for `redact`.
    """
    if isinstance(value, dict):
        below = [(f"{key}.{k}" if key else str(k), v, str(k)) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        below = [(f"{key}[{k}]", v, n) for k, (v, n) in enumerate(_names_in_list(value, name))]
    else:
        lost = isinstance(value, str) and any(value[start:end] == REDACTED for start, end in _secrets(value, name))
        return [key] if lost else []
    return [found for where, v, n in below for found in redacted_keys(v, where, n)]


def _names_in_list(values: list[Any] | tuple[Any, ...], name: str) -> Iterator[tuple[Any, str]]:
    """Each value with its name: the list's own, or the option before it (`--token`, its value)."""
    before = ""
    for value in values:
        is_option = isinstance(value, str) and re.fullmatch(r"--?[A-Za-z][\w.\-]*", value) is not None
        yield value, before if is_secret_name(before) and not is_option else name
        before = value.lstrip("-") if is_option else ""


def _secrets(text: str, name: str) -> list[tuple[int, int]]:
    """Where in a text secrets stand, in order; the text is the value of `name`."""
    if is_secret_name(name):
        return [(0, len(text))] if text and not _ENVIRONMENT.fullmatch(text) else []
    found = [match.span("secret") for rule in _IN_URL for match in rule.finditer(text)]
    if not _TEMPLATE.search(text):  # a chat template sets variables
        found += [m.span("secret") for rule in _NAMED for m in rule.finditer(text) if is_secret_name(m["name"])]
    found += [match.span(match.lastgroup or 0) for match in _SERVICES.finditer(text)]
    shaped = [match.span(match.lastgroup or 0) for match in _SHAPED.finditer(text)]
    found += [s for s in shaped if s[1] - s[0] >= 20 or not _NAME_OF_A_THING.search(name)]
    apart: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if (not apart or start >= apart[-1][1]) and not _ENVIRONMENT.fullmatch(text[start:end]):
            apart.append((start, end))
    return apart
