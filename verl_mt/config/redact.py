"""Secrets never reach a file: every mapping that a run writes goes through `redact`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

REDACTED = "***"
RANDOM = "***hidden***"
"""In the place of what only looks random. No user's separator reads so, and it is found again."""
_LONG_NUMBER = 100_000
"""From here on a number under a secret's name is a secret, below it a limit or a switch."""
_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:(?:api|access|secret|private|auth|ssh|signing|encryption|account|subscription|master|service|"
    r"license|wandb|swanlab|comet|neptune|serper|serpapi|tavily|brave|bing|exa|jina|firecrawl|openai|anthropic|gemini|"
    r"google|azure|aws|gcp|mistral|groq|cohere|deepseek|together|fireworks|e2b|modal|hf|huggingface|langsmith|langfuse|"
    r"github|gitlab|slack|discord|telegram|stripe|twilio|sendgrid)_?keys?|"
    r"secrets?|passwords?|passwd|passcode|passphrase|pwd|pw|pat|(?:^|db_|user_|smtp_|redis_|mysql_|pg_)pass|"
    r"account_sid|session_?id|webhook(?:_?url)?|token|(?:api|access|auth)_?tokens|authorization|o?auth|credentials?|"
    r"bearer|cookies?|jwt)$",
    re.IGNORECASE,
)
_HARMLESS = {f"{name}_token" for name in ("eos", "pad", "bos", "unk", "stop", "mask", "end", "start")}
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^},]*(?:,(?:null|''|\"\")?)?\}")
"""A variable's name. With a default it may hold the secret itself."""
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
    re.compile(r"\A(?P<name>[A-Za-z][\w\-]*):[ \t]+(?!none\Z)(?P<secret>[^\s$<{].*)\Z"),
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
    (r"https://[\w.\-]+\.webhook\.office\.com/", r"[\w/@+\-]{20,}"),  # Teams
    (r"xapp-|xox[a-z]-", r"[\w\-]{10,}"),
    (r"X-Amz-(?:Signature|Security-Token)=", r"[\w%+/=\-]{16,}"),
    (r"nvapi-|tvly-", r"[\w\-]{16,}"),
    (r"xai-|gsk_|r8_|pplx-|jina_|lsv2_\w\w_|whsec_", r"\w{16,}"),
    (r"[srp]k_(?:live|test|prod)_", r"\w{10,}"),
    (r"npm_", r"[A-Za-z\d]{30,}"),
    (r"pypi-", r"[\w\-]{30,}"),
    (r"SG\.", r"[\w\-]{16,}\.[\w\-]{16,}"),
    (r"\d{8,10}:(?=AA|\*\*\*)", r"[\w\-]{35}"),  # Telegram
    (r"[MNO][\w\-]{22,28}\.", r"[\w\-]{6}\.[\w\-]{27,}"),  # Discord
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----", r"(?:(?!-----END)[\s\S])+"),
)
_SERVICES = re.compile(
    r"(?<![\w/.\-])(?:"
    + "|".join(rf"(?:{head})(?P<t{k}>{_HIDDEN}|{rest})" for k, (head, rest) in enumerate(_TOKENS))
    + r")(?![\w/])"
)
_CERTAIN = (
    r"GOCSPX-|EAACEdEose0cBA|do[opr]_v1_|AGE-SECRET-KEY-1|AT[AC]TT3|dp\.(?:pt|st|ct|sa|scim)\.|duffel_(?:live|test)_|"
    r"dt0c01\.|EZ[AT]K(?=\w{50}|\*)|FLWSECK(?:_TEST)?-|fio-u-|gl(?:dt|ft|soat|rt|cbt|imt|ptt|agent|oas|pat)-|GR1348941|"
    r"glsa_|HRKU-AA|pat-[a-z]{2,3}\d-|api_org_(?=\w{34}|\*)|lin_api_(?=\w{40}|\*)|NR(?:AK|JS|II)-|ntn_(?=\d|\*)|"
    r"sha256~|pscale_(?:tkn|pw|oauth)_|PMAK-|pnu_|rdme_|rubygems_|tk-us-|xkeysib-|sntry[us]_|sm_(?:aat|pat|sat)_|"
    r"shippo_(?:live|test)_|shp(?:at|ca|pa|ss)_|sq0(?:atp|csp|idp)-|hv[sbr]\.|AKCp|e2b_|tgp_v1_|pcsk_|wandb_v1_|sbp_|"
    r"sb_secret_|tskey-[a-z]+-|figd_|dckr_pat_|(?:\w{14}\.)?atlasv1\."
)
_LIKELY = (
    r"LTAI|pat\w{14}\.|dapi|p8e-|v1\.0-|glc_|ico-|(?:pub)?key-|secret_|API-|pul-|sq[pua]_|sgp_|tfp_|AQVN|AP[\dA-F]|"
    r"fc-|fw_|csk-|rpa_|nfp_|ph[cx]_|re_|(?:AC|SK)[\da-f]{4}(?=[\da-f]{28}\b|\*)"
)
_RANDOM_AFTER = re.compile(
    rf"(?<![\w/.+\-])(?:(?:{_CERTAIN})(?P<certain>{_HIDDEN}|(?=\S*[A-Z\d])[\w.\-]{{16,}})|"
    rf"(?:{_LIKELY})(?P<likely>{_HIDDEN}|[\w.\-]{{16,}})|"
    rf"(?P<mailchimp>{_HIDDEN}|[\da-z]{{32}})-us\d\d?\b|(?P<maxmind>{_HIDDEN}|[\dA-Za-z]{{6}}_\w{{29}})_mmk\b)"
)
"""What stands before, or behind, the tokens of further services. After what may be a word too (`likely`) a token has to
look random."""
_SHAPED = re.compile(
    r"(?<![\w/.\-])(?:"
    # Of 6 characters or more with a digit or a capital, or long: no word that a person would write after the prefix.
    rf"sk-(?!learn)(?P<sk>{_HIDDEN}|(?=\S*[A-Z\d])[\w\-]{{6,}}|[\w\-]{{14,}})|"
    rf"(?:hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-)(?P<hf>{_HIDDEN}|(?=\w*[A-Z\d])[A-Za-z\d]{{6,}}|[A-Za-z\d]{{14,}})|"
    rf"[Bb]earer[ ]+(?P<bearer>{_HIDDEN}|(?=\S*\d)[\w\-.~+/=]{{8,}})"
    r")(?![\w/.\-])"
)
"""What begins as the tokens of well-known services do."""
_FOREIGN = re.compile(r"(?:^|_)(?:kwargs|config|policy_loss|tokens|keys)$", re.IGNORECASE)
"""Mappings and lists with settings of other people's code: there a name says little."""
_PUBLIC_NAME = re.compile(
    r"(?:^|_)(?:(?:uu)?id|rev(?:ision)?|commit|sha\d*|hash|digest|checksum|fingerprint)s?$", re.IGNORECASE
)
"""A hash under such a name is public."""
_PUBLIC_HASH = re.compile(r"(?:[/@]|sha256:)[\da-f]{7,64}\Z")
_ENV = re.compile(r"(?:^|_)(?:env|environ|environment|env_?vars?)$", re.IGNORECASE)
_KNOWN_VARIABLE = re.compile(
    r"(?:OMP|MKL|OPENBLAS|CUDA|NVIDIA|NCCL|GLOO|UCX|NVSHMEM|TORCH|PYTORCH|TRITON|HF|TRANSFORMERS|TOKENIZERS|SGLANG|VLLM|RAY|"
    r"WANDB|MLFLOW|PYTHON|LD|LC|XDG|SLURM|VERL_MT)_\w+|PYTHON\w+|PATH|HOME|LANG|TMPDIR|TERM|SHELL|USER|HOSTNAME|TZ|"
    r"MASTER_(?:ADDR|PORT)"
)
_PLAIN = re.compile(
    r"[\d.,:+\-]*|true|false|yes|no|on|off|none|auto|debug|info|warn|warning|error|(?:\w+:/)?[/~.][^?]*", re.IGNORECASE
)
"""A variable's value that is public: a number, a switch, a level, a path, an address."""
_NAME_OF_A_THING = re.compile(r"(?:^|_)(?:name|path|dir|file|model|backend|format)$", re.IGNORECASE)
"""There `hf_mistral7b` is somebody's word, and only what is as long as a real token is taken for one."""


def is_secret_name(name: str) -> bool:
    """`api_key`, `X-API-KEY`, `hf_token`, `password`, `Cookie`, ...; not `max_tokens`, `author` or `eos_token`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return snake not in _HARMLESS and bool(_SECRET_NAME.search(snake))


def redact(value: Any, name: str = "") -> Any:
    """A copy with `***` in the place of every secret, at any depth: of a non-empty string under a secret's name, and in
    any string of a URL's password, of what follows a secret's name (`?token=`, `--token=`, `api_key=`, `X-Auth: `), and
    of what looks as tokens do (`sk-`, `hf_`, `Bearer `). In a list, also of the word after `--token`. Under `env`, of
    what a variable holds, where it is neither well known nor a number, a switch or a path.

    In settings of other people's code (`kwargs`, `config`, `policy_loss`, lists under `tokens` and `keys`) what looks
    random is replaced too, by `***hidden***`, except under a name such as `revision`.

    Short numbers, booleans and null stay: a limit is not a secret. An interpolation of the environment
    (`${oc.env:WANDB_API_KEY}`) stays too: it names the secret and does not hold it.

    Args:
        name: the key under which `value` stands.
    """
    return _redact(value, name, _place(name, ""))


def redacted_keys(value: Any, key: str = "", name: str = "") -> list[str]:
    """Dotted keys of the values in which `redact` replaced something.

    Args:
        key: where `value` is.
        name: as for `redact`.
    """
    return list(_redacted_keys(value, key, name, _place(name, "")))


def is_random(text: str) -> bool:
    """Whether a run of letters, digits and separators looks like a key: 16 characters or more that change between
    letters and digits as no word, name or number does."""
    pieces = re.findall(r"[A-Za-z\d]+", text)
    length = sum(map(len, pieces))
    # Few separators, so that `Qwen3-30B-A3B` and the name of a pod are none. A UUID's longest piece has 12 characters.
    if length < max(16, 6 * len(pieces)) or max(map(len, pieces)) < 12:
        return False
    joined = "".join(pieces)
    letters = re.findall(r"[A-Za-z]", joined)
    if re.fullmatch(r"[\da-f]+|[\dA-F]+", joined) and 0 < len(letters) < length:
        return True
    parts = [part for piece in pieces for part in re.findall(r"[A-Z]*[a-z]+|[A-Z]+|\d+", piece)]
    if len(letters) < length / 4 or length >= 6 * len(parts):
        return False
    vowels = len(re.findall(r"[aeiouy]", joined, re.IGNORECASE))
    if not re.search(r"[A-Z]", joined) or not re.search(r"[a-z]", joined):
        return length < 3 * len(parts) or vowels < 0.3 * len(letters)
    words = re.findall(r"(?:[A-Z][a-z]{2,}|[a-z]{4,})", joined)  # `HunYuanMoEV1Model` is half words
    readable = sum(len(word) for word in words if re.search(r"[aeiouy]", word, re.IGNORECASE))
    return readable < length / 2 and (length < 4 * len(parts) or vowels < 0.3 * len(letters))


def _place(name: str, above: str) -> str:
    """Whose settings stand below `name`: "" our own, "foreign", or "env", variables of a process."""
    if _ENV.search(name):
        return "env"
    return above or ("foreign" if _FOREIGN.search(name) else "")


def _redact(value: Any, name: str, place: str) -> Any:
    if isinstance(value, dict):
        return {k: _redact(v, str(k), _place(str(k), place)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(v, n, place) for v, n in _names_in_list(value, name)]
    if isinstance(value, bytes) and value and is_secret_name(name):
        return REDACTED
    if isinstance(value, int) and abs(value) >= _LONG_NUMBER and is_secret_name(name):
        return REDACTED
    if not isinstance(value, str):
        return value
    shown, end = "", 0
    for start, stop, mark in _secrets(value, name, place):
        shown += value[end:start] + mark
        end = stop
    return shown + value[end:]


def _redacted_keys(value: Any, key: str, name: str, place: str) -> Iterator[str]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _redacted_keys(v, f"{key}.{k}" if key else str(k), str(k), _place(str(k), place))
    elif isinstance(value, list | tuple):
        for k, (v, n) in enumerate(_names_in_list(value, name)):
            yield from _redacted_keys(v, f"{key}[{k}]", n, place)
    elif isinstance(value, str):
        lost = any(value[start:end] == REDACTED for start, end, _ in _secrets(value, name, place))
        if lost or RANDOM in value:
            yield key


def _names_in_list(values: list[Any] | tuple[Any, ...], name: str) -> Iterator[tuple[Any, str]]:
    """Each value with its name: the list's own, or the option before it (`--token`, its value)."""
    before = ""
    for value in values:
        is_option = isinstance(value, str) and re.fullmatch(r"--?[A-Za-z][\w.\-]*", value) is not None
        yield value, before if is_secret_name(before) and not is_option else name
        before = value.lstrip("-") if is_option else ""


def _secrets(text: str, name: str, place: str) -> list[tuple[int, int, str]]:
    """Where in a text secrets stand, in order, and what to write there; the text is the value of `name`."""
    if is_secret_name(name) or (place == "env" and _is_private_variable(name, text)):
        return [(0, len(text), REDACTED)] if text and not _ENVIRONMENT.fullmatch(text) else []
    found = [match.span("secret") for rule in _IN_URL for match in rule.finditer(text)]
    if not _TEMPLATE.search(text):  # a chat template sets variables
        found += [m.span("secret") for rule in _NAMED for m in rule.finditer(text) if is_secret_name(m["name"])]
    found += [match.span(match.lastgroup or 0) for match in _SERVICES.finditer(text)]
    for match in _RANDOM_AFTER.finditer(text):
        if not match["likely"] or match["likely"] == REDACTED or is_random(match["likely"]):
            found.append(match.span(match.lastgroup or 0))
    shaped = [match.span(match.lastgroup or 0) for match in _SHAPED.finditer(text)]
    found += [s for s in shaped if s[1] - s[0] >= 20 or not _NAME_OF_A_THING.search(name)]
    apart: list[tuple[int, int, str]] = []
    for start, end in sorted(found):
        if (not apart or start >= apart[-1][1]) and not _ENVIRONMENT.fullmatch(text[start:end]):
            apart.append((start, end, REDACTED))
    if place and not _PUBLIC_NAME.search(name):
        random = [(*s, RANDOM) for s in _random_runs(text) if all(s[1] <= a or s[0] >= b for a, b, _ in apart)]
        apart = sorted(apart + random)
    return apart


def _random_runs(text: str) -> Iterator[tuple[int, int]]:
    """Where something stands that looks like a key. A hash in a path or after `@` is a public version."""
    for run in re.finditer(r"[A-Za-z\d_+\-]{16,}={0,2}", text):
        pieces = [run] if is_random(run[0]) else re.finditer(r"[A-Za-z\d]{16,}", run[0])
        for piece in pieces:
            start = piece.start() + (0 if piece is run else run.start())
            end = start + len(piece[0])
            if is_random(piece[0]) and not _PUBLIC_HASH.search(text[max(0, start - 7) : end]):
                yield start, end


def _is_private_variable(name: str, text: str) -> bool:
    return name.isupper() and not _KNOWN_VARIABLE.fullmatch(name) and not _PLAIN.fullmatch(text)
