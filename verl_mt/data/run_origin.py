"""Whether a run directory is this user's own: commands that read one run the code that its `config.yaml` names.

Run directories are shared, so a `config.yaml` can come from any user. A run signs its own (`.origin`, HMAC-SHA256) with
a random key of the user, `$XDG_STATE_HOME/verl_mt/key` (default: `~/.local/state/verl_mt/key`). Without that signature
the command needs `--trust`.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError, DataError
from verl_mt.reading import read_bytes, read_yaml

FILE = ".origin"
_CODE = re.compile(r"\S+\.py(:\w+)?|(?!verl_mt\b)[A-Za-z_]\w*((\.\w+)*:\w+|(\.\w+)+)")
_DATA = re.compile(r".*\.(parquet|jsonl?|ya?ml|jinja|txt|csv|safetensors)")
_SHOWN = 8


def sign(run: Path, config: bytes) -> None:
    """Mark a run directory with this `config.yaml` as this user's own. Without a home folder it stays unmarked."""
    try:
        (run / FILE).write_text(_signature(config, _key(create=True)))
    except (OSError, RuntimeError):
        (run / FILE).unlink(missing_ok=True)


def is_own(run: Path) -> bool:
    """Whether a run of this user wrote the `config.yaml` there, and nobody has changed it."""
    try:
        expected = _signature(read_bytes(run / "config.yaml"), _key(create=False))
        return hmac.compare_digest(read_bytes(run / FILE), expected.encode())
    except (OSError, RuntimeError, DataError):
        return False


def require_trust(run: Path, *, trust: bool) -> None:
    """Before anything is imported that a run's `config.yaml` names.

    Raises:
        ConfigError: it is not this user's own, and `trust` is off; lists the code that it names.
        DataError: it cannot be read.
    """
    if trust or is_own(run):
        return
    file = run / "config.yaml"
    named = list(_code(read_yaml(file)))
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    names = f" It names {', '.join(named[:_SHOWN])}{more}." if named else ""
    raise ConfigError(
        f"{file} was not written by one of your runs, or was changed since. This command runs code that it names."
        f"{names} Read it, then give --trust (Python: trust=True)"
    )


def _code(value: Any, key: str = "") -> Iterator[str]:
    """`key=value` of whatever looks like code of somebody's own."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _code(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _code(item, f"{key}[{number}]")
    elif value is True and key.endswith("trust_remote_code"):
        yield f"{key}=true"
    elif isinstance(value, str) and value:
        looks_like_code = _CODE.fullmatch(value) is not None and _DATA.fullmatch(value) is None
        if looks_like_code or key.endswith("_config_path"):
            yield f"{key}={value}"


def _signature(config: bytes, key: bytes) -> str:
    return hmac.new(key, config, "sha256").hexdigest()


def _key(*, create: bool) -> bytes:
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "verl_mt"
    file = folder / "key"
    if create and not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".key.{os.getpid()}"
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(secrets.token_bytes(32))
        try:
            os.link(draft, file)
        except FileExistsError:  # another run was faster
            pass
        finally:
            draft.unlink()
    return file.read_bytes()
