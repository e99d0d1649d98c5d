"""Values of a script inside our overrides.

`${oc.env:NAME}` is the shell's variable NAME, and text that only a shell can compute is a variable whose name holds it.
"""

from __future__ import annotations

import re

Piece = tuple[str, str]
"""(kind, text): `plain`; `expands` and `quoted`, where variables are put in; `array`."""
Word = list[Piece]

_KEPT = "VERL_MT_SHELL_"
_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)(?:,([^{}]*))?\}")


def kept(text: str, otherwise: str | None = None) -> str:
    """What only a shell can compute, `$(pwd)`, as a variable whose name holds the text; `shell_text` reads it.

    Args:
        otherwise: what it gives where none of its variables is set outside; None = not known.
    """
    default = "" if otherwise is None or re.search(r"[${},'\"]", otherwise) else f",{otherwise}"
    return f"${{oc.env:{_KEPT}{text.encode().hex()}{default}}}"


def without_variables(value: str) -> str | None:
    """A value where none of its variables is set outside; None where one has no default."""
    plain = _VARIABLE.sub(lambda found: found[0] if found[2] is None else found[2], value)
    return None if "${" in plain else plain


def shell_text(name: str) -> str | None:
    """The text that `kept` has put into a variable's name; None for a variable of the user's."""
    return bytes.fromhex(name.removeprefix(_KEPT)).decode() if name.startswith(_KEPT) else None


def for_shell(value: str) -> str:
    """A value with its variables as a shell writes them."""

    def text(found: re.Match[str]) -> str:
        computed = shell_text(found[1])
        if computed is not None:
            return computed
        return f"${{{found[1]}}}" if found[2] is None else f"${{{found[1]}:-{found[2]}}}"

    while (plain := _VARIABLE.sub(text, value)) != value:  # a default may hold another variable
        value = plain
    return value


def is_known(value: str) -> bool:
    """Whether a value needs no shell."""
    return "${oc.env:" not in value
